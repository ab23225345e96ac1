#!/usr/bin/env python3
"""Host memory that runs out: the n-th allocation from a request's first byte on fails, for each n, in
whatever thread it is (allocation_faults.h). That client gets a 500 or 503, or its stream ends with an
error; the next request is answered as ever, and no page is lost.

Test 16 of the reliability targets.
"""
import collections
import json
import mmap
import os
import struct
import time
import unittest

from robustness import (CHAT, IS_LONG, QUESTION, SECONDS, connect, encode, faulty, figure,
                        read_to_end, send_raw, status_of, wait_idle)

# Seconds for each kind of request; if they do not suffice for all allocations, only every k-th one fails.
BUDGET = 45 if IS_LONG else SECONDS / 4
FAR = 1 << 40


class Allocations:
    """What the server maps: a countdown, and how many allocations fail when it has come to 0."""

    def __init__(self):
        self.descriptor = os.memfd_create("allocations")
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self.memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)

    def set(self, countdown, length=1):
        self.length = length
        self.memory[8:16] = struct.pack("q", length)
        self.memory[0:8] = struct.pack("q", countdown)

    def left(self):
        return struct.unpack("q", self.memory[0:8])[0]

    def failed(self):
        return self.length - struct.unpack("q", self.memory[8:16])[0]

    def stop(self):
        """No more fail; how many have."""
        self.memory[0:8] = bytes(8)
        return self.failed()


def events(answer):
    return [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]


def text_of(answer):
    """An answer's text, if it is whole; None if it says that it is not, or breaks off."""
    if b"text/event-stream" not in answer:
        body = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        return [choice["message"]["content"] for choice in body["choices"]]
    found = events(answer)
    if not found or found[-1] != "[DONE]" or any('"error"' in event for event in found):
        return None
    pieces = collections.defaultdict(str)
    for event in found[:-1]:
        for choice in json.loads(event)["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content") or ""
    return [pieces[index] for index in sorted(pieces)]


class EveryAllocation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.allocations = Allocations()
        fd = cls.allocations.descriptor
        cls.server = faulty(f"alloc_fail:{fd}", pass_fds=(fd,))

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.log[-20:])

    def ask(self, body):
        try:
            with connect(self.server) as connection:
                connection.sendall(encode(CHAT, body))
                return read_to_end(connection)
        except ConnectionError:
            return b""

    def outcome(self, answer, expected, what):
        """Outcome of one request: 200, 500, 503, an error behind a 200, or nothing."""
        status = status_of(answer)
        if status == 0:
            self.assertEqual(answer, b"", what)
            return "no answer"
        self.assertIn(status, (200, 500, 503), (what, answer))
        if status != 200:
            self.assertIn("error", json.loads(answer.split(b"\r\n\r\n", 1)[1]), what)
            return str(status)
        text = text_of(answer)
        if text is None:
            return "error in the stream" if b'"error"' in answer else "stream cut"
        self.assertEqual(text, expected, what)
        return "200"

    def sweep(self, name, length=1, **fields):
        def body(n):
            given = {key: value(n) if callable(value) else value for key, value in fields.items()}
            return {"messages": QUESTION, "temperature": 0, "max_tokens": 16, **given}

        expected = text_of(self.ask(body(0)))
        self.ask(body(0))
        start = time.monotonic()
        self.allocations.set(FAR)
        self.assertEqual(text_of(self.ask(body(-1))), expected)
        count = FAR - self.allocations.left()
        self.allocations.stop()
        seconds = 2 * (time.monotonic() - start)  # with what is asked afterwards
        stride = max(1, int(count * seconds / BUDGET))
        outcomes, tried = collections.Counter(), 0
        for n in range(1, count + 1, stride):
            what = (name, n, length)
            self.allocations.set(n, length)
            answer = self.ask(body(n))
            fired = self.allocations.stop() > 0
            self.assertIsNone(self.server.process.poll(), (what, "".join(self.server.log[-30:])))
            outcome = self.outcome(answer, expected, what)
            if fired:
                outcomes[outcome] += 1
                tried += 1
            else:
                self.assertEqual(outcome, "200", (what, answer))
            following = self.ask(body(-n))
            self.assertEqual(status_of(following), 200, (what, outcome, following,
                                                         self.server.log[-8:]))
            self.assertEqual(text_of(following), expected, what)
        wait_idle(self.server)
        figure("allocations", f"{name}: {tried} of about {count} failed" +
               (f", {length} in a row" if length > 1 else "") + f": {dict(outcomes)}")
        self.assertGreater(tried, 0)
        # A client hears nothing only where the connection itself could not be made or read.
        self.assertLessEqual(outcomes["no answer"], 0.05 * tried + 10)

    def test_not_streamed(self):
        self.sweep("not streamed")

    def test_streamed(self):
        self.sweep("streamed", stream=True)

    def test_several_in_a_row(self):
        for length in (2, 20):
            self.sweep("streamed", length, stream=True)
            self.sweep("not streamed", length)

    def test_choices_with_everything(self):
        self.sweep("three choices with log-probabilities, penalties and stop strings", n=3,
                   logprobs=True, top_logprobs=2, presence_penalty=0.5, stop=["zzz"])

    def test_grammars(self):
        # A grammar that was not compiled before, each time.
        self.sweep("a new grammar", stream=True, response_format=lambda n: {
            "type": "json_schema", "json_schema": {"name": "a", "schema": {
                "type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                "additionalProperties": False, "description": str(n)}}})

    def test_without_a_request(self):
        # Nothing tells when the watch over the engine looks: twice a second.
        self.ask({"messages": QUESTION, "max_tokens": 4})
        self.allocations.set(1, FAR)
        time.sleep(2)
        self.allocations.stop()
        self.assertIsNone(self.server.process.poll(), "".join(self.server.log[-5:]))
        self.assertEqual(status_of(self.ask({"messages": QUESTION, "max_tokens": 4})), 200)


class TheEnd(unittest.TestCase):
    def test_every_allocation_after_sigterm(self):
        """The process ends by itself: status 0, or 1 without the memory to end in order."""
        statuses = collections.Counter()
        for n in range(1, 40 if IS_LONG else 6):
            allocations = Allocations()
            fd = allocations.descriptor
            server = faulty(f"alloc_fail:{fd}", pass_fds=(fd,))
            self.assertEqual(status_of(send_raw(server, encode(CHAT, {"messages": QUESTION}))), 200)
            allocations.set(n, 20)
            status = server.stop()
            self.assertIn(status, (0, 1), (n, "".join(server.log[-5:])))
            statuses[status] += 1
            if allocations.stop() == 0:
                break  # there are not so many
        figure("allocations", f"at the end, up to 20 in a row: exit statuses {dict(statuses)}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
