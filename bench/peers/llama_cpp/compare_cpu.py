#!/usr/bin/env python3
"""Decode at batch 1 on a CPU: Fathom's FP8 and INT4 beside llama.cpp's four bits, in turns.

usage: compare_cpu.py --fathom FILE --probe FILE --llama FILE --scratch DIR [--threads 2,8,16]
                      [--turns N] [--seconds N] [--llama-types q4_k,q4_0] [--layers N]
                      [--probe-bytes N] [--version TEXT] [--out FILE]

DeepSeek-V2-Lite's form with random weights. --llama is llama-batched-bench, built natively;
--scratch takes the GGUF files, in memory if it can be, or has them from a run before. For each
number of threads all models are loaded, a process each (about 50 GB), and only one of them works at
a time: Fathom's are servers, llama.cpp's are stopped by SIGSTOP behind a measurement and go on with
the next one's prompt. A turn is the probe's read bandwidth (each pass of all threads over --probe-
bytes in a second), then a decode by each engine; the probe runs once more behind the last turn.
Beside each rate the report has what else the machine did (conditions.py). A process is pinned to as
many CPUs as it has threads, on different cores as long as there are some. --seconds: no turn of a
number of threads begins later than that after its first. An engine that fails is left out, with its
last words in the report, which is written anew after each number of threads. Run from the
repository's root.

Fathom's rate is that of so many further tokens: the time of an answer of n + 1 tokens less that of
an answer of one, prompts of 32 tokens each. llama-batched-bench times n steps after such a prompt;
it computes logits and samples nothing.
"""

import argparse
import atexit
import datetime
import glob
import http.client
import json
import os
import pathlib
import platform
import queue
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import conditions
from compare import run

HERE = pathlib.Path(__file__).parent
FATHOM_MODELS = {"fp8": "bench/models/v2-lite-fp8", "int4-g32": "bench/models/v2-lite-int4"}
TOKENIZER = "models/fathom-tiny/tokenizer.json"  # any with fewer tokens than the model
PROMPT = 32


def decoded_tokens(threads):
    """Some seconds of decode."""
    return 32 if threads <= 2 else 64


def recorded(options, command):
    """For the report: programs by name, no folders and ports of this machine."""
    text = " ".join(command).replace(f"{options.scratch}/", "")
    for program in (options.fathom, options.probe, options.llama):
        text = text.replace(program, os.path.basename(program))
    return re.sub(r" --port \d+", "", text)


def cpus_by_core():
    """The usable CPUs, first one of each core, then their siblings."""
    usable, firsts, others, seen = sorted(os.sched_getaffinity(0)), [], [], set()
    for cpu in usable:
        file = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        core = pathlib.Path(file).read_text().strip() if os.path.exists(file) else str(cpu)
        (others if core in seen else firsts).append(cpu)
        seen.add(core)
    return firsts + others


class EngineFailed(Exception):
    pass


def config_of(options, kind):
    """The config.json of a model folder in --scratch, with --layers layers."""
    model = pathlib.Path(options.scratch) / f"fathom-{kind}"
    model.mkdir(exist_ok=True)
    config = json.loads(pathlib.Path(FATHOM_MODELS[kind], "config.json").read_text())
    if options.layers:
        config["num_hidden_layers"] = options.layers
    (model / "config.json").write_text(json.dumps(config))
    shutil.copy(TOKENIZER, model / "tokenizer.json")
    return model / "config.json"


class Server:
    """`fathom serve` with one model, pinned once it is loaded."""

    def __init__(self, options, kind, threads, cpus):
        file = config_of(options, kind)
        model = file.parent
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.cpus, self.vocabulary = cpus, json.loads(file.read_text())["vocab_size"]
        self.command = [options.fathom, "serve", str(model), "--device", "cpu", "--load-format",
                        "dummy", "--threads", str(threads), "--port", str(self.port),
                        "--no-enable-prefix-caching", "--max-total-tokens", "1024",
                        "--max-num-seqs", "1", "--quiet"]
        print("+", " ".join(self.command), file=sys.stderr, flush=True)
        self.log = open(model / f"{threads}.log", "w", encoding="utf-8")
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        atexit.register(self.process.kill)

    def wait_until_loaded(self):
        while True:
            if self.process.poll() is not None:
                raise EngineFailed(f"status {self.process.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        for thread in glob.glob(f"/proc/{self.process.pid}/task/*"):
            os.sched_setaffinity(int(thread.rsplit("/", 1)[1]), self.cpus)
        self.seconds(4)

    def seconds(self, tokens):
        prompt = [random.randrange(self.vocabulary) for _ in range(PROMPT)]
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        reply = json.loads(connection.getresponse().read())
        taken = time.perf_counter() - begin
        if reply.get("usage", {}).get("completion_tokens") != tokens:
            raise EngineFailed(f"expected {tokens} tokens: {reply}")
        return taken

    def rate(self, tokens):
        return tokens / (self.seconds(tokens + 1) - self.seconds(1))


def pinned(cpus):
    return ["taskset", "-c", ",".join(str(cpu) for cpu in cpus)]


class Llama:
    """llama-batched-bench with one file, stopped between its measurements."""

    def __init__(self, options, kind, file, threads, cpus):
        rounds = options.turns + 1
        self.command = [*pinned(cpus), options.llama, "--model", file, "--threads", str(threads),
                        "--threads-batch", str(threads), "--ctx-size", "512", "-npp", str(PROMPT),
                        "-ntg", str(decoded_tokens(threads)), "-npl", ",".join(["1"] * rounds),
                        "--output-format", "jsonl"]
        print("+", " ".join(self.command), file=sys.stderr, flush=True)
        self.log = pathlib.Path(options.scratch) / f"llama-{kind}-{threads}.log"
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log,
                                            text=True)
        atexit.register(self.process.kill)
        self.rates = queue.SimpleQueue()
        threading.Thread(target=self.stop_at_each, daemon=True).start()

    def stop_at_each(self):
        for line in self.process.stdout:
            if '"speed_tg"' in line:
                self.process.send_signal(signal.SIGSTOP)
                self.rates.put(json.loads(line[line.index("{"):])["speed_tg"])
        self.rates.put(None)

    def next_rate(self):
        rate = self.rates.get()
        if rate is None:
            raise EngineFailed(self.log.read_text(encoding="utf-8", errors="replace")[-1500:])
        return rate

    def wait_until_loaded(self):
        self.next_rate()  # a first measurement warms up

    def rate(self, _):
        self.process.send_signal(signal.SIGCONT)
        return self.next_rate()


def read_bandwidth(options, threads, cpus):
    """Bytes per second of each pass of the probe."""
    printed = json.loads(run([*pinned(cpus), options.probe, "--threads", str(threads),
                              "--read-bytes", str(options.probe_bytes)]))
    return [1e9 * rate for rate in printed["passes_gb_per_s"]]


def step_bytes(options, kind):
    """Bytes that one decode step reads, by Fathom's own count; and the command that tells them."""
    command = [options.fathom, "bench", "latency", FATHOM_MODELS[kind], "--device", "cpu",
               "--load-format", "dummy", "--input-len", str(PROMPT), "--output-len", "64",
               "--num-iters", "1", "--quiet", "--json"]
    if options.layers:
        command += ["--num-hidden-layers", str(options.layers)]
    text = run(command)
    return json.loads(text[text.index("{"):text.rindex("}") + 1])["decode_step_bytes"], command


def machine():
    printed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    field = {name: value for name, value in re.findall(r"^(.+?): +(.+)$", printed, re.M)}
    return {"cpu": field.get("Model name", platform.processor()), "cpus": os.cpu_count(),
            "threads_per_core": field.get("Thread(s) per core", ""),
            "numa_nodes": field.get("NUMA node(s)", ""), "l3": field.get("L3 cache", ""),
            "amx": "amx_tile" in printed, "avx512_bf16": "avx512_bf16" in printed}


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values),
            "runs": len(values)}


class Engines:
    """All engines with one number of threads; those that fail leave."""

    def __init__(self, options, count, cpus, files, failed):
        self.options, self.count, self.cpus, self.failed = options, count, cpus, failed
        self.running, self.commands = {}, []
        starts = {f"fathom {kind}": (Server, kind) for kind in FATHOM_MODELS}
        starts |= {f"llama.cpp {kind}": (Llama, kind, file) for kind, file in files.items()}
        # One after the other: threads that spin at barriers slow the others' loading down to minutes.
        for name, (engine, *what) in starts.items():
            begin = time.monotonic()
            self.running[name] = engine(options, *what, count, cpus)
            self.commands.append(recorded(options, self.running[name].command))
            self.attempt(name, lambda engine: engine.wait_until_loaded())
            print(f"{name}: loaded in {time.monotonic() - begin:.0f} s", file=sys.stderr,
                  flush=True)

    def attempt(self, name, action):
        try:
            return action(self.running[name])
        except (EngineFailed, OSError) as failure:
            print(f"{name}, {self.count} threads: {failure}", file=sys.stderr, flush=True)
            self.failed[f"{name}, {self.count} threads"] = str(failure)
            self.running.pop(name).process.kill()
            return None

    def turns(self):
        """The rates of each engine, the probe's as `read_bandwidth`, and each turn's conditions."""
        rates, turns, begin = {"read_bandwidth": []}, [], time.monotonic()
        for _ in range(self.options.turns):
            if time.monotonic() - begin > self.options.seconds:
                break
            probed = read_bandwidth(self.options, self.count, self.cpus)
            rates["read_bandwidth"] += probed
            turns.append({"read_bandwidth": probed})
            for name in list(self.running):
                pid = self.running[name].process.pid
                before = conditions.snapshot(pid)
                rate = self.attempt(name, lambda engine: engine.rate(decoded_tokens(self.count)))
                if rate is not None:
                    rates.setdefault(name, []).append(rate)
                    turns[-1][name] = {"rate": rate, **conditions.since(before, pid)}
                    print(f"{time.monotonic() - begin:.0f} s: {name} {turns[-1][name]}",
                          file=sys.stderr, flush=True)
        rates["read_bandwidth"] += read_bandwidth(self.options, self.count, self.cpus)
        return rates, turns

    def stop(self):
        for engine in self.running.values():
            engine.process.kill()
            engine.process.wait()


def row_of(count, rates, turns, counted):
    row = {"threads": count, **{name: summary(values) for name, values in rates.items()}}
    for kind, step in counted.items():
        name = f"fathom {kind}"
        shares = [turn[name]["rate"] * step / statistics.median(turn["read_bandwidth"])
                  for turn in turns if name in turn]
        if shares:  # of the same turn each, then their median
            row[name]["of_read_bandwidth"] = statistics.median(shares)
            row[name]["of_highest_read"] = row[name]["median"] * step / row["read_bandwidth"]["max"]
    int4 = row.get("fathom int4-g32")
    for name in [name for name in row if name == "fathom fp8" or name.startswith("llama.cpp")]:
        if int4:  # of one turn each, then their median
            row[f"int4_over_{name}"] = statistics.median(
                mine / other for mine, other in zip(rates["fathom int4-g32"], rates[name]))
    row["turns"] = turns
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("fathom", "probe", "llama", "scratch"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--threads", default="2,8,16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--llama-types", default="q4_k,q4_0")
    parser.add_argument("--layers", type=int, help="of the model, instead of all")
    parser.add_argument("--probe-bytes", type=int, default=6 << 30)
    parser.add_argument("--version", default="", help="of llama.cpp, for the record")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    cpus = cpus_by_core()
    report = {"machine": machine(), "date": datetime.date.today().isoformat(),
              "llama_cpp": options.version, "layers": options.layers or "all",
              "commands": [], "failed": {}, "rows": []}
    counted = {}
    for kind in FATHOM_MODELS:
        counted[kind], command = step_bytes(options, kind)
        report["commands"].append(recorded(options, command))
        report[f"decode_step_bytes {kind}"] = counted[kind]
    files = {}
    for kind in options.llama_types.split(","):
        files[kind] = os.path.join(options.scratch, f"v2-lite-{kind}.gguf")
        if not os.path.exists(files[kind]):
            run([sys.executable, str(HERE / "make_gguf.py"), str(config_of(options, "fp8")),
                 files[kind], "--type", kind])
    for count in (int(count) for count in options.threads.split(",")):
        engines = Engines(options, count, cpus[:count], files, report["failed"])
        report["commands"] += engines.commands
        report["rows"].append(row_of(count, *engines.turns(), counted))
        engines.stop()
        print(json.dumps(report["rows"][-1]), file=sys.stderr, flush=True)
        pathlib.Path(options.out).write_text(json.dumps(report, indent=1) + "\n",
                                             encoding="utf-8")


if __name__ == "__main__":
    main()
