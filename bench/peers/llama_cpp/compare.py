#!/usr/bin/env python3
"""Measures llama.cpp and Fathom on a DeepSeek-V2-Lite form with random weights, in turns.

usage: compare.py --fathom FILE --llama FILE --scratch DIR [--turns N] [--types bf16,8bit]
                  [--version TEXT] [--out FILE]

--llama is llama-batched-bench with CUDA; --scratch takes a GGUF file of 32 GB (make_gguf.py), in
memory if it can be. In each turn either program runs once a type; llama.cpp measures each batch
three times in one process, Fathom five times in a process a batch. 8bit: FP8 of Fathom, q8_0 of
llama.cpp. Run from the repository's root.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
TYPES = {"bf16": ("bench/models/v2-lite", "bf16"), "8bit": ("bench/models/v2-lite-fp8", "q8_0")}
BATCHES, TOKENS_IN, TOKENS_OUT = (1, 8, 64), 1024, 128
METRICS = ("prefill_tokens_per_second", "decode_tokens_per_second")


def run(command):
    print("+", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command[0]}: status {done.returncode}\n"
                 f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def llama_command(program, file):
    batches = ",".join(str(batch) for batch in BATCHES for _ in range(3))
    return [program, "--model", file, "--n-gpu-layers", "99", "--flash-attn", "on",
            "--ctx-size", str(max(BATCHES) * (TOKENS_IN + TOKENS_OUT)), "--batch-size", "8192",
            "--ubatch-size", "2048", "-npp", str(TOKENS_IN), "-ntg", str(TOKENS_OUT),
            "-npl", batches, "--output-format", "jsonl"]


def llama_rows(command):
    """(batch, prefill, decode) of each measurement."""
    lines = [json.loads(line[line.index("{"):]) for line in run(command).splitlines()
             if '"speed_tg"' in line]
    return [(line["pl"], line["speed_pp"], line["speed_tg"]) for line in lines]


def fathom_command(program, model, batch):
    return [program, "bench", "latency", model, "--device", "cuda:0", "--load-format", "dummy",
            "--batch-size", str(batch), "--input-len", str(TOKENS_IN), "--output-len",
            str(TOKENS_OUT), "--num-iters", "5", "--num-iters-warmup", "1", "--quiet", "--json"]


def fathom_rows(program, model):
    for batch in BATCHES:
        printed = run(fathom_command(program, model, batch))
        printed = json.loads(printed[printed.index("{"):printed.rindex("}") + 1])
        yield (batch, *(printed[metric] for metric in METRICS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fathom", required=True)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--types", default="bf16,8bit")
    parser.add_argument("--version", default="", help="of llama.cpp, for the record")
    parser.add_argument("--out")
    options = parser.parse_args()

    rows, commands = {}, []
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True, check=True).stdout.strip()
    for kind in options.types.split(","):
        model, packed = TYPES[kind]
        file = os.path.join(options.scratch, f"v2-lite-{packed}.gguf")
        run([sys.executable, str(HERE / "make_gguf.py"), f"{model}/config.json", file, "--type",
             packed])
        commands += [llama_command(options.llama, file),
                     fathom_command(options.fathom, model, BATCHES[0])]
        for _ in range(options.turns):
            for engine, measured in (
                    ("llama.cpp", llama_rows(llama_command(options.llama, file))),
                    ("fathom", fathom_rows(options.fathom, model))):
                for batch, *rates in measured:
                    for metric, rate in zip(METRICS, rates):
                        engines = rows.setdefault((kind, batch, metric), {})
                        engines.setdefault(engine, []).append(rate)
        os.remove(file)

    report = {"gpu": gpu, "date": datetime.date.today().isoformat(), "llama_cpp": options.version,
              "commands": [" ".join(command) for command in commands], "rows": []}
    for (kind, batch, metric), engines in rows.items():
        line = {"weights": kind, "batch": batch, "metric": metric}
        for engine, rates in engines.items():
            line[engine] = {"median": round(statistics.median(rates), 1), "min": min(rates),
                            "max": max(rates), "runs": len(rates)}
        line["ratio"] = round(line["fathom"]["median"] / line["llama.cpp"]["median"], 2)
        report["rows"].append(line)
        print(f"{kind:5} batch {batch:3} {metric:26} llama.cpp {line['llama.cpp']['median']:10.1f} "
              f"fathom {line['fathom']['median']:10.1f}  {line['ratio']}", file=sys.stderr)
    text = json.dumps(report, indent=1) + "\n"
    if options.out:
        pathlib.Path(options.out).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
