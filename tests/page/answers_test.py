"""What is asked and what is answered: streaming, reasoning, attached files, calls of tools."""
import pathlib
import tempfile

from selenium.webdriver.common.keys import Keys

from page_case import ScriptedTest
from scripted_server import LONG_ANSWER


class Answers(ScriptedTest):
    def test_an_answer_streams_and_stops(self):
        page = self.page
        page.send("slowly")
        first = page.wait(page.answers, "the first words")[-1]
        page.wait(lambda: len(page.answers()[-1]) > len(first), "more words")
        page.wait(lambda: "tokens/s" in page.text(".stats"), "the live rate")
        page.click("Stop")
        page.wait_idle()
        self.assertTrue(page.text(".stats").endswith("stopped"))
        page.wait(lambda: self.server.aborted == 1, "the server to see the connection close")
        page.driver.refresh()
        self.assertTrue(page.answers()[-1].startswith("one more word"))

    def test_a_long_answer_at_full_speed(self):
        page = self.page
        self.server.answer = LONG_ANSWER * 60  # 75 kB, 10,000 words
        page.send("quickly")
        # The page stays usable: no turn of its event loop takes longer than this.
        worst = page.driver.execute_async_script(
            "let last = performance.now(), worst = 0; const tick = setInterval(() => {"
            "const now = performance.now(); worst = Math.max(worst, now - last); last = now;"
            "if (document.getElementById('stop').hidden) { clearInterval(tick); arguments[0](worst); }"
            "}, 1)")
        self.assertEqual(len(page.all(".prose table")), 60)
        self.assertLess(worst, 500, "ms")

    def test_what_is_sent(self):
        page = self.page
        page.set(system="Be brief.", thinking="on", temperature="0.5", top_p="0.9",
                 max_tokens="100", seed="7")
        page.ask("One")
        page.ask("Two")
        request = self.server.requests[-1]
        answer = "The answer to that is a sentence of ten short words."
        self.assertEqual(request, {
            "model": "scripted", "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "temperature": 0.5, "top_p": 0.9, "max_tokens": 100, "seed": 7,
            "chat_template_kwargs": {"thinking": True},
            "messages": [{"role": "system", "content": "Be brief."},
                         {"role": "user", "content": "One"},
                         {"role": "assistant", "content": answer},
                         {"role": "user", "content": "Two"}]})
        page.click("Settings")
        page.click("Reset", "#settings")
        page.click("Done", "#settings")
        page.ask("Three")
        self.assertEqual(set(self.server.requests[-1]),
                         {"model", "stream", "stream_options", "messages"})

    def test_thinking_is_folded_and_seen_to_go_on(self):
        page = self.page
        page.send("think about 17 * 23")
        page.wait(lambda: page.all(".think.going"), "the block that thinks")
        self.assertRegex(page.text(".think summary"), r"^Thinking, \d+ s$")
        self.assertEqual(page.all(".think .text"), [])
        page.last(".think summary").click()
        page.wait(lambda: page.text(".think .text").startswith("The user asks"), "its text")
        self.picture("thinking.png")
        page.wait_idle()
        self.assertRegex(page.text(".think summary"), r"^Thought for [\d.]+ s$")
        self.assertEqual(page.answers(), ["17 * 23 = 391."])
        self.assertEqual(page.text(".think .text strong"), "391")

        page.ask("Next")  # the earlier reasoning is not sent again
        self.assertEqual(self.server.requests[-1]["messages"][1],
                         {"role": "assistant", "content": "17 * 23 = **391**."})
        page.driver.refresh()
        page.last(".think summary").click()
        page.wait(lambda: page.text(".think .text").startswith("The user asks"), "its text again")
        page.last(".think summary").click()
        self.assertEqual(page.all(".think .text"), [])

    def test_text_files_are_attached(self):
        page = self.page
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "notes.md").write_text("# Notes\n```\ninner\n```\n<b>not bold</b>\n")
            (folder / "data.csv").write_text("a,b\n1,2\n")
            (folder / "binary.dat").write_bytes(b"\0\1\2\xff")
            (folder / "large.txt").write_text("x" * 500_001)
            choose = lambda name: page.driver.find_element("id", "attach-file").send_keys(str(folder / name))
            choose("binary.dat")
            page.wait(lambda: "binary.dat is no text" in page.text("#toast"), "the refusal")
            choose("large.txt")
            page.wait(lambda: "has 500,001 bytes, the limit is 500,000" in page.text("#toast"), "the refusal")
            for name in ("notes.md", "data.csv"):
                choose(name)
                page.wait(lambda: name in page.text("#attached"), name)
            choose("notes.md")
            page.wait(lambda: len(page.all("#attached .file")) == 3, "the third")
            page.click("Remove notes.md", "#attached")
            page.wait(lambda: len(page.all("#attached .file")) == 2, "two files")
        page.ask("Compare these")
        self.assertEqual(self.server.requests[-1]["messages"], [{"role": "user", "content":
            "notes.md:\n````\n# Notes\n```\ninner\n```\n<b>not bold</b>\n````\n\n"
            "data.csv:\n```\na,b\n1,2\n```\n\nCompare these"}])
        self.assertEqual(page.all("#attached .file"), [])
        self.assertEqual([text.split("\n")[0] for text in page.texts(".message.user .file summary")],
                         ["notes.md", "data.csv"])
        page.last(".file summary").click()
        self.assertEqual(page.text(".message.user .file pre"), "a,b\n1,2")
        self.picture("files.png")
        page.driver.refresh()
        page.ask("And now?")
        self.assertIn("a,b", self.server.requests[-1]["messages"][0]["content"])
        # An edited question keeps its files.
        page.click("New conversation")
        page.last("#chats .open").click()
        page.js("document.querySelector('.message.user [aria-label=Edit]').click()")
        editor = page.last(".editor textarea")
        editor.clear()
        editor.send_keys("Once more", Keys.ENTER)
        page.wait(lambda: page.questions() == ["Once more"], "the edited question")
        page.wait_idle()
        self.assertTrue(self.server.requests[-1]["messages"][0]["content"].endswith("```\n\nOnce more"))
        self.assertIn("notes.md:", self.server.requests[-1]["messages"][0]["content"])

    def test_tool_calls_and_their_results(self):
        page = self.page
        page.set(tools='[{"type": "function", "function": {"name": "get_weather"}}]')
        page.send("call the weather")
        fields = page.wait(lambda: len(page.all(".call textarea")) == 2 and
                           page.all(".call textarea"), "fields for the results")
        self.assertEqual(self.server.requests[-1]["tools"][0]["function"]["name"], "get_weather")
        self.assertEqual(page.text(".call .name"), "Calls get_weather")
        self.assertEqual(page.texts(".call dd"), ["Oslo", "3", "Rome", "3"])
        fields[0].send_keys("rain")
        fields[1].send_keys("sun")
        self.picture("calls.png")
        page.click("Send the results")
        page.wait(lambda: page.answers(), "the answer")
        page.wait_idle()
        self.assertEqual(self.server.requests[-1]["messages"][1:], [
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": f"call_{i}", "type": "function", "function": {
                    "name": "get_weather", "arguments": f'{{"city": "{city}", "days": 3}}'}}
                for i, city in enumerate(("Oslo", "Rome"))]},
            {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"}])
        self.assertEqual(page.texts(".call .result"), ["rain", "sun"])
