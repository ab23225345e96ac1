#!/usr/bin/env python3
"""A machine that has run out: of descriptors, of room for the log, of a reader for it, of memory.

Test 18 of the reliability targets.
"""
import json
import os
import resource
import struct
import subprocess
import tempfile
import time
import unittest

from robustness import (CHAT, ENVIRONMENT, LONG, MODEL, PROGRAM, QUESTION, SLACK, Server, connect,
                        encode, faulty, preloaded, read_to_end, send_raw, status_of, wait_until)
from lifecycle_test import answers, free_port


class Standard(unittest.TestCase):
    """Streams that cannot be written; the log's lines are lost, the server serves."""

    def check(self, wait_ready=20, **streams):
        port = free_port()
        process = subprocess.Popen([PROGRAM, "serve", MODEL, "--port", str(port)], env=ENVIRONMENT,
                                   **streams)
        self.addCleanup(lambda: (process.kill(), process.wait()))
        server = Server.__new__(Server)
        server.port, server.process = port, process
        if "stderr" in streams and streams["stderr"] == subprocess.PIPE:
            process.stderr.close()
        wait_until(lambda: answers(server, "/ready") == 200 or process.poll() is not None, wait_ready,
                   "ready")
        for _ in range(5):
            reply = server.post(CHAT, {"messages": QUESTION, "temperature": 0})
            self.assertIn("42", reply["choices"][0]["message"]["content"])
        process.terminate()
        self.assertEqual(process.wait(20 * SLACK), 0)

    def test_no_room_for_the_log(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            self.check(stdout=full, stderr=full)

    def test_the_log_reader_is_gone(self):
        self.check(stderr=subprocess.PIPE)

    def test_closed_streams(self):
        # Connections must not get the numbers of the standard streams.
        self.check(preexec_fn=lambda: os.closerange(0, 3))


class Clock(unittest.TestCase):
    """The wall clock jumps; whatever waits, waits by the steady clock."""

    def test_jumps_of_an_hour(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(8))
            file.flush()

            def jump(hours):
                file.seek(0)
                file.write(struct.pack("q", hours * 3600))
                file.flush()

            # An answer takes half a second at least: the jump comes while it is computed.
            server = faulty("step_ms:8", "--watchdog-timeout", "60", "--queue-timeout", "600",
                            "--request-timeout", "600", environment=preloaded(
                                "shifted_clock", FATHOM_SHIFTED_CLOCK=file.name))
            self.addCleanup(server.kill)
            kept = connect(server)  # idle, for the timeout of its like
            body = {**LONG, "max_tokens": 70, "temperature": 0}
            expected = server.post(CHAT, body)
            for hours in (1, -1, 0):
                connection, response = server.open("POST", CHAT, {**body, "stream": True})
                first = response.read(1000)
                jump(hours)
                text = (first + response.read()).decode()
                connection.close()
                self.assertIn("[DONE]", text)
                self.assertNotIn('"error"', text)
                pieces = [json.loads(line[6:])["choices"] for line in text.splitlines()
                          if line.startswith("data: {")]
                self.assertEqual("".join(choices[0]["delta"].get("content") or ""
                                         for choices in pieces if choices),
                                 expected["choices"][0]["message"]["content"])
                # The jump has happened: answers say when they were made.
                reply = server.post(CHAT, {"messages": QUESTION, "temperature": 0})
                self.assertAlmostEqual(reply["created"] - time.time(), hours * 3600, delta=60)
                self.assertIn("42", reply["choices"][0]["message"]["content"])
                time.sleep(1.2)  # until connections were looked at for their timeouts
                self.assertEqual(server.ask("GET", "/ready")[0], 200)
            kept.sendall(encode(CHAT, {"messages": QUESTION}))
            self.assertEqual(status_of(read_to_end(kept)), 200)
            kept.close()
            self.assertEqual(server.metric("fathom_expired_requests_total"), 0)
            self.assertEqual(server.stop(), 0)


class Descriptors(unittest.TestCase):
    def test_none_left(self):
        server = Server("--no-log-requests", preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (40, 40)))
        self.addCleanup(server.kill)
        # Once before: UndefinedBehaviorSanitizer looks at what it has not seen yet through a pipe, and
        # takes an object for none when there is no descriptor for it.
        self.assertEqual(status_of(send_raw(server, encode(CHAT, {"messages": QUESTION}))), 200)
        kept = connect(server)
        crowd = [connect(server) for _ in range(60)]  # the kernel takes more than the server can
        kept.sendall(encode(CHAT, {"messages": QUESTION}))
        self.assertEqual(status_of(read_to_end(kept)), 200)
        for connection in (kept, *crowd):
            connection.close()
        server.post(CHAT, {"messages": QUESTION})
        self.assertTrue(any("cannot accept" in line for line in server.log), server.log)
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
