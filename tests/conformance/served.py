"""`fathom serve` with the bundled model on a free port, for one test class."""
import os
import re
import signal
import subprocess
import threading
import time
import unittest
import urllib.request

SOURCE = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
PROGRAM = os.environ["FATHOM_TESTED_PROGRAM"]
KEY = "conformance-key"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
ANSWER = "12 + 30 = 42."
STORY = [{"role": "user", "content": "Tell me a story."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
# Runs until something is done to it.
ENDLESS = {"ignore_eos": True}


class Server:
    def __init__(self, *flags):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
        # No grammar is refused because the machine is slow.
        environment["FATHOM_GRAMMAR_TIMEOUT"] = "3600"
        self.process = subprocess.Popen(
            [PROGRAM, "serve", os.path.join(SOURCE, "models/fathom-tiny"), "--port", "0",
             "--api-key", KEY, *flags], stderr=subprocess.PIPE, env=environment, text=True)
        self.log = []
        self.url = None
        self.listening = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        assert self.listening.wait(120) and self.url, "".join(self.log)

    def read(self):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"serving .* on (http://[^ ]*:\d+)", line)
            if found:
                self.url = found.group(1)
                self.listening.set()
        self.listening.set()

    def metric(self, name):
        request = urllib.request.Request(self.url + "/metrics",
                                         headers={"Authorization": "Bearer " + KEY})
        with urllib.request.urlopen(request, timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines
                  if line.startswith(name + "{") or line.startswith(name + " ")]
        assert values, name
        return sum(values)

    def wait_for(self, name, value, seconds=30):
        end = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, expected {value}"
            time.sleep(0.02)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self.reader.join(10)
        self.process.stderr.close()
        assert status == 0, "".join(self.log[-20:])


class ServedTest(unittest.TestCase):
    """A server for all tests of a class; FLAGS are its own."""
    FLAGS = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server("--served-model-name", "tiny", *cls.FLAGS)

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def pages_come_back(self):
        self.server.wait_for("vllm:num_requests_running", 0)
        self.server.wait_for("vllm:num_requests_waiting", 0)
        # Between the two a waiting request may have begun.
        self.server.wait_for("vllm:kv_cache_usage_perc", 0)
