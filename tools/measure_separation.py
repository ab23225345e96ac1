#!/usr/bin/env python3
"""What separation does to waits: gaps between tokens of running completions beside long prompts, and how late
pages of a prompt are.

    measure_separation.py PROGRAM [--cpus 0,1] [--prompts 6] [--streams 4] [--prompt-tokens 8000] [--repeats 1]
                          [--late-only]

Servers of the bundled model in turns: one with a thread on each CPU; two of a thread each, `--role prefill`
on one CPU and `--role decode` on the other; one with ranks of both roles, of a thread each; one with one
thread. The client shares the decode server's CPU.

* gaps: STREAMS completions run while PROMPTS prompts of PROMPT-TOKENS tokens come one after another. Prints
  p50 and p99 of the times between two events of a stream, and the prompts' time to their first token.
* late: the time to the first token of prompts of 4,096 tokens on an idle pair, and on one server that
  computes them with one thread on the prefill server's CPU. The difference is the way of the order, the last
  pages and the last token's row.
"""
import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
MODEL = os.path.join(SOURCE, "models/fathom-tiny")
COMMON = ["--device", "cpu", "--max-total-tokens", "65536", "--log-level", "info"]


class Server:
    def __init__(self, program, cpus, *flags):
        self.process = subprocess.Popen(
            [program, "serve", MODEL, "--port", "0", "--threads", str(len(cpus)), *COMMON, *flags],
            stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cpus))
        for line in self.process.stderr:
            found = re.search(r"serving .* on https?://[^ ]*:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def stream(self, body):
        """Times at which its events came; the first is the request's."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        times = [time.monotonic()]
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
        connection.close()
        return times

    def stop(self):
        self.process.terminate()
        self.process.wait()


def pair(program, prefill_cpu, decode_cpu):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    prefill = Server(program, {prefill_cpu}, "--role", "prefill", "--transfer-addr", address)
    decode = Server(program, {decode_cpu}, "--role", "decode", "--prefill", address)
    return [decode, prefill]


def prompt(tokens, number):
    return [3 + (i * 7919 + number * 104729 + i * i * 31) % 900 for i in range(tokens)]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def gaps(servers, given):
    """(gaps in ms of the streams while prompts were computed, seconds to the prompts' first tokens)."""
    decode, stopping, found = servers[0], threading.Event(), []

    def run(number):
        turn = 0
        while not stopping.is_set():
            turn += 1
            found.append(decode.stream({"prompt": prompt(16, 1000 * number + turn), "max_tokens": 400,
                                        "ignore_eos": True, "temperature": 1.0, "seed": number})[1:])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(given.streams)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    begin, firsts = time.monotonic(), []
    for number in range(given.prompts):
        times = decode.stream({"prompt": prompt(given.prompt_tokens, number), "max_tokens": 1,
                               "ignore_eos": True})
        firsts.append(times[1] - times[0])
    end = time.monotonic()
    stopping.set()
    for thread in threads:
        thread.join()
    return [1e3 * (b - a) for times in found for a, b in zip(times, times[1:]) if begin < b and a < end], firsts


def first_tokens(servers, given):
    """Seconds to the first token of prompts of 4,096 tokens, alone."""
    found = []
    for number in range(given.prompts):
        times = servers[0].stream({"prompt": prompt(4096, 50 + number), "max_tokens": 1, "ignore_eos": True})
        found.append(times[1] - times[0])
    return statistics.median(found)


def measure_gaps(given, decode_cpu, prefill_cpu):
    kinds = {"one server, two threads": lambda: [Server(given.program, {decode_cpu, prefill_cpu})],
             "separated, a thread each": lambda: pair(given.program, prefill_cpu, decode_cpu),
             "ranks of one process, a thread each": lambda: [Server(
                 given.program, {decode_cpu, prefill_cpu}, "--dp", "2", "--prefill-ranks", "1",
                 "--decode-ranks", "0")]}
    p99 = {}
    for name, start in kinds.items():
        servers = start()
        times, firsts = gaps(servers, given)
        p99[name] = percentile(times, 0.99)
        print(f"{name}: {len(times)} gaps, p50 {percentile(times, 0.5):.2f} ms, p99 {p99[name]:.2f} ms, most "
              f"{max(times):.1f} ms; first token of a prompt {statistics.median(firsts):.2f} s", flush=True)
        for server in servers:
            server.stop()
    one, *others = p99.items()
    for name, apart in others:
        print(f"p99 over unseparated, {name}: {apart / one[1]:.3f}")


def measure_late(given, decode_cpu, prefill_cpu):
    alone = [Server(given.program, {prefill_cpu})]
    together = first_tokens(alone, given)
    alone[0].stop()
    servers = pair(given.program, prefill_cpu, decode_cpu)
    separated = first_tokens(servers, given)
    for server in servers:
        server.stop()
    print(f"first token of 4,096 tokens: {together * 1e3:.1f} ms on one server, {separated * 1e3:.1f} ms "
          f"separated: {1e2 * (separated / together - 1):+.1f} %", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--cpus", default="0,1")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--late-only", action="store_true")
    given = parser.parse_args()
    decode_cpu, prefill_cpu = (int(cpu) for cpu in given.cpus.split(","))
    os.sched_setaffinity(0, {decode_cpu})
    for _ in range(given.repeats):
        if not given.late_only:
            measure_gaps(given, decode_cpu, prefill_cpu)
        measure_late(given, decode_cpu, prefill_cpu)


if __name__ == "__main__":
    sys.exit(main())
