#!/usr/bin/env python3
"""Measures vLLM and Fathom on a DeepSeek-V2-Lite form with random weights, in turns.

usage: compare.py --fathom FILE [--turns N] [--types bf16,fp8] [--rows prefill,1,64,512,azure]
                  [--azure FILE] [--num-prompts N] [--backend NAME] [--memory SHARE]
                  [--checkpoints DIR] [--out FILE]

Both programs are timed from outside: an iteration is a batch of random prompts, from submission to
the last token, greedy, no end token, no shared prefixes. Prefill is the time of one output token;
decode is the difference between 1 and 129 output tokens. vLLM starts once a type and keeps a share
of the GPU's memory while Fathom measures; Fathom starts once a row, turn and length. azure:
requests of Azure's trace, all at once. With --checkpoints both programs load DIR/bf16 and DIR/fp8
of make_checkpoint.py, and so route equally; without it each has random weights of its own. Run from
the repository's root.
"""

import argparse
import csv
import datetime
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

TYPES = {"bf16": "bench/models/v2-lite", "fp8": "bench/models/v2-lite-fp8"}
VOCABULARY, TOKENS_IN, TOKENS_OUT, MOST_SEQUENCES = 102400, 1024, 129, 1024
BATCHES = {"prefill": 8, "1": 1, "64": 64, "512": 512}
# The iterations of a turn and those before them; 512 prompts take seconds.
ITERATIONS = {"prefill": (5, 1), "1": (3, 1), "64": (2, 1), "512": (1, 0)}


class Fathom:
    def __init__(self, program, kind, checkpoint):
        self.start, self.end = [program, "bench"], ["--device", "cuda:0", "--quiet", "--json"]
        if not checkpoint:
            self.end += ["--load-format", "dummy"]
        self.model, self.commands = checkpoint or TYPES[kind], {}

    def run(self, command, row):
        self.commands[row] = " ".join(command)
        print("+", " ".join(command), file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(done.stdout[done.stdout.index("{"):done.stdout.rindex("}") + 1])

    def seconds(self, row, tokens_out):
        iterations, warmup = ITERATIONS[row]
        command = [*self.start, "latency", self.model, *self.end, "--batch-size",
                   str(BATCHES[row]), "--input-len", str(TOKENS_IN), "--output-len",
                   str(tokens_out), "--num-iters", str(iterations), "--num-iters-warmup",
                   str(warmup)]
        return statistics.median(self.run(command, f"{row}, {tokens_out} out")["latencies"])

    def azure(self, file, requests):
        command = [*self.start, "throughput", self.model, *self.end, "--max-num-seqs",
                   str(MOST_SEQUENCES), "--dataset-name", "azure", "--dataset-path", file,
                   "--num-prompts", str(requests)]
        printed = self.run(command, "azure")
        if printed["completed"] != requests:
            sys.exit(f"fathom: {printed['completed']} of {requests} requests completed")
        return printed["output_throughput"]


class Vllm:
    def __init__(self, kind, backend, memory, checkpoint):
        import vllm  # pylint: disable=import-outside-toplevel
        self.vllm, self.random, self.warm = vllm, random.Random(0), set()
        self.config = tempfile.TemporaryDirectory()
        # Azure's longest request fits in 16,384 tokens; what is not named here is vLLM's choice.
        self.arguments = {
            "model": checkpoint or self.config.name, "skip_tokenizer_init": True,
            "max_model_len": 16384, "max_num_seqs": MOST_SEQUENCES,
            "enable_prefix_caching": False, "gpu_memory_utilization": memory}
        if not checkpoint:
            self.write_config(kind)
            self.arguments["load_format"] = "dummy"
        if backend:
            self.arguments["attention_config"] = {"backend": backend}
        self.diversity = {}
        begin = time.perf_counter()
        self.engine = vllm.LLM(**self.arguments)
        print(f"vLLM started in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)

    def write_config(self, kind):
        config = json.loads(pathlib.Path(TYPES[kind], "config.json").read_text())
        if kind == "fp8":  # vLLM merges gate and up; 10,944 rows are no multiple of its blocks
            config["quantization_config"]["ignored_layers"] = [
                f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
        pathlib.Path(self.config.name, "config.json").write_text(json.dumps(config))

    def generate(self, lengths):
        """Seconds of requests of (tokens in, tokens out), all at once; checks their lengths."""
        prompts = [{"prompt_token_ids": self.random.choices(range(VOCABULARY), k=tokens_in)}
                   for tokens_in, _ in lengths]
        sampling = [self.vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens_out,
                                             detokenize=False) for _, tokens_out in lengths]
        begin = time.perf_counter()
        answers = self.engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [answer.outputs[0].token_ids for answer in answers]
        if [len(answer) for answer in answers] != [tokens_out for _, tokens_out in lengths]:
            sys.exit("vLLM: an answer has another length than asked for")
        return seconds, len({answer[-1] for answer in answers})

    def seconds(self, row, tokens_out):
        iterations, warmup = ITERATIONS[row]
        lengths = [(TOKENS_IN, tokens_out)] * BATCHES[row]
        # The first run of a shape compiles kernels, so it is never measured.
        for _ in range(warmup if (row, tokens_out) in self.warm else max(warmup, 1)):
            self.generate(lengths)
        self.warm.add((row, tokens_out))
        measured = [self.generate(lengths) for _ in range(iterations)]
        # Equal tokens in all sequences would be routed to equal experts.
        self.diversity[row] = measured[-1][1]
        return statistics.median(seconds for seconds, _ in measured)

    def azure(self, file, requests):
        with open(file, newline="", encoding="utf-8") as lines:
            lengths = [(max(int(line["ContextTokens"]), 1), max(int(line["GeneratedTokens"]), 1))
                       for _, line in zip(range(requests), csv.DictReader(lines))]
        if "azure" not in self.diversity:  # compiles kernels, as in seconds()
            self.generate(lengths)
        seconds, self.diversity["azure"] = self.generate(lengths)
        return sum(tokens_out for _, tokens_out in lengths) / seconds

    def stop(self):
        self.engine.llm_engine.engine_core.shutdown()
        self.config.cleanup()


def measure(engine, row, options):
    """{metric: rate} of one turn."""
    if row == "azure":
        return {"output tokens/s": engine.azure(options.azure, options.num_prompts)}
    first = engine.seconds(row, 1)
    rates = {"prefill tokens/s": BATCHES[row] * TOKENS_IN / first}
    if row != "prefill":
        rates["decode tokens/s"] = (BATCHES[row] * (TOKENS_OUT - 1) /
                                    (engine.seconds(row, TOKENS_OUT) - first))
    return rates


def summarise(kind, row, metric, engines):
    line = {"weights": kind, "batch": BATCHES.get(row, row), "metric": metric}
    for engine, rates in engines.items():
        line[engine] = {"median": round(statistics.median(rates), 1), "min": round(min(rates), 1),
                        "max": round(max(rates), 1), "runs": len(rates)}
    line["ratio"] = round(line["fathom"]["median"] / line["vllm"]["median"], 2)
    print(f"{kind:5} {line['batch']:>5} {metric:16} vLLM {line['vllm']['median']:10.1f} "
          f"fathom {line['fathom']['median']:10.1f}  {line['ratio']:5.2f}", flush=True)
    return line


def versions():
    import torch  # pylint: disable=import-outside-toplevel
    import triton  # pylint: disable=import-outside-toplevel
    import vllm  # pylint: disable=import-outside-toplevel
    return {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fathom", required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--types", default="bf16,fp8")
    parser.add_argument("--rows", default="prefill,1,64,512")
    parser.add_argument("--azure", help="AzureLLMInferenceTrace_conv.csv, for the row azure")
    parser.add_argument("--num-prompts", type=int, default=1000, help="of Azure's trace")
    parser.add_argument("--backend", help="of vLLM's attention; without it vLLM chooses")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU for vLLM")
    parser.add_argument("--checkpoints", metavar="DIR", help="of make_checkpoint.py: bf16, fp8")
    parser.add_argument("--out")
    options = parser.parse_args()
    kinds, rows = options.types.split(","), options.rows.split(",")
    if not set(kinds) <= set(TYPES) or not set(rows) <= {*BATCHES, "azure"}:
        parser.error(f"--types takes {', '.join(TYPES)}; --rows {', '.join(BATCHES)}, azure")
    if "azure" in rows and not options.azure:
        parser.error("the row azure needs --azure FILE")
    checkpoints = {kind: options.checkpoints and str(pathlib.Path(options.checkpoints, kind))
                   for kind in kinds}

    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True, check=True).stdout.strip()
    report = {"gpu": gpu, "date": datetime.date.today().isoformat(), "versions": versions(),
              "weights": "equal" if options.checkpoints else "own random",
              "environment": {name: value for name, value in os.environ.items()
                              if name.startswith("VLLM_")}, "engines": {}, "rows": []}
    for kind in kinds:
        vllm = Vllm(kind, options.backend, options.memory, checkpoints[kind])
        fathom = Fathom(options.fathom, kind, checkpoints[kind])
        for row in rows:
            metrics = {}
            for _ in range(options.turns):
                for name, engine in (("vllm", vllm), ("fathom", fathom)):
                    for metric, rate in measure(engine, row, options).items():
                        metrics.setdefault(metric, {}).setdefault(name, []).append(rate)
            report["rows"] += [summarise(kind, row, metric, engines)
                               for metric, engines in metrics.items()]
            report["engines"][kind] = {"vllm": vllm.arguments, "fathom": fathom.commands,
                                       "distinct last tokens of vLLM": vllm.diversity}
            # What is measured stays if the time runs out.
            if options.out:
                pathlib.Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
        vllm.stop()
    if not options.out:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
