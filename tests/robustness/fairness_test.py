#!/usr/bin/env python3
"""A long prompt among small ones: a small one gets its first token after a few steps, while the long
one is still computed; and their time to the first token stays below three times what it is without it
(test 4 of the reliability targets, scaled to the bundled model; from LONG_FROM seconds on)."""
import asyncio
import json
import time
import unittest

from robustness import (CHAT, IS_LONG, SLACK, Server, StepGate, ask, connect, encode, figure,
                        percentile)

SMALL = 200
PER_SECOND = 20
FEW = 4  # the step that runs, its own, and one for each of two steps in flight
# A long prompt takes several steps; all of them are computed.
FLAGS = ("--max-num-seqs", "64", "--no-enable-prefix-caching", "--no-log-requests")


def small(number):
    return encode(CHAT, {"messages": [{"role": "user", "content": f"What is {number} + 30?"}],
                         "max_tokens": 4, "stream": True})


def long_prompt(server, limit):
    words = "the quick brown fox jumps over the lazy dog " * 4000
    return server.post("/tokenize", {"prompt": words})["tokens"][:limit]


class Steps(unittest.TestCase):
    def test_a_small_request_waits_for_few_steps(self):
        gate = StepGate()
        server = gate.serve(*FLAGS, "--max-num-batched-tokens", "64")
        self.addCleanup(server.kill)
        # 16 steps at least.
        request = encode("/generate", {"input_ids": long_prompt(server, 1024), "sampling_params": {
            "max_new_tokens": 4}})
        with connect(server) as long, connect(server) as little:
            long.sendall(request)
            gate.allow(1)
            gate.wait_until_held()
            little.sendall(small(1))
            server.wait_for("vllm:num_requests_waiting", 1)
            gate.allow(FEW)
            seen = b""
            while b'"content":"' not in seen:
                part = little.recv(4096)
                self.assertTrue(part, seen)
                seen += part
            gate.open()
            while part := long.recv(4096):
                seen += part
            self.assertIn(b"output_ids", seen)
        self.assertEqual(server.stop(), 0)


@unittest.skipUnless(IS_LONG, "measures: from LONG_FROM seconds on")
class Fairness(unittest.TestCase):
    def test_a_long_prompt_does_not_stall_small_ones(self):
        server = Server(*FLAGS, "--max-num-batched-tokens", "256")
        self.addCleanup(server.kill)
        asyncio.run(self.measure(server))
        self.assertEqual(server.stop(), 0)

    async def measure(self, server):
        await self.run_small(server.port)
        alone = percentile([o.first_byte for o in await self.run_small(server.port)], 0.99)
        room = json.loads(server.ask("GET", "/get_model_info")[2])["max_model_len"]
        ids = long_prompt(server, room - 16)
        long = encode("/generate", {"input_ids": ids,
                                    "sampling_params": {"max_new_tokens": 4}})
        stop = asyncio.Event()

        async def keep_long():
            count = 0
            while not stop.is_set():
                outcome = await ask(server.port, long)
                self.assertEqual(outcome.status, 200, outcome.data[:300])
                count += 1
            return count

        task = asyncio.ensure_future(keep_long())
        begin = time.monotonic()
        outcomes = await self.run_small(server.port)
        stop.set()
        count = await task
        beside = percentile([o.first_byte for o in outcomes], 0.99)
        figure("fairness", f"first token of {SMALL} small requests, p99: {alone * 1e3:.0f} ms alone, "
               f"{beside * 1e3:.0f} ms beside prompts of {len(ids)} tokens ({count} "
               f"of them in {time.monotonic() - begin:.1f} s)")
        self.assertLessEqual(beside, (3 * alone + 0.02) * SLACK)

    async def run_small(self, port):
        tasks = []
        for number in range(SMALL):
            tasks.append(asyncio.ensure_future(first_token(port, small(number))))
            await asyncio.sleep(1 / PER_SECOND)
        outcomes = await asyncio.gather(*tasks)
        self.assertEqual({o.status for o in outcomes}, {200})
        return outcomes


async def first_token(port, request):
    """As ask(), with first_byte the first of the stream that holds text."""
    pieces = []
    outcome = await ask(port, request, pieces=pieces)
    for when, part in pieces:
        if b'"content":"' in part:
            outcome.first_byte = when - outcome.started
            break
    return outcome


if __name__ == "__main__":
    unittest.main(verbosity=2)
