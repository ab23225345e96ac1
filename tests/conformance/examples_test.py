"""Every example of examples/ runs as its reader would run it and prints what its page promises."""
import os
import subprocess
import sys

from served import ANSWER, KEY, SOURCE, ServedTest

EXAMPLES = os.path.join(SOURCE, "examples")


class ExamplesTest(ServedTest):
    def run_example(self, name):
        command = [os.path.join(EXAMPLES, name)]
        if name.endswith(".py"):
            command.insert(0, sys.executable)
        environment = {**os.environ, "FATHOM_URL": self.server.url, "FATHOM_KEY": KEY}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        return done.stdout

    def test_chat_sh(self):
        whole, streamed = self.run_example("chat.sh").split("\n", 1)
        self.assertIn(ANSWER, whole)
        self.assertTrue(streamed.rstrip().endswith("data: [DONE]"), streamed)

    def test_openai_chat(self):
        self.assertEqual(self.run_example("openai_chat.py"), f"{ANSWER}\n{ANSWER}\n")

    def test_anthropic_messages(self):
        self.assertEqual(self.run_example("anthropic_messages.py"), f"{ANSWER}\n{ANSWER}\n")

    def test_tools(self):
        call, answer = self.run_example("tools.py").split("\n", 1)
        self.assertRegex(call, r'^get_weather \{ *"city": *"[^"]*" *\}$')
        self.assertTrue(answer.strip())

    def test_json_schema(self):
        self.assertRegex(self.run_example("json_schema.py"), r"^[1-9][0-9]? (apple|pear)\n$")

    def test_every_example_is_run_here(self):
        named = {"chat.sh", "openai_chat.py", "anthropic_messages.py", "tools.py", "json_schema.py"}
        there = {name for name in os.listdir(EXAMPLES) if name.endswith((".py", ".sh"))}
        self.assertEqual(there, named)
