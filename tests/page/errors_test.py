"""What fails: what is said of it, what is kept, and how it is asked again."""
from page_case import ScriptedTest


class Errors(ScriptedTest):
    expected_errors = r"Failed to load resource: the server responded with a status of \d+"

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
