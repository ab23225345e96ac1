#!/usr/bin/env python3
"""Decoding at batch 1 alone and beside one process that computes without end, on the same CPUs.

    bench_neighbour.py PROGRAM [BASELINE] [--rounds 7] [--cpus 0,1] [--neighbours 1] [--limit 2.5]

Measures `fathom bench latency` of the bundled model (FP8) and of its shape with random bf16 weights, one
thread a CPU, in turns: PROGRAM and BASELINE, each alone and beside the neighbour. Prints the medians in ms
a token and their ratios, of which those of a round are paired. Ends with status 1 when PROGRAM beside the
neighbour takes more than LIMIT times as long as alone. The machine must have nothing else to do.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
MODEL = os.path.join(SOURCE, "models/fathom-tiny")
WORK = ["--input-len", "32", "--output-len", "256", "--num-iters-warmup", "1", "--num-iters", "4", "--seed",
        "1", "--device", "cpu", "--json", "--quiet"]


def bf16_shape(folder):
    """The bundled model's configuration without quantisation."""
    with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config.pop("quantization_config", None)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return [folder, "--load-format", "dummy"]


def measure(program, model, cpus):
    """Milliseconds a token."""
    done = subprocess.run([program, "bench", "latency", *model, *WORK, "--threads", str(len(cpus))],
                          stdout=subprocess.PIPE, check=True)
    return 1e3 / json.loads(done.stdout)["decode_tokens_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("baseline", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpus", default="0,1")
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--limit", type=float, default=2.5)
    given = parser.parse_args()
    cpus = {int(cpu) for cpu in given.cpus.split(",")}
    os.sched_setaffinity(0, cpus)
    programs = {"program": given.program, **({"baseline": given.baseline} if given.baseline else {})}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for dtype, model in (("fp8", [MODEL]), ("bf16", bf16_shape(folder))):
            times = {(name, place): [] for name in programs for place in ("alone", "beside")}
            for _ in range(given.rounds):
                for place in ("alone", "beside"):
                    count = given.neighbours if place == "beside" else 0
                    busy = [subprocess.Popen(["yes"], stdout=subprocess.DEVNULL) for _ in range(count)]
                    try:
                        for name, program in programs.items():
                            times[name, place].append(measure(program, model, cpus))
                    finally:
                        for neighbour in busy:
                            neighbour.kill()
                            neighbour.wait()

            def ratio(above, below):
                ratios = [a / b for a, b in zip(times[above], times[below])]
                return statistics.median(ratios), min(ratios), max(ratios)

            for name in programs:
                alone, beside = (statistics.median(times[name, place]) for place in ("alone", "beside"))
                middle, low, high = ratio((name, "beside"), (name, "alone"))
                print(f"{dtype} {name}: {alone:.3f} ms a token alone, {beside:.3f} ms beside the neighbour, "
                      f"{middle:.2f} times as long ({low:.2f} to {high:.2f})", flush=True)
                failed |= name == "program" and middle > given.limit
            if given.baseline:
                middle, low, high = ratio(("baseline", "alone"), ("program", "alone"))
                print(f"{dtype} alone: {middle:.3f} of the baseline's speed ({low:.3f} to {high:.3f})",
                      flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
