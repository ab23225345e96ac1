#!/usr/bin/env python3
"""What `fathom serve --kv-events-endpoint` tells is what its prefix cache has.

    kv_events_test.py PROGRAM SOURCE_DIR [TEST…]
"""
import struct
import subprocess
import unittest

from fathom_server import ENVIRONMENT, MODEL, PROGRAM, SLACK, Server
from separated_servers import free_port, labelled, story
from zmtp import Zmtp, unpack

BLOCK = 64


class Reader:
    """Keeps the picture of a cache that a router has: blocks by hash, with parent and tokens."""

    def __init__(self, port, topic=b""):
        self.socket = Zmtp(port, b"SUB", 60 * SLACK)
        self.socket.send(b"\x01" + topic)  # the subscription
        self.topic = topic
        self.messages = []
        self.blocks = {}
        self.lanes = set()
        self.cleared = 0

    def take(self):
        topic, number, batch = self.socket.receive()
        assert topic == self.topic, topic
        self.messages.append((struct.unpack(">Q", number)[0], batch))
        time, events, lane = unpack(batch)
        assert time > 1.6e9, time
        self.lanes.add(lane)
        for event in events:
            getattr(self, event[0])(*event[1:])

    def BlockStored(self, hashes, parent, tokens, block_size, lora, medium):  # pylint: disable=invalid-name
        assert (block_size, lora, medium) == (BLOCK, None, "GPU")
        assert len(tokens) == BLOCK * len(hashes)
        for number, block in enumerate(hashes):
            assert block not in self.blocks, "stored twice"
            assert parent is None or parent in self.blocks, "a block before its parent"
            self.blocks[block] = (parent, tokens[BLOCK * number:BLOCK * (number + 1)])
            parent = block

    def BlockRemoved(self, hashes, medium):  # pylint: disable=invalid-name
        assert medium == "GPU"
        for block in hashes:
            del self.blocks[block]

    def AllBlocksCleared(self):  # pylint: disable=invalid-name
        self.blocks.clear()
        self.cleared += 1

    def text_of(self, block):
        parent, tokens = self.blocks[block]
        return (self.text_of(parent) if parent is not None else []) + tokens

    def take_until(self, condition):
        while not condition():
            self.take()  # ends with a timeout


class Events(unittest.TestCase):
    def start(self, *flags, replay=False):
        port, replay_port = free_port(), free_port()
        more = ("--kv-events-replay-endpoint", f"tcp://127.0.0.1:{replay_port}") if replay else ()
        server = Server("--threads", "1", "--kv-events-endpoint", f"tcp://127.0.0.1:{port}", *more,
                        *flags)
        self.addCleanup(server.kill)
        reader = Reader(port, b"kv" if "--kv-events-topic" in flags else b"")
        self.addCleanup(reader.socket.close)
        # Until the subscription has arrived messages are lost.
        while True:
            server.post("/v1/completions", {"prompt": story(60), "max_tokens": 1})
            server.ask("POST", "/flush_cache")
            reader.socket.socket.settimeout(0.5)
            try:
                reader.take()
                break
            except (TimeoutError, KeyError, AssertionError):  # it began in the middle
                reader.blocks.clear()
        reader.socket.socket.settimeout(60 * SLACK)
        reader.take_until(lambda: reader.cleared > 0)
        server.wait_until(lambda: self.cached(server) == 0, "an empty cache")
        return server, reader, replay_port

    @staticmethod
    def cached(server):
        return labelled(server, "fathom_kv_pages", 'state="cached"')

    def tokens_of(self, server, prompt):
        return server.post("/tokenize", {"prompt": prompt})["tokens"]

    # Each page as the tokens up to its end.
    def pages_of(self, server, prompts):
        pages = set()
        for prompt in prompts:
            tokens = self.tokens_of(server, prompt)
            pages |= {tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}
        return pages

    def test_the_picture_is_the_cache(self):
        server, reader, _ = self.start("--kv-events-topic", "kv")
        self.assertEqual(reader.blocks, {})
        prompts = [story(300), story(300) + " and more " + story(100, 3), story(200, 1), "short"]
        for prompt in prompts:
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        expected = self.pages_of(server, prompts)
        reader.take_until(lambda: len(reader.blocks) >= len(expected))
        self.assertEqual({tuple(reader.text_of(block)) for block in reader.blocks}, expected)
        server.wait_until(lambda: self.cached(server) == len(reader.blocks), "as many pages cached")
        # Text with a salt is nobody else's.
        server.post("/v1/completions", {"prompt": story(200, 5), "cache_salt": "x", "max_tokens": 1})
        server.post("/v1/completions", {"prompt": story(100, 6), "max_tokens": 1})
        one_more = len(self.tokens_of(server, story(100, 6))) // BLOCK
        reader.take_until(lambda: len(reader.blocks) >= len(expected) + one_more)
        self.assertEqual(len(reader.blocks), len(expected) + one_more)
        self.assertLess(len(reader.blocks), self.cached(server))
        before = reader.cleared
        server.ask("POST", "/flush_cache")
        reader.take_until(lambda: reader.cleared > before)
        self.assertEqual(reader.blocks, {})
        numbers = [number for number, _ in reader.messages]
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))

    def test_evicted_pages_are_told(self):
        server, reader, _ = self.start("--max-total-tokens", "2048", "--max-model-len", "1024")
        # Three of these have more pages than the cache.
        for number in range(4):
            server.post("/v1/completions", {"prompt": story(500, number), "max_tokens": 1})
        last = tuple(self.tokens_of(server, story(500, 3)))
        last = last[:len(last) // BLOCK * BLOCK]
        reader.take_until(lambda: last in {tuple(reader.text_of(b)) for b in reader.blocks})
        server.wait_until(lambda: self.cached(server) == len(reader.blocks), "as many pages cached")
        self.assertLess(len(reader.blocks), 32)

    def test_batches_are_replayed(self):
        server, reader, replay_port = self.start("--max-num-batched-tokens", "64", replay=True)
        prompts = [story(200, number) for number in range(3)]
        for prompt in prompts:
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        # All batches have come: a prompt computed in several steps has several.
        pages = self.pages_of(server, prompts)
        reader.take_until(lambda: len(reader.blocks) >= len(pages))
        dealer = Zmtp(replay_port, b"DEALER", 60 * SLACK)
        self.addCleanup(dealer.close)
        first = reader.messages[-2][0]
        for start in (first, reader.messages[0][0], 1 << 40):
            dealer.send(b"", struct.pack(">Q", start))
            replayed = []
            while True:
                empty, number, batch = dealer.receive()
                self.assertEqual(empty, b"")
                if number == b"\xff" * 8:
                    self.assertEqual(batch, b"")
                    break
                replayed.append((struct.unpack(">Q", number)[0], batch))
            self.assertEqual(replayed, [m for m in reader.messages if m[0] >= start])
        dealer.send(b"", b"no number")  # is not answered
        dealer.send(b"", struct.pack(">Q", first))
        self.assertEqual(struct.unpack(">Q", dealer.receive()[1])[0], first)

    def test_lanes_have_their_own_numbers(self):
        server, reader, _ = self.start("--dp", "2")
        for number in range(6):
            server.post("/v1/completions", {"prompt": story(200, number), "max_tokens": 1},
                        headers={"X-data-parallel-rank": str(number % 2)})
        reader.take_until(lambda: reader.lanes == {0, 1})


class Flags(unittest.TestCase):
    def test_refused_values(self):
        for flags, words in (
                (("--kv-events-replay-endpoint", "tcp://127.0.0.1:1"),
                 "--kv-events-replay-endpoint needs --kv-events-endpoint"),
                (("--kv-events-topic", "kv"), "--kv-events-topic needs --kv-events-endpoint"),
                (("--kv-events-endpoint", "nowhere"), "cache events: nowhere cannot be bound"),
                (("--kv-events-endpoint", "tcp://127.0.0.1:1", "--no-enable-prefix-caching"),
                 "without a prefix cache")):
            done = subprocess.run([PROGRAM, "serve", MODEL, "--port", "0", *flags], text=True,
                                  capture_output=True, env=ENVIRONMENT, timeout=60 * SLACK)
            self.assertEqual(done.returncode, 2, f"{flags}\n{done.stderr}")
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
