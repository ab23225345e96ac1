"""A small screen with touch, and names for those who do not see the page."""
from selenium.webdriver.common.keys import Keys

from page_case import ScriptedTest


class Access(ScriptedTest):
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
