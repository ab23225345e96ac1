#!/usr/bin/env python3
"""A machine that has run out: of descriptors, of room for the log, of a reader for it, of memory.

Test 18 of the reliability targets.
"""
import os
import resource
import subprocess
import unittest

from robustness import (CHAT, ENVIRONMENT, MODEL, PROGRAM, QUESTION, Server, connect, encode,
                        read_to_end, status_of, wait_until)
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
        self.assertEqual(process.wait(20), 0)

    def test_no_room_for_the_log(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            self.check(stdout=full, stderr=full)

    def test_the_log_reader_is_gone(self):
        self.check(stderr=subprocess.PIPE)

    def test_closed_streams(self):
        # Connections must not get the numbers of the standard streams.
        self.check(preexec_fn=lambda: os.closerange(0, 3))


class Descriptors(unittest.TestCase):
    def test_none_left(self):
        server = Server("--no-log-requests", preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (40, 40)))
        self.addCleanup(server.kill)
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
