"""The view of the engine's figures."""
import re
import time

from page_case import ScriptedTest


class EngineView(ScriptedTest):
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
            "6,400 tokens of cache (bf16)", "drafts accepted by position: 75 %, 25 %"])
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
