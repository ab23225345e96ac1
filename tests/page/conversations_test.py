"""Several conversations: at once, in the list, in the search, in the browser's storage."""
import json
import pathlib
import tempfile

from selenium.webdriver.common.keys import Keys

from page_case import ScriptedTest


class Conversations(ScriptedTest):
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
