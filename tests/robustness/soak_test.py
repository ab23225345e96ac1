#!/usr/bin/env python3
"""Mixed load for a long time, well below what the server can answer: nothing grows, nothing slows down.

Test 35 of the reliability targets. Requests come at equal intervals, at a third of the rate that the
server has just been seen to answer, so that no queue forms: chats, long prompts, clients that leave
(10 %), bad requests (5 %) and schemas (5 %). Resident memory grows by at most 1 MiB/h after the
warm-up, descriptors and threads are as many as before, and each answer is the one expected. From
LONG_FROM seconds on, the time between tokens is that of a server that has just started (p99, 5 %): both get
the load by turns, because the same machine is 10 % slower in one quarter of an hour than in the next. SOAK_SECONDS
says how long (ROBUST_SECONDS), after a third of it, at most five minutes, to warm up:
`SOAK_SECONDS=3600` for the hour.
"""
import array
import asyncio
import itertools
import json
import os
import time
import unittest

from robustness import (CHAT, IS_LONG, LONG, LONG_FROM, SECONDS, SLACK, Server, ask, cores_apart, encode,
                        figure, percentile, wait_idle, wait_until)

SOAK = float(os.environ.get("SOAK_SECONDS", SECONDS))
WARM_UP = min(SOAK / 3 + 1, 300)
# Seconds of load on each server when the old one is compared with a new one, in TURNS equal turns.
COMPARED = min(SOAK / 3 + 1, 300)
TURNS = 5
# A slope of 1 MiB/h and 5 % of a p99 are below the noise of shorter runs.
STEADY_FROM = 1800
CLIENTS, SHARE = 12, 1 / 3

# One of each twenty requests; equal parts of the run have equal loads.
KINDS = ("chat", "long", "chat", "leaves", "chat", "chat", "bad", "chat", "long", "chat",
         "chat", "schema", "chat", "leaves", "chat", "chat", "long", "chat", "chat", "chat")
BAD = (b'{"messages":', {"messages": []}, {"messages": LONG["messages"], "temperature": 9},
       {"messages": LONG["messages"], "max_tokens": 10 ** 9})
# Tokens that no machine computes before the client has left.
ENDLESS = 6000
WORDS = "the quick brown fox jumps over the lazy dog and the river runs to the sea " * 40


def schema(number):
    """Eight that come again and again."""
    name = f"field_{number % 8}"
    return {"type": "json_schema", "json_schema": {"name": "soak", "schema": {
        "type": "object", "properties": {name: {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": [name, "ok"], "additionalProperties": False}}}


def request(kind, number):
    """Bytes, and the status that they get; None where the client leaves."""
    question = [{"role": "user", "content": f"What is {number % 997} + 30?"}]
    if kind == "chat":
        return encode(CHAT, {**LONG, "messages": question, "max_tokens": 32, "stream": True}), 200
    if kind == "long":
        content = f"{number}: {WORDS}"
        return encode(CHAT, {"messages": [{"role": "user", "content": content}],
                             "max_tokens": 8, "stream": True}), 200
    if kind == "schema":
        return encode(CHAT, {"messages": question, "max_tokens": 48, "stream": True,
                             "response_format": schema(number)}), 200
    if kind == "leaves":
        return encode(CHAT, {**LONG, "max_tokens": ENDLESS, "stream": number % 2 == 0}), None
    return encode(CHAT, BAD[number % len(BAD)]), 400


class Load:
    """What the clients have seen."""

    def __init__(self, port):
        self.port = port
        self.number = itertools.count()
        self.counts = dict.fromkeys(KINDS, 0)
        self.wrong = []
        self.gaps = None  # seconds between the pieces of a chat's stream, where they are wanted

    async def one(self, kind=None):
        number = next(self.number)
        kind = kind or KINDS[number % len(KINDS)]
        data, status = request(kind, number)
        pieces = []
        limit = 0.02 + number % 7 * 0.03 if status is None else 60
        outcome = await ask(self.port, data, limit, pieces)
        self.counts[kind] += 1
        if status is None:
            if outcome.error != "TimeoutError":
                self.wrong.append((kind, outcome.status, outcome.error))
        elif outcome.status != status or not outcome.complete:
            self.wrong.append((kind, outcome.status, outcome.error, outcome.data[-200:]))
        if kind == "chat" and self.gaps is not None:
            times = [when for when, _ in pieces]
            self.gaps.extend(b - a for a, b in zip(times, times[1:]))

    async def capacity(self, seconds):
        """Requests a second that the clients get answered when each asks again at once."""
        end, before = time.monotonic() + seconds, sum(self.counts.values())

        async def client():
            while time.monotonic() < end:
                await self.one()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return (sum(self.counts.values()) - before) / seconds

    async def steady(self, rate, seconds, on_second):
        """At equal intervals, whatever becomes of them; calls on_second(second) once in each."""
        tasks, start = set(), time.monotonic()
        second = 0
        for turn in range(int(rate * seconds)):
            await asyncio.sleep(max(0, start + turn / rate - time.monotonic()))
            task = asyncio.ensure_future(self.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if time.monotonic() - start >= second:
                on_second(second)
                second += 1
        await asyncio.gather(*tasks)


class Process:
    """What a server holds."""

    def __init__(self, server):
        self.server, self.folder = server, f"/proc/{server.process.pid}"

    def counts(self):
        """Its open descriptors and its threads."""
        return len(os.listdir(self.folder + "/fd")), len(os.listdir(self.folder + "/task"))


def slope(samples):
    """Least squares over (x, y)."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread


class Soak(unittest.TestCase):
    def test_nothing_grows_and_nothing_slows_down(self):
        apart = cores_apart(self.addCleanup)
        server = self.start(apart)
        rate = asyncio.run(self.soak(server))
        if SOAK >= LONG_FROM:
            new = self.start(apart)
            asyncio.run(self.compare(server, new, rate))
            self.assertEqual(new.stop(), 0)
        self.assertEqual(server.stop(), 0)

    def start(self, apart):
        server = Server("--max-total-tokens", "8192", "--no-log-requests", **apart)
        self.addCleanup(server.kill)
        return server

    async def known(self, load):
        """All of a small cache is written, and each grammar known."""
        for kind in ["long"] * 12 + ["schema"] * 8:
            await load.one(kind)
        await load.capacity(min(SOAK / 3, 5))  # its first requests are slower

    async def soak(self, server):
        process, load = Process(server), Load(server.port)
        await self.known(load)  # before memory is measured
        peak = await load.capacity(min(SOAK / 3, 10))
        rate = SHARE * peak
        await load.steady(rate, WARM_UP, lambda second: None)
        await asyncio.to_thread(wait_idle, server)
        await asyncio.to_thread(server.wait_for, "fathom_http_connections", 1)  # the one that asks
        before = process.counts()

        resident, most = [], [0, 0]

        def on_second(second):
            resident.append((second / 3600, server.resident_bytes() / 2 ** 20))
            most[:] = map(max, most, process.counts())
            if second and second % 60 == 0:
                figure(f"{second // 60} min", f"{sum(load.counts.values())} requests, "
                       f"{resident[-1][1]:.1f} MiB")

        load.counts = dict.fromkeys(KINDS, 0)
        await load.steady(rate, SOAK, on_second)
        await asyncio.to_thread(wait_idle, server)
        self.assertEqual(load.wrong, [])
        # The last connections are closed when their clients have.
        await asyncio.to_thread(
            wait_until, lambda: all(now <= then for now, then in zip(process.counts(), before)),
            10 * SLACK, f"no more than {before} descriptors and threads")
        growth = slope(resident)
        figure("soak", f"{SOAK:.0f} s of {rate:.1f} requests/s, {SHARE:.0%} of {peak:.1f}/s: "
               f"{json.dumps(load.counts)}, each answered as expected")
        figure("soak's memory", f"{resident[0][1]:.1f} MiB, then {resident[-1][1]:.1f}: "
               f"{growth:+.2f} MiB/h")
        figure("soak's descriptors and threads", f"{before[0]} and {before[1]} before and after, "
               f"{most[0]} and {most[1]} at most")
        if SOAK >= STEADY_FROM:
            self.assertLessEqual(growth, 1)
        self.assertLessEqual(resident[-1][1], (1.02 if IS_LONG else 1.1) * resident[0][1])
        return rate

    async def compare(self, old, new, rate):
        old_load, new_load = Load(old.port), Load(new.port)
        await self.known(new_load)
        for load in (old_load, new_load):
            load.gaps = array.array("f")
        for turn in range(2 * TURNS):
            # Old, new, new, old, …: what changes steadily is the same for both.
            load = (old_load, new_load)[(turn + 1) // 2 % 2]
            await load.steady(rate, COMPARED / TURNS, lambda second: None)
        self.assertEqual(old_load.wrong + new_load.wrong, [])
        aged, fresh = (percentile(load.gaps, 0.99) for load in (old_load, new_load))
        figure("soak's time between tokens", f"p99 {fresh * 1e3:.2f} ms of a new server, "
               f"{aged * 1e3:.2f} ms of this one ({aged / fresh - 1:+.1%}), by turns")
        if SOAK >= STEADY_FROM:
            self.assertLessEqual(aged, 1.05 * fresh * SLACK)


if __name__ == "__main__":
    unittest.main(verbosity=2)
