"""Starts, queries and stops `fathom serve` for tests.

A test that imports this is called as TEST PROGRAM SOURCE_DIR [ARGUMENT…]; this module reads the first two.
The environment variable ROBUST_SLACK (default 1) multiplies all time limits, for busy machines and
programs built with sanitizers.
"""
import atexit
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

PROGRAM, SOURCE = sys.argv.pop(1), sys.argv.pop(1)
SLACK = float(os.environ.get("ROBUST_SLACK", "1"))
MODEL = os.path.join(SOURCE, "models/fathom-tiny")
# Keeps FATHOM_CPU_ISA: the suite also runs with slow kernels. A slow machine refuses no grammar; a test
# of that limit gives the flag, which takes precedence.
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith("FATHOM_")}
ENVIRONMENT["FATHOM_GRAMMAR_TIMEOUT"] = "3600"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
ANSWER = "12 + 30 = 42."
# Long enough to be running when a test acts on it.
LONG = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 1500,
        "temperature": 1.0, "ignore_eos": True, "seed": 1}


class Server:
    """The program, listening, with its log. `ready`: wait until the model is loaded; otherwise `port`
    is required. `environment` is added to this process's without FATHOM_*."""

    def __init__(self, *flags, program=PROGRAM, model=MODEL, port=0, ready=True, environment=None,
                 **popen):
        self.process = subprocess.Popen(
            [program, "serve", model, "--port", str(port), *flags], stderr=subprocess.PIPE,
            env={**ENVIRONMENT, **(environment or {})}, text=True, errors="replace", **popen)
        # A failed test must leave no server: readers of its output would wait for it.
        atexit.register(lambda: self.process.poll() is None and self.process.kill())
        self.log = []
        self.port = port or None
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        if ready:
            assert self.ready.wait(60 * SLACK) and self.port, "".join(self.log)

    def read(self):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"serving .* on https?://[^ ]*:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                self.ready.set()
        self.ready.set()

    def open(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300 * SLACK)
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json",
                                                    **(headers or {})})
            return connection, connection.getresponse()
        except OSError as problem:
            problem.add_note(f"exit status of the server: {self.process.poll()}; its last lines:\n"
                             + "".join(getattr(self, "log", [])[-20:]))
            raise

    def ask(self, method, path, body=None, headers=None):
        connection, response = self.open(method, path, body, headers)
        text = response.read().decode()
        connection.close()
        return response.status, dict(response.getheaders()), text

    def post(self, path, body, status=200, headers=None):
        got, _, text = self.ask("POST", path, body, headers)
        assert got == status, f"{path}: {got}, expected {status}\n{text}"
        return json.loads(text)

    def events(self, path, body):
        """Yields (event name, data) of a stream, with data parsed as JSON unless it is [DONE]."""
        connection, response = self.open("POST", path, {**body, "stream": True})
        assert response.status == 200, response.read()
        assert response.getheader("Content-Type").startswith("text/event-stream")
        found = []
        for block in response.read().decode().split("\n\n"):
            name, data = None, None
            for line in block.splitlines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
            if data is not None:
                found.append((name, data if data == "[DONE]" else json.loads(data)))
        connection.close()
        return found

    def metric(self, name):
        _, _, text = self.ask("GET", "/metrics")
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                  if line.startswith(name + "{") or line.startswith(name + " ")]
        assert values, name
        return sum(values)

    def wait_until(self, condition, what, seconds=60):
        end = time.monotonic() + seconds * SLACK
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds * SLACK} s"
            time.sleep(0.02)

    def wait_for(self, name, value, seconds=60):
        self.wait_until(lambda: self.metric(name) == value, f"{name} {value}", seconds)

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self):
        """CPU time of all its threads so far, in the kernel's ticks. Unlike elapsed time it does not
        depend on other processes."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, which=signal.SIGTERM):
        self.process.send_signal(which)
        return self.wait()

    def wait(self, seconds=60):
        status = self.process.wait(seconds * SLACK)
        self.reader.join(10 * SLACK)
        # Programs built with sanitizers must print no report, whatever the expected end.
        log = "".join(self.log)
        assert "Sanitizer: " not in log and "runtime error: " not in log, log
        return status

    def kill(self):
        """Kills the server if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
