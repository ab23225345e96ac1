#!/usr/bin/env python3
"""Requests that are cancelled: at each phase, twice, after their end, and half of all of them.

Tests 6 to 8 of the reliability targets. After each of them no page is held, soon.
"""
import asyncio
import json
import random
import time
import unittest

from robustness import (CHAT, IS_LONG, LONG, QUESTION, SECONDS, SLACK, SLOW, Server, StepGate, ask,
                        connect, encode, faulty, figure, most_memory, pages, wait_idle, wait_until)

PROMPT = "The quick brown fox jumps over the lazy dog. " * 60
ENOUGH = 10
FLAGS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--no-enable-prefix-caching",
         "--no-log-requests")


class Phases(unittest.TestCase):
    """Steps take 20 ms, so that each phase is there to be met."""

    @classmethod
    def setUpClass(cls):
        cls.server = faulty(SLOW, *FLAGS)
        cls.slowest = 0

    @classmethod
    def tearDownClass(cls):
        figure("cancel", f"pages free after {cls.slowest * 1e3:.0f} ms at the latest, in steps of "
               "20 ms and more")
        assert cls.server.stop() == 0, "".join(cls.server.log[-20:])

    def cancel(self, body, ready, path=CHAT):
        """Sends, waits until ready(connection), leaves; then all pages come back."""
        with connect(self.server) as connection:
            connection.sendall(encode(path, body))
            ready(connection)
        self.check_free()

    def check_free(self):
        seconds = wait_idle(self.server)
        type(self).slowest = max(self.slowest, seconds)
        if IS_LONG:
            self.assertLessEqual(seconds, 0.3 * SLACK)
        held = pages(self.server)
        self.assertEqual((held["used"], held["cached"]), (0, 0))

    def holds_pages(self, _):
        wait_until(lambda: pages(self.server)["used"] > 0, 10, "pages")

    def test_mid_prefill(self):
        gate = StepGate()
        server = gate.serve(*FLAGS)
        self.addCleanup(server.kill)
        with connect(server) as connection:
            connection.sendall(encode(CHAT, {"messages": [{"role": "user", "content": PROMPT}],
                                             "max_tokens": 50}))
            gate.allow(2)
            gate.wait_until_held()
        server.wait_for("fathom_client_disconnects_total", 1)
        gate.open()
        wait_idle(server)
        self.assertEqual(server.metric("vllm:generation_tokens_total"), 0)
        held = pages(server)
        self.assertEqual((held["used"], held["cached"]), (0, 0))
        self.assertEqual(server.stop(), 0)

    def test_decode(self):
        self.cancel({**LONG, "stream": True}, lambda c: c.recv(4096))

    def test_not_streamed(self):
        self.cancel(LONG, self.holds_pages)

    def test_several_choices(self):
        self.cancel({**LONG, "n": 4, "stream": True}, lambda c: (c.recv(4096), time.sleep(0.1)))

    def test_several_prompts(self):
        self.cancel({"prompt": [PROMPT, "A river", "The sun"], "max_tokens": 100,
                     "ignore_eos": True}, self.holds_pages, path="/v1/completions")

    def test_queued(self):
        with connect(self.server) as first:
            first.sendall(encode(CHAT, {**LONG, "n": 2, "stream": True}))
            first.recv(4096)
            with connect(self.server) as second:
                second.sendall(encode(CHAT, {**LONG, "stream": True}))
                self.server.wait_for("vllm:num_requests_waiting", 1)
            self.server.wait_for("vllm:num_requests_waiting", 0)
            self.assertEqual(self.server.metric("vllm:num_requests_running"), 2)
        self.check_free()

    def test_twice_and_after_the_end(self):
        with connect(self.server) as connection:
            connection.sendall(encode(CHAT, {**LONG, "stream": True}, ["X-Request-Id: twice"]))
            connection.recv(4096)
            for _ in range(3):
                self.server.post("/abort_request", {"rid": "twice"})
        self.check_free()
        self.assertEqual(self.server.post("/abort_request", {"rid": "twice"}), {"aborted": 0})
        self.server.post("/abort_request", {"abort_all": True})
        self.server.post(CHAT, {"messages": QUESTION, "max_tokens": 2},
                         headers={"X-Request-Id": "ended"})
        self.assertEqual(self.server.post("/abort_request", {"rid": "ended"}), {"aborted": 0})

    def test_reset_while_writing(self):
        # Unread bytes make close() a reset, in the middle of the stream.
        for _ in range(3):
            self.cancel({**LONG, "n": 4, "stream": True, "logprobs": True, "top_logprobs": 20},
                        lambda c: time.sleep(0.2))


class Load(unittest.TestCase):
    def test_half_of_all_leave(self):
        server = Server("--max-num-seqs", "16", "--max-total-tokens", "16384", "--no-log-requests")
        self.addCleanup(server.kill)
        body = {"messages": QUESTION, "seed": 11, "max_tokens": 24, "ignore_eos": True}
        expected = server.post(CHAT, body)["choices"][0]["message"]["content"]
        counts = {"left": 0, "stayed": 0}
        dice = random.Random(1)

        async def client(end):
            # On a slow machine until enough of both have been seen.
            while time.monotonic() < end or min(counts.values()) < ENOUGH:
                if dice.random() < 0.5:
                    counts["left"] += 1
                    await ask(server.port, encode(CHAT, {**LONG, "stream": dice.random() < 0.5}),
                              limit=dice.random() * 0.3)
                    continue
                outcome = await ask(server.port, encode(CHAT, body))
                self.assertEqual((outcome.status, outcome.error), (200, None), outcome.data[:300])
                text = json.loads(outcome.data)["choices"][0]["message"]["content"]
                self.assertEqual(text, expected)
                counts["stayed"] += 1

        async def load(seconds):
            end = time.monotonic() + seconds
            await asyncio.gather(*(client(end) for _ in range(12)))

        asyncio.run(load(SECONDS / 3))
        resident = server.resident_bytes()
        asyncio.run(load(SECONDS))
        seconds = wait_idle(server)
        after = server.resident_bytes()
        figure("cancel half", f"{SECONDS:.0f} s: {counts['left']} left, {counts['stayed']} answered "
               f"as if alone; idle after {seconds * 1e3:.0f} ms; memory {after / resident - 1:+.2%}")
        self.assertLessEqual(after, most_memory(resident, 0.02 if IS_LONG else 0.1))
        self.assertEqual(server.stop(), 0)


class SlowReader(unittest.TestCase):
    def test_a_client_that_stops_reading_holds_nobody_up(self):
        server = Server("--no-log-requests")
        self.addCleanup(server.kill)
        with connect(server, 120) as connection:
            connection.sendall(encode(CHAT, {**LONG, "n": 8, "stream": True, "logprobs": True,
                                             "top_logprobs": 20}))
            connection.recv(100)
            for _ in range(5):
                start = time.monotonic()
                server.post(CHAT, {"messages": QUESTION, "max_tokens": 4})
                self.assertLess(time.monotonic() - start, 2 * SLACK)
            if IS_LONG:  # its answer ends; the connection with the unsent rest is cut after 60 s
                start = time.monotonic()
                wait_until(lambda: server.metric("fathom_http_connections") == 1, 90, "cut off")
                figure("slow reader", f"cut off {time.monotonic() - start:.0f} s after it stopped")
        wait_idle(server)
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
