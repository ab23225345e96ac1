#!/usr/bin/env python3
"""Starting and stopping: signals under load and while loading, restarts, what /health and /ready say.

Tests 9 to 12 and 28 of the reliability targets.
"""
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import unittest

from robustness import (CHAT, IS_LONG, LONG, MODEL, QUESTION, SECONDS, SLACK, SLOW, Server,
                        StepGate, faulty, figure, preloaded, wait_until)

CYCLES = int(SECONDS * 2) if IS_LONG else 3
# Under nohup this script ignores SIGHUP, and servers would inherit that. With a handler they begin with
# the default action.
signal.signal(signal.SIGHUP, lambda *_: None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(server, path):
    try:
        return server.ask("GET", path)[0]
    except OSError:
        return 0


class Signals(unittest.TestCase):
    def test_sigterm_under_load(self):
        gate = StepGate()
        server = gate.serve("--shutdown-timeout", str(int(60 * SLACK)))
        self.addCleanup(server.kill)
        results = []
        threads = [threading.Thread(target=lambda: results.append(server.ask(
            "POST", CHAT, {**LONG, "max_tokens": 50})[0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("vllm:num_requests_running") +
                   server.metric("vllm:num_requests_waiting") == 8, 60, "8 requests")
        while server.metric("vllm:num_requests_running") < 8:
            gate.allow(1)
            gate.wait_until_held()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/ready")[0] == 503, 5, "drain begins")
        start = time.monotonic()
        status, headers, _ = server.ask("POST", CHAT, {"messages": QUESTION})
        refused = time.monotonic() - start
        self.assertEqual(status, 503)
        self.assertIn("Retry-After", headers)
        # Also what the engine has no part in.
        self.assertEqual(server.ask("POST", "/tokenize", {"prompt": "Hi"})[0], 503)
        self.assertEqual(server.ask("GET", "/health")[0], 200)
        self.assertEqual(results, [])
        gate.open()
        for thread in threads:
            thread.join()
        self.assertEqual(results, [200] * 8)
        self.assertEqual(server.wait(), 0)
        figure("sigterm", f"8 of 8 answers complete, a new request refused in {refused * 1e3:.0f} ms")
        if IS_LONG:
            self.assertLessEqual(refused, 0.05 * SLACK)
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1)

    def test_while_loading(self):
        for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            server = Server(port=free_port(), ready=False)
            self.addCleanup(server.kill)
            wait_until(lambda: answers(server, "/health") == 200, 20, "listening")
            start = time.monotonic()
            server.process.send_signal(which)
            self.assertEqual(server.wait(20), 0)
            self.assertLess(time.monotonic() - start, 2 * SLACK)

    def test_a_second_signal_is_the_end(self):
        server = faulty(SLOW)
        self.addCleanup(server.kill)
        connection, response = server.open("POST", CHAT, {**LONG, "n": 8, "stream": True})
        response.read(50)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.ask("GET", "/ready")[0] == 503, 5, "drain begins")
        start = time.monotonic()
        self.assertEqual(server.stop(signal.SIGTERM), 130)
        self.assertLess(time.monotonic() - start, 2 * SLACK)
        connection.close()

    def test_sighup_is_as_sigterm_unless_it_is_ignored(self):
        server = Server()
        self.addCleanup(server.kill)
        self.assertEqual(server.stop(signal.SIGHUP), 0)
        self.assertIn("SIGHUP: no new requests", "".join(server.log))
        under_nohup = Server(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.addCleanup(under_nohup.kill)
        under_nohup.process.send_signal(signal.SIGHUP)
        under_nohup.post(CHAT, {"messages": QUESTION})
        self.assertEqual(under_nohup.stop(), 0)
        self.assertNotIn("SIGHUP", "".join(under_nohup.log))

    def test_offload_files_of_a_killed_server_go_at_the_next_start(self):
        with tempfile.TemporaryDirectory() as directory:
            flags = ("--kv-offload-dir", directory, "--kv-offload-disk-gib", "1")
            server = Server(*flags)
            self.addCleanup(server.kill)
            left = os.listdir(directory)
            self.assertEqual(len(left), 1)
            beside = Server(*flags)
            self.addCleanup(beside.kill)
            self.assertEqual(len(os.listdir(directory)), 2)
            server.kill()
            self.assertEqual(beside.stop(signal.SIGHUP), 0)
            self.assertEqual(os.listdir(directory), left)
            again = Server(*flags)
            self.addCleanup(again.kill)
            now = os.listdir(directory)
            self.assertEqual(len(now), 1)
            self.assertNotEqual(now, left)
            self.assertEqual(again.stop(), 0)
            self.assertEqual(os.listdir(directory), [])

    def test_sigkill_and_restart(self):
        port = free_port()
        server = Server(port=port)
        self.addCleanup(server.kill)
        connection, response = server.open("POST", CHAT, {**LONG, "stream": True})
        response.read(50)
        server.kill()
        again = Server(port=port)  # fails at once if it cannot bind
        self.addCleanup(again.kill)
        self.assertEqual(again.ask("GET", "/ready")[0], 200)
        self.assertEqual(again.stop(), 0)
        connection.close()

    def test_many_starts(self):
        start = time.monotonic()
        for cycle in range(CYCLES):
            server = Server("--max-total-tokens", "2048", "--no-log-requests")
            self.addCleanup(server.kill)
            self.assertEqual(server.ask("GET", "/health")[0], 200)
            self.assertEqual(server.stop(), 0, f"cycle {cycle}")
        figure("cycles", f"{CYCLES} starts and stops, {(time.monotonic() - start) / CYCLES:.2f} s "
               "each")


class Readiness(unittest.TestCase):
    def test_health_before_ready(self):
        server = Server(port=free_port(), ready=False)
        self.addCleanup(server.kill)
        seen = set()
        while not server.ready.is_set():
            seen.add((answers(server, "/health"), answers(server, "/ready")))
        self.assertLessEqual(seen, {(0, 0), (0, 503), (200, 503), (200, 200)})
        self.assertEqual((answers(server, "/health"), answers(server, "/ready")), (200, 200))
        self.assertEqual(server.stop(), 0)


class Model(unittest.TestCase):
    def test_a_file_that_shrinks(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(MODEL, folder, dirs_exist_ok=True)
            largest = max((os.path.join(folder, name) for name in os.listdir(folder)),
                          key=os.path.getsize)
            port = free_port()
            server = Server(model=folder, port=port, ready=False)
            self.addCleanup(server.kill)
            os.truncate(largest, os.path.getsize(largest) // 2)
            # Before its header was read, or while its weights are: refused. After: it does not matter.
            server.ready.wait(60 * SLACK)
            if any("serving" in line for line in server.log):
                self.assertEqual(server.stop(), 0)
                return
            self.assertEqual(server.wait(20), 2, "".join(server.log))
            self.assertIn(os.path.basename(largest), server.log[-1])

    def load_truncated(self, name, read, share):
        """The server, that loads a model whose file is cut to a share of its size by whoever reads it
        for the N-th time."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(MODEL, folder, dirs_exist_ok=True)
            path = os.path.join(folder, name)
            size = int(os.path.getsize(path) * share)
            server = Server(model=folder, port=free_port(), ready=False, environment=preloaded(
                "truncated_file", FATHOM_TRUNCATED_FILE=f"{read}:{size}:{path}"))
            self.addCleanup(server.kill)
            server.ready.wait(60 * SLACK)
            self.assertEqual(os.path.getsize(path), size, (name, read, "never read so often"))
            return server

    def test_a_file_that_shrinks_at_every_moment(self):
        name = sorted(name for name in os.listdir(MODEL) if name.endswith(".safetensors"))[0]
        with open(os.path.join(MODEL, name), "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = sum(name != "__metadata__" for name in header)
        # Two reads for the header, then one a tensor and, at the end, of what lies behind its half.
        last = tensors + 2
        reads = [*range(1, last, 8), last] if IS_LONG else [1, 2, 3, last // 2, last]
        for read in reads:
            for share in (0, 0.5) if read < last // 2 else (0,):
                server = self.load_truncated(name, read, share)
                self.assertFalse(any("serving" in line for line in server.log), (read, share))
                self.assertEqual(server.wait(20), 2, (read, share, "".join(server.log)))
                self.assertIn(name + ": ", server.log[-1], (read, share))
        figure("a file that shrinks", f"at {len(reads)} of its {last} reads: status 2, a sentence")


if __name__ == "__main__":
    unittest.main(verbosity=2)
