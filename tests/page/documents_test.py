"""The pictures of docs/images: a server with the bundled model, asked and under load."""
import json
import threading
import time
import urllib.request

from page_case import ARGUMENTS, PageTest


class Documents(PageTest):
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
