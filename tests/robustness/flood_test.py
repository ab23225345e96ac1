#!/usr/bin/env python3
"""More than the server can answer: every request ends, refusals are quick, and it recovers.

While the engine stands still exactly what exceeds the queue is refused, and the rest is answered when it
goes on. From LONG_FROM seconds on, four times the rate that it can answer, with figures.

Tests 1 to 3 of the reliability targets: open loop, each request ends in 200 or 429, no hang and no
reset; goodput 95 % of the unloaded peak; 429 within 20 ms (p99) with Retry-After; afterwards the
queue is empty within twice the longest request; resident memory flat (2 % and a huge page). The
server has a core of its own, for its peak and for the flood, so that their ratio is what refusing
costs it.
"""
import asyncio
import time
import unittest

from robustness import (CHAT, IS_LONG, LONG, SECONDS, SLACK, Server, StepGate, ask, closed_loop,
                        cores_apart, encode, figure, most_memory, open_loop, percentile, wait_idle)

# A small cache, so that all of it has been written before memory is measured.
RUNNING, QUEUED = 8, 16
FLAGS = ("--max-num-seqs", str(RUNNING), "--max-queued-requests", str(QUEUED),
         "--max-total-tokens", "8192", "--no-log-requests")
FLOOD = 200
REQUEST = encode(CHAT, {**LONG, "max_tokens": 32, "stream": True})


class Flood(unittest.TestCase):
    def test_what_exceeds_the_queue_is_refused(self):
        gate = StepGate()
        self.server = gate.serve(*FLAGS)
        self.addCleanup(self.server.kill)
        outcomes = asyncio.run(self.flood_a_closed_gate(gate))
        self.check_ends(outcomes)
        # One runs.
        self.assertEqual(sum(o.status == 200 for o in outcomes), QUEUED + 1)
        wait_idle(self.server)
        self.assertEqual(self.server.stop(), 0)

    async def flood_a_closed_gate(self, gate):
        def begin(count):
            return [asyncio.ensure_future(ask(self.server.port, REQUEST, limit=60 * SLACK))
                    for _ in range(count)]

        # The engine holds the first one before the others come: with an empty engine the queue may
        # be full before anything runs, or several run.
        ends = begin(1)
        await asyncio.to_thread(gate.wait_until_held)
        ends += begin(FLOOD - 1)
        await asyncio.to_thread(self.server.wait_until, lambda: self.server.metric(
            "fathom_requests_rejected_total") >= FLOOD - 1 - QUEUED, "refusals")
        gate.open()
        return await asyncio.gather(*ends)

    @unittest.skipUnless(IS_LONG, "measures: from LONG_FROM seconds on")
    def test_flood(self):
        self.server = Server(*FLAGS, **cores_apart(self.addCleanup))
        self.addCleanup(self.server.kill)
        asyncio.run(self.flood())
        self.assertEqual(self.server.stop(), 0)

    async def flood(self):
        port = self.server.port
        warm = await closed_loop(port, REQUEST, 12, min(SECONDS / 2, 10))
        begin = time.monotonic()
        peak = await closed_loop(port, REQUEST, 12, min(SECONDS, 20))
        peak_rate = len(peak) / (time.monotonic() - begin)
        self.assertEqual({o.status for o in warm + peak}, {200})
        baseline = percentile([(await ask(port, REQUEST)).first_byte for _ in range(5)], 0.5)
        resident = self.server.resident_bytes()

        begin, ended = time.monotonic(), []
        outcomes = await open_loop(port, REQUEST, 4 * peak_rate, SECONDS,
                                   lambda: ended.append(time.monotonic()))
        self.check_ends(outcomes)
        answered = [o for o in outcomes if o.status == 200]
        within = [o for o in answered if o.started + o.seconds <= ended[0]]
        goodput = len(within) / (ended[0] - begin)
        refused = [o.seconds for o in outcomes if o.status == 429]

        longest = max(o.seconds for o in answered)
        empty = await asyncio.to_thread(wait_idle, self.server)
        recovered = time.monotonic() - ended[0]
        after = percentile([(await ask(port, REQUEST)).first_byte for _ in range(5)], 0.5)
        held = self.server.resident_bytes()
        figure("flood", f"{len(outcomes)} requests in {SECONDS:.0f} s, {4 * peak_rate:.0f}/s, 4x "
               f"the peak of {peak_rate:.1f}/s: {len(answered)} answered, {len(refused)} refused; "
               f"goodput {goodput / peak_rate:.0%} of the peak")
        figure("429", f"p50 {percentile(refused, .5) * 1e3:.1f} ms, "
               f"p99 {percentile(refused, .99) * 1e3:.1f} ms")
        figure("recovery", f"queue empty {recovered:.2f} s after the flood ({empty:.2f} s after the "
               f"last answer; longest request {longest:.2f} s); first byte {baseline * 1e3:.0f} ms "
               f"before, {after * 1e3:.0f} ms after")
        figure("memory", f"{resident / 2 ** 20:.0f} MiB, {held / resident - 1:+.2%}")
        self.assertGreater(len(refused), len(outcomes) / 2)
        self.assertGreaterEqual(goodput, 0.95 * peak_rate)
        self.assertLessEqual(percentile(refused, 0.99), 0.020 * SLACK)
        self.assertLessEqual(recovered, 2 * longest * SLACK)
        self.assertLessEqual(after, 2 * baseline + 0.05 * SLACK)
        self.assertLessEqual(held, most_memory(resident, 0.02))

    def check_ends(self, outcomes):
        errors = [o.error for o in outcomes if o.error]
        self.assertEqual(errors, [], "hangs or resets")
        self.assertEqual({o.status for o in outcomes}, {200, 429})
        for outcome in outcomes:
            self.assertTrue(outcome.complete, outcome.data[-200:])
            if outcome.status == 429:
                self.assertIn(b"\r\nretry-after: ", outcome.head.lower())


if __name__ == "__main__":
    unittest.main(verbosity=2)
