"""What holds for every server and model that can think: nothing depends on what the answers say."""
import time

from selenium.webdriver.common.keys import Keys

from page_case import ARGUMENTS, PageTest
from scripted_server import ScriptedServer

STATS = (r"^([\d.,]+ tokens/s\n?·?)?\s*first after [\d.]+ m?s.*\d+ tokens?.*"
         r"prompt [\d,]+, ([\d,]+|none) from cache")


class ClickThrough(PageTest):
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
