#!/usr/bin/env python3
"""A click-through of the web page in headless Chromium.

    page_test.py [--server URL] [--pictures FOLDER] [unittest's arguments]

ClickThrough runs against the server at URL (without one, against the scripted server); Scripted and
Errors always run against the scripted server, for what a small model can't be made to show. --pictures
saves what they see. With both, Documents saves the documents' pictures, page.png and live.png, of a
server with the bundled model.
"""
import argparse
import json
import pathlib
import re
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

from selenium.webdriver.common.keys import Keys

from browser import Browser
from scripted_server import LONG_ANSWER, ScriptedServer

ARGUMENTS = argparse.Namespace(server=None, pictures=None)
STATS = (r"^([\d.,]+ tokens/s\n?·?)?\s*first after [\d.]+ m?s.*\d+ tokens?.*"
         r"prompt [\d,]+, ([\d,]+|none) from cache")


class PageTest(unittest.TestCase):
    expected_errors = r"$^"  # of the console: a failed request is logged there

    def open(self, url, **options):
        self.page = Browser(url, **options)
        self.addCleanup(self.page.close)
        self.page.wait(lambda: self.page.all(".dot.ready"), "the model's name")

    def tearDown(self):
        bad = [line for line in self.page.console() if not re.search(self.expected_errors, line)]
        self.assertEqual(bad, [], "the console must be silent: no policy violation, no error")

    def picture(self, name):
        if ARGUMENTS.pictures:
            time.sleep(0.4)
            self.page.picture(pathlib.Path(ARGUMENTS.pictures) / name)


class Documents(PageTest):
    """The pictures of docs/images: a server with the bundled model, asked and under load."""

    def setUp(self):
        if not (ARGUMENTS.server and ARGUMENTS.pictures):
            self.skipTest("takes --server and --pictures")
        self.open(ARGUMENTS.server, height=720)

    def test_a_conversation(self):
        page = self.page
        page.set(temperature="0", thinking="on")
        self.assertEqual(page.ask("Compute 314 + 159."), "314 + 159 = 473.")
        page.last(".think summary").click()
        page.set(thinking="off")
        self.assertIn("Once upon a time", page.ask("Tell me a story about a fox."))
        self.picture("page.png")

    def test_the_engine_under_load(self):
        page = self.page
        body = {"messages": [{"role": "user", "content": "Tell me a story."}], "n": 4, "seed": 1,
                "temperature": 1.0, "max_tokens": 300, "ignore_eos": True}
        ends = threading.Event()

        def ask(number):
            while not ends.is_set():
                request = urllib.request.Request(
                    ARGUMENTS.server + "/v1/chat/completions",
                    json.dumps({**body, "seed": number}).encode(), {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=60).read()

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        page.click("The engine, live")
        time.sleep(55)
        self.picture("live.png")
        ends.set()
        for client in clients:
            client.join()


class ClickThrough(PageTest):
    """Holds for every server and model that can think: nothing depends on what the answers say."""

    def setUp(self):
        url = ARGUMENTS.server
        if not url:
            server = ScriptedServer()
            self.addCleanup(server.close)
            url = server.url
        self.open(url)

    def test_ask_edit_regenerate_reload(self):
        page = self.page
        self.assertTrue(page.text("#model-name"))
        self.assertTrue(page.ask("What is 12 + 30?"))
        self.assertRegex(page.text(".stats").replace("\n", " "), STATS)

        page.click("Edit")
        editor = page.last(".editor textarea")
        editor.clear()
        editor.send_keys("What is 17 * 23?", Keys.ENTER)
        page.wait(lambda: page.questions() == ["What is 17 * 23?"], "the edited question")
        page.wait_idle()
        self.assertEqual(len(page.answers()), 1)
        self.assertEqual(page.text(".message.user .versions"), "2/2")
        page.click("Earlier version", ".message.user")
        self.assertEqual(page.questions(), ["What is 12 + 30?"])
        page.click("Later version", ".message.user")

        page.click("Answer again")
        page.wait(lambda: page.texts(".message.assistant .versions") == ["2/2"],
                  "the second version of the answer")
        page.wait_idle()
        page.ask("Give me a JSON object with a name and an age.")
        questions, answers = page.questions(), page.answers()
        self.assertEqual(len(answers), 2)

        page.driver.refresh()
        page.wait(lambda: page.questions() == questions, "the conversation after reloading")
        self.assertEqual(page.answers(), answers)
        page.click("New conversation")
        self.assertEqual(page.questions(), [])
        page.last("#chats .open").click()
        self.assertEqual(page.questions(), questions)

    def test_stop(self):
        page = self.page
        page.send("Tell me a very long story about the sea.")
        page.wait(lambda: page.answers() or not page.is_answering(), "the first words")
        page.press(Keys.ESCAPE)
        page.wait_idle()
        text = page.answers()[-1]
        time.sleep(0.5)
        self.assertEqual(page.answers()[-1], text)
        self.assertEqual(page.all(".notice"), [])
        self.assertTrue(page.ask("What is 12 + 30?"))

    def test_thinking_folds(self):
        page = self.page
        page.set(thinking="on")
        page.ask("What is 12 + 30?")
        self.assertRegex(page.text(".think summary"), r"^Thought( for [\d.]+ m?s)?$")
        self.assertEqual(page.texts(".think .text"), [])
        page.last(".think summary").click()
        page.wait(lambda: page.text(".think .text"), "the reasoning")
        page.last(".think summary").click()
        self.assertEqual(page.texts(".think .text"), [])
        page.set(thinking="off")
        page.ask("What is 12 + 30?")
        self.assertEqual(len(page.all(".think summary")), 1)

    def test_theme_follows_the_system_until_it_is_switched(self):
        page = self.page
        shown = lambda: page.js("return document.documentElement.dataset.theme")
        ground = lambda: page.js("return getComputedStyle(document.body).backgroundColor")
        light = ground()
        page.system_theme("dark")
        page.wait(lambda: shown() == "dark", "the system's theme")
        self.assertNotEqual(ground(), light)
        page.click("Theme: as the system")
        self.assertEqual(shown(), "light")
        page.driver.refresh()
        self.assertEqual(shown(), "light")
        page.click("Theme: light")
        page.system_theme("light")
        self.assertEqual(shown(), "dark")
        page.click("Theme: dark")
        self.assertEqual(shown(), "light")


class Scripted(PageTest):
    def setUp(self):
        self.server = ScriptedServer()
        self.addCleanup(self.server.close)
        self.open(self.server.url)

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

    def test_two_conversations_are_answered_at_once(self):
        page = self.page
        page.send("slowly")
        page.wait(page.answers, "the first words")
        page.click("New conversation")
        page.ask("Meanwhile")
        self.assertEqual(page.questions(), ["Meanwhile"])
        page.last("#chats .busy .open").click()
        self.assertTrue(page.is_answering())
        before = page.answers()[-1]
        page.wait(lambda: len(page.answers()[-1]) > len(before), "more words")
        page.press(Keys.ESCAPE)
        page.wait_idle()

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

    def test_markdown(self):
        page = self.page
        page.ask("document")
        within = lambda selector: page.texts(".message.assistant .prose " + selector)
        self.assertEqual(within("h2"), ["Reading a file line by line"])
        self.assertEqual(within("thead th"), ["way", "memory", "speed"])
        self.assertEqual(within("tbody tr:nth-child(2) td"),
                         ["readlines()", "the whole file, as a list", "1.3"])
        self.assertEqual(within("td.right"), ["1.0", "1.3", "1.1"])
        self.assertEqual(within("em"), ["what they hold in memory"])
        self.assertEqual(within("ol > li > ul > li"),
                         ["tabs count as white space,", "so does the newline at the end."])
        self.assertEqual(within("blockquote"), ["A generator would let the caller stop early."])
        link = page.last(".prose a")
        self.assertIn("noopener", link.get_attribute("rel"))
        self.picture("document.png")
        page.click("Copy", ".code")
        copied = page.driver.execute_async_script(
            "navigator.clipboard.readText().then(arguments[0], (e) => arguments[0](String(e)))")
        self.assertEqual(copied, LONG_ANSWER.split("```")[1].removeprefix("python\n").rstrip("\n"))
        page.wait(lambda: page.text(".code button") == "Copied", "the button to say so")

    def test_code_is_coloured(self):
        page = self.page
        page.ask("document")
        kinds = lambda kind: page.texts(f".code .{kind}")
        self.assertIn("def", kinds("keyword"))
        self.assertEqual(kinds("comment"), ["# one line at a time"])
        self.assertEqual(kinds("string"), ['"utf-8"'])
        self.assertEqual(kinds("number"), ["0", "1"])
        self.assertIn("count_words", kinds("called"))
        code = LONG_ANSWER.split("```")[1].removeprefix("python\n").rstrip("\n")
        self.assertEqual(page.js("return document.querySelector('.code code').textContent"), code)
        # Every language keeps every character, whatever it is.
        hostile = "a \"b\\\" 'c ` /* // # -- <!-- <a href='x'> 0x1F $ \\ @@ +1 \n-2 </b> " * 3
        for language in ("c++", "js", "python", "rust", "go", "bash", "sql", "json", "yaml", "css", "html",
                         "diff", "unknown", ""):
            self.server.answer = f"```{language}\n{hostile}\n```"
            page.click("New conversation")
            page.send("whole")
            page.wait_idle()
            self.assertEqual(page.js("return document.querySelector('.code code').textContent"), hostile,
                             language)

    def test_formulas(self):
        page = self.page
        page.ask("formulas")
        drawn = lambda: page.js("return [...document.querySelectorAll('.prose .math math')].map((e) =>"
                                "e.querySelector('annotation').textContent.trim())")
        self.assertEqual(drawn(), [
            "ax^2 + bx + c = 0", r"x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", "a = 1",
            "\\sum_{k=1}^{n} k\n= \\frac{n(n+1)}{2}\n+ 0", r"\alpha \le \beta",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\href{javascript:alert(1)}{x}"])
        self.assertEqual(len(page.all(".math.display math")), 2)
        self.assertGreater(page.js("return document.querySelector('.math.display mfrac')"
                                   ".getBoundingClientRect().height"), 20)
        # What KaTeX refuses stays as it was written, and so does what is none.
        self.assertEqual(page.texts(".math.raw"), [r"$\frac{1}{$"])
        self.assertEqual(page.all(".math [href], .math [style]"), [])
        self.assertIn("It costs $5 and not $10, or $5-$10.", page.answers()[-1])
        self.assertEqual(page.texts(".prose :not(pre) > code"), ["$code$"])
        self.assertIn("so does $a$.", page.answers()[-1])
        self.assertEqual(page.all(".prose a"), [])
        self.picture("formulas.png")
        # A formula that is being written is text until it ends; what is too much is text too.
        self.server.answer = "$x$ " * 3000
        page.click("New conversation")
        page.send("whole")
        page.wait_idle()
        self.assertEqual(len(page.all(".math math")), 400)

    def test_search_in_the_history(self):
        page = self.page
        titles = lambda: page.texts("#chats .open")
        page.ask("About whales")
        page.ask("echo The blue whale eats krill by the ton")
        page.click("New conversation")
        page.ask("About rivers")
        page.last("#find").send_keys("WHALES")
        self.assertEqual(titles(), ["About whales"])
        field = page.last("#find")
        field.clear()
        field.send_keys("eats krill")
        page.wait(lambda: len(titles()) == 1, "the one that has it in a text")
        self.assertEqual(titles()[0].split("\n")[0], "About whales")
        self.assertEqual(page.texts("#chats mark"), ["eats krill"])
        self.picture("search.png")
        page.last("#chats .open").click()
        self.assertEqual(page.questions()[0], "About whales")
        field.clear()
        field.send_keys("giraffes")
        page.wait(lambda: page.texts("#chats .none") == ["Nothing found."], "nothing")
        field.send_keys(Keys.ESCAPE)
        page.wait(lambda: len(titles()) == 2, "all of them again")

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

    def test_the_engine_live(self):
        page = self.page
        page.ask("One")
        page.click("The engine, live")
        tile = lambda title: next(text for text in page.texts(".tile") if text.startswith(title + "\n"))
        page.wait(lambda: self.server.scrapes >= 4, "some answers of /metrics")
        page.wait(lambda: "tokens/s" in tile("Tokens per second"), "a rate")
        self.assertEqual(page.texts(".tile h3"), [
            "Tokens per second", "Running", "Waiting", "KV cache in use", "Time to first token", "Step time"])
        self.assertRegex(tile("Running"), r"\n[78]\n")
        self.assertIn("\n3\n", tile("Waiting"))
        self.assertIn("\n25 %\n", tile("KV cache in use"))
        self.assertIn("\n120 ms\n", tile("Time to first token"))
        self.assertIn("\n4 ms\n", tile("Step time"))
        rate = float(re.search(r"([\d,]+) tokens/s", tile("Tokens per second")).group(1).replace(",", ""))
        # At most 5,600 more from one scrape to the next, which are a second apart or more.
        self.assertTrue(0 < rate < 5700, rate)
        self.assertEqual(page.texts("#engine-facts span"), [
            "Fathom 1.2.3 (abcdef012345, changed)", "scripted", "up 2 h 1 min", "1.50 GiB resident",
            "6,400 tokens of cache (bf16)"])
        # Charts: a line for each series, within its frame.
        lines = page.js("return [...document.querySelectorAll('.chart .line')].map((e) => e.getAttribute('d'))")
        self.assertEqual(len(lines), 8)
        for line in lines:
            points = [tuple(map(float, point.split())) for point in re.split("[ML]", line)[1:]]
            self.assertTrue(all(0 <= x <= 300 and 0 <= y <= 84 for x, y in points), line)
        self.assertGreaterEqual(len(lines[2].split("L")), 3)
        self.assertEqual(page.all("#question"), [])
        self.assertTrue(page.driver.current_url.endswith("#engine"))
        self.picture("engine.png")
        page.driver.refresh()
        page.wait(lambda: page.all(".tile"), "the view after reloading")
        before = self.server.scrapes
        page.click("Back to the conversation")
        self.assertEqual(page.questions(), ["One"])
        self.assertFalse(page.driver.current_url.endswith("#engine"))
        after = self.server.scrapes
        time.sleep(2.5)  # it asks once a second while it is open
        self.assertLessEqual(self.server.scrapes, after + 1)
        self.assertGreater(before, 0)

    def test_the_engine_while_the_model_loads(self):
        page = self.page
        self.server.loading = True
        page.click("The engine, live")
        page.wait(lambda: "being loaded" in page.text("#engine-notice"), "the reason")
        self.assertEqual({text[0] for text in page.texts(".tile .value")}, {"–"})
        self.server.loading = False
        page.wait(lambda: not page.all("#engine-notice .notice"), "the figures")

    def test_what_a_model_wrote_is_never_markup(self):
        page = self.page
        hostile = ["<script>document.title = 'bad'</script>", "<img src=x onerror=alert(1)>",
                   "[click](javascript:alert(1))", "![picture](https://example.org/a.png)",
                   "[data](data:text/html,x)", "<b style=color:red>bold</b>", "[x](https://a.b \"t\")"]
        text = "Look: " + " and ".join(hostile)
        page.ask("echo " + text)
        self.assertIn(hostile[0], page.answers()[-1])
        self.assertIn("[click](javascript:alert(1))", page.answers()[-1])
        made = page.js("return [...document.querySelectorAll('.message.assistant > .prose *')]"
                       ".map((e) => e.tagName + ' ' + (e.getAttribute('href') ?? ''))")
        self.assertEqual(made, ["P ", "A https://example.org/a.png", "A https://a.b/"])
        self.assertEqual(page.driver.title, f"{('echo ' + text)[:60].strip()} · Fathom")

    def test_marks_that_never_close_stay_text_and_cost_little(self):
        page = self.page
        for text in ("**a " * 20000, "> " * 20000, "[" * 50000, "`a ``b " * 9000, "| - " * 9000,
                     "- " * 20000 + "a", "*_" * 20000, "$a " * 20000, "$$\n" * 20000, "\\[\n" * 20000,
                     "$a$" * 20000, "```c\n" + "/*'\"" * 9000, "```html\n" + "<a b='" * 9000):
            before = page.cpu_seconds()
            self.server.answer = text
            page.click("New conversation")
            page.send("whole")
            page.wait_idle()
            shown = page.js("return document.querySelector('.message.assistant > .prose').textContent")
            self.assertGreater(len(shown), 0)
            self.assertLess(page.cpu_seconds() - before, 5, text[:10])

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

    def test_the_list_rename_delete_export_import(self):
        page = self.page
        titles = lambda: page.texts("#chats .open")
        page.ask("First question")
        page.click("New conversation")
        page.ask("Second question")
        self.assertEqual(titles(), ["Second question", "First question"])
        page.click("Rename Second question")
        field = page.last("#chats input")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys("Renamed", Keys.ENTER)
        self.assertEqual(titles()[0], "Renamed")

        with tempfile.TemporaryDirectory() as folder:
            page.driver.execute_cdp_cmd("Browser.setDownloadBehavior",
                                        {"behavior": "allow", "downloadPath": folder})
            page.click("Export all")
            file = page.wait(lambda: list(pathlib.Path(folder).glob("*.json")), "the file")[0]
            data = json.loads(file.read_text())
            self.assertEqual(sorted(c["title"] for c in data["conversations"]),
                             ["First question", "Renamed"])
            page.click("Delete Renamed")
            self.assertEqual(titles(), ["First question"])
            page.click("Undo")
            self.assertEqual(titles(), ["Renamed", "First question"])
            page.click("Delete Renamed")
            page.driver.find_element("id", "import-file").send_keys(str(file))
            page.wait(lambda: titles() == ["Renamed", "First question"], "the import")
            file.write_text('{"format": "other"}')
            page.driver.find_element("id", "import-file").send_keys(str(file))
            page.wait(lambda: "no conversations" in page.text("#toast"), "the refusal")

    def test_a_full_storage_is_said_and_nothing_is_lost(self):
        page = self.page
        page.ask("First question")
        page.js("let text = 'x'.repeat(2 ** 20); for (let i = 0; text.length > 10; ++i) try {"
                "localStorage.setItem('other' + i, text); } catch { text = text.slice(text.length / 2); }")
        page.click("New conversation")
        page.ask("Second question")
        self.assertIn("storage is full", page.text("#toast"))
        self.assertEqual(page.texts("#chats .open"),
                         ["Second question", "First question"])

    def test_on_a_phone(self):
        self.page.close()
        self.open(self.server.url, width=390, height=844, dark=True, phone=True)
        page = self.page
        page.last("#question").send_keys("document", Keys.ENTER)  # Enter makes a line there
        self.assertEqual(page.questions(), [])
        page.click("Send")
        page.wait(page.answers, "the answer")
        page.wait_idle()
        self.picture("phone.png")
        self.assertEqual(page.js("return document.documentElement.scrollWidth"), 390)
        self.assertEqual(page.all("#chats .open"), [])
        page.click("The engine, live")
        page.wait(lambda: self.server.scrapes >= 3, "some answers of /metrics")
        self.picture("phone-engine.png")
        self.assertEqual(page.js("return document.documentElement.scrollWidth"), 390)
        page.click("Back to the conversation")
        page.click("Conversations")
        self.assertEqual(page.text("#chats .open"), "document")
        page.press(Keys.ESCAPE)
        page.wait(lambda: not page.all("#chats .open"), "the list to close")

    def test_every_control_has_a_name(self):
        self.page.ask("document")
        self.page.click("Settings")
        nameless = self.page.js(
            "return [...document.querySelectorAll('button, input, textarea, select')].filter((e) =>"
            "!e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length)"
            ".map((e) => e.outerHTML)")
        self.assertEqual(nameless, [])


class Errors(PageTest):
    expected_errors = r"Failed to load resource: the server responded with a status of \d+"

    def setUp(self):
        self.server = ScriptedServer()
        self.addCleanup(self.server.close)
        self.open(self.server.url)

    def retry(self):
        self.page.click("Retry")
        self.page.wait(lambda: not self.page.all(".notice"), "the error to go")
        self.page.wait_idle()

    def fail(self, question):
        self.page.send(question)
        return self.page.text(".notice")

    def test_busy_with_a_time_to_wait(self):
        page = self.page
        text = self.fail("busy now")
        self.assertIn("The server is busy. 512 requests are waiting, the limit is 512", text)
        self.assertRegex(text, r"Retry in [12] s")
        self.assertFalse(page.last(".notice button").is_enabled())
        self.picture("error.png")
        self.retry()
        self.assertEqual(page.answers(), ["There was room at the second try."])
        self.assertEqual(page.all(".versions"), [])

    def test_starting(self):
        self.assertIn("not ready. The model is being loaded", self.fail("starting up"))
        self.retry()
        self.assertEqual(self.page.answers(), ["It is up."])

    def test_a_refused_request_is_there_after_reloading(self):
        self.assertIn("temperature is 3, the limit is 2", self.fail("wrong"))
        self.page.driver.refresh()
        self.assertIn("temperature is 3, the limit is 2", self.page.text(".notice"))
        self.assertTrue(self.page.button("Retry").is_enabled())

    def test_a_question_that_failed_is_not_sent_again_and_its_card_goes(self):
        page = self.page
        page.ask("First")
        self.assertIn("temperature is 3", self.fail("wrong question"))
        page.ask("Second")
        self.assertEqual([m["content"] for m in self.server.requests[-1]["messages"] if m["role"] == "user"],
                         ["First", "Second"])
        self.assertEqual([m["role"] for m in self.server.requests[-1]["messages"]],
                         ["user", "assistant", "user"])
        self.assertEqual(page.all(".notice"), [])
        self.assertEqual(page.questions(), ["First", "Second"])
        page.driver.refresh()
        self.assertEqual(page.wait(page.questions, "the conversation"), ["First", "Second"])
        # At the beginning of a conversation too.
        page.click("New conversation")
        self.fail("wrong from the start")
        page.ask("Better")
        self.assertEqual([m["content"] for m in self.server.requests[-1]["messages"]], ["Better"])
        self.assertEqual(page.questions(), ["Better"])

    def test_an_answer_that_failed_leaves_the_others_of_its_question(self):
        page = self.page
        self.fail("busy again")
        self.retry()
        self.server.seen.clear()
        page.click("Answer again")
        page.wait(lambda: page.all(".notice"), "the failure")
        page.ask("Next")
        self.assertEqual([m["content"] for m in self.server.requests[-1]["messages"]],
                         ["busy again", "There was room at the second try.", "Next"])
        self.assertEqual(page.all(".notice"), [])

    def test_conversations_that_were_kept_with_a_failure_inside(self):
        page = self.page
        page.ask("First")
        page.js("""for (const key of Object.keys(localStorage).filter((k) => k.startsWith('fathom.chat.'))) {
            const chat = JSON.parse(localStorage.getItem(key));
            const last = chat.nodes.at(-1).id;
            chat.nodes.push({id: 'u2', parent: last, role: 'user', text: 'Lost'},
                {id: 'a2', parent: 'u2', role: 'assistant', text: '', error: {message: 'no', status: 400}},
                {id: 'u3', parent: 'a2', role: 'user', text: 'Second'},
                {id: 'a3', parent: 'u3', role: 'assistant', text: 'Yes.', finish: 'stop'});
            localStorage.setItem(key, JSON.stringify(chat)); }""")
        page.driver.refresh()
        page.wait(lambda: len(page.questions()) == 3, "the conversation")
        page.ask("Third")
        self.assertEqual([m["content"] for m in self.server.requests[-1]["messages"] if m["role"] == "user"],
                         ["First", "Second", "Third"])

    def test_the_engine_wants_a_key(self):
        page = self.page
        self.server.key = "a-secret"
        page.click("The engine, live")
        page.wait(lambda: "API key is missing" in page.text("#engine-notice"), "the reason")
        page.click("Enter a key", "#engine-notice")
        page.last('#settings [name="key"]').send_keys("a-secret")
        page.click("Done", "#settings")
        page.wait(lambda: not page.all("#engine-notice .notice"), "the figures")

    def test_an_error_within_the_stream_keeps_what_came(self):
        self.assertIn("The engine stopped", self.fail("broken"))
        self.assertEqual(self.page.answers(), ["This ends with an"])

    def test_a_connection_that_ends_early(self):
        self.assertIn("The connection ended before the answer did", self.fail("cut"))
        self.assertEqual(self.page.answers(), ["This just"])

    def test_a_key_is_kept_only_when_that_is_said(self):
        page = self.page
        stored = lambda: page.js("return localStorage.getItem('fathom.settings') ?? ''")
        self.server.key = "a-secret"
        self.assertIn("The API key is missing or wrong", self.fail("Hello"))
        page.click("Enter a key")
        page.last('#settings [name="key"]').send_keys("a-secret")
        page.click("Done", "#settings")
        # It is asked again by itself.
        page.wait(lambda: not page.all(".notice"), "the error to go")
        page.wait_idle()
        self.assertEqual(page.questions(), ["Hello"])
        self.assertEqual(len(page.answers()), 1)
        self.assertNotIn("a-secret", stored())
        page.set(keep_key=True)
        self.assertIn("a-secret", stored())
        page.driver.refresh()
        page.ask("Hello again")
        self.assertEqual(page.all(".notice"), [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--server")
    parser.add_argument("--pictures")
    ARGUMENTS, rest = parser.parse_known_args()
    if ARGUMENTS.pictures:
        pathlib.Path(ARGUMENTS.pictures).mkdir(parents=True, exist_ok=True)
    unittest.main(argv=[sys.argv[0], *rest])
