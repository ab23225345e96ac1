"""Schemathesis over the server's own document: requests that follow it and requests that break it.

No answer may be a 5xx, all must conform to the document, what breaks it must be refused, and what
follows it may be refused only by an error that names the field or the reason.
"""
import os
import subprocess
import sys
import tempfile
import unittest

from served import KEY, Server

EXAMPLES = os.environ["FATHOM_TESTED_EXAMPLES"]
HERE = os.path.dirname(os.path.abspath(__file__))
# Short contexts and few choices: what is tested are the answers' forms.
FLAGS = ("--max-model-len", "256", "--max-choices", "2", "--no-log-requests")


class Document(unittest.TestCase):
    def run_schemathesis(self, *flags):
        server = Server(*FLAGS)
        command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"),
                   "--config-file", os.path.join(HERE, "schemathesis.toml"), "run",
                   server.url + "/openapi.json", "--max-examples", EXAMPLES, "--seed", "1",
                   "-H", "Authorization: Bearer " + KEY, *flags]
        with tempfile.TemporaryDirectory() as scratch:  # it keeps what it found
            done = subprocess.run(command, env={**os.environ, "SCHEMATHESIS_HOOKS": "document_hooks",
                                            "PYTHONPATH": HERE}, cwd=scratch)
        server.stop()
        self.assertEqual(done.returncode, 0)

    def test_answers_conform(self):
        self.run_schemathesis()


if __name__ == "__main__":
    unittest.main()
