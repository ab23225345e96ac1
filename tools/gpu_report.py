#!/usr/bin/env python3
"""Measures every GPU figure of README.md and docs/performance.md, each several times.

usage: gpu_report.py [--only GROUP[,GROUP]] [--programs DIR] [--fathom FILE] [--repeats N]
                     [--out FILE] [--commit HASH] [--budget SECONDS] [--list]

The figures are those of the groups below, all without --only. Programs come from `make gpu` (or
were built elsewhere and copied); one that is missing ends its group. Rows that are measured replace
those of the same name in the output, which is written after each program: a run that is cut off by
its machine's limit is continued by another with the groups that are left. tools/make_tables.py makes
the documents' tables of the result. Run from the repository's root.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import gpu_report_rows  # noqa: E402

V2_LITE, V2_LITE_FP8 = "bench/models/v2-lite", "bench/models/v2-lite-fp8"
AZURE = "AZURE"  # stands for --azure's file
V3, V3_SLICE = "bench/models/v3-10-layers", "bench/models/v3-10-layers-eighth"


def latency(model, batch, tokens_in, tokens_out, *more, iters=5):
    return ["bench", "latency", model, "--device", "cuda:0", "--load-format", "dummy",
            "--batch-size", str(batch), "--input-len", str(tokens_in), "--output-len",
            str(tokens_out), "--num-iters", str(iters), "--num-iters-warmup", "1", "--quiet",
            "--json", *more]


def throughput(model, *more):
    return ["bench", "throughput", model, "--device", "cuda:0", "--load-format", "dummy",
            "--max-num-seqs", "1024", "--quiet", "--json", *more]


# Group: (seconds that one run of it takes on an H200, by estimate; its runs). A run is a name and
# the arguments of fathom, or a benchmark of the programs' folder with its arguments.
GROUPS = {
    "v2_lite": (75, [
        ("v2_lite/b1", latency(V2_LITE, 1, 1024, 128)),
        ("v2_lite/b64", latency(V2_LITE, 64, 1024, 128)),
        ("v2_lite/b512", latency(V2_LITE, 512, 500, 128, "--max-num-seqs", "512", iters=2)),
        ("v2_lite/prefill_8x1024", latency(V2_LITE, 8, 1024, 1)),
        ("v2_lite/prefill_1x8192", latency(V2_LITE, 1, 8192, 1)),
    ]),
    "v2_lite_forms": (75, [
        ("v2_lite/b1_no_graphs", latency(V2_LITE, 1, 1024, 128, "--no-cuda-graphs")),
        ("v2_lite/b1_deterministic", latency(V2_LITE, 1, 1024, 128, "--deterministic")),
        ("v2_lite/prefill_8x1024_deterministic", latency(V2_LITE, 8, 1024, 1, "--deterministic")),
        ("v2_lite/prefill_1x8192_deterministic", latency(V2_LITE, 1, 8192, 1, "--deterministic")),
        ("v2_lite/b512_fp8_cache", latency(V2_LITE, 512, 500, 128, "--max-num-seqs", "512",
                                           "--kv-cache-dtype", "fp8", iters=2)),
    ]),
    "v2_lite_fp8": (40, [
        ("v2_lite_fp8/b1", latency(V2_LITE_FP8, 1, 1024, 128)),
        ("v2_lite_fp8/b64", latency(V2_LITE_FP8, 64, 1024, 128)),
        ("v2_lite_fp8/prefill_8x1024", latency(V2_LITE_FP8, 8, 1024, 1)),
    ]),
    "throughput": (45, [
        ("v2_lite/5000_220_200", throughput(V2_LITE, "--num-prompts", "5000", "--input-len", "220",
                                            "--output-len", "200")),
    ]),
    "azure": (100, [
        ("v2_lite/azure_5000", throughput(
            V2_LITE, "--dataset-name", "azure", "--dataset-path",
            AZURE, "--num-prompts", "5000")),
    ]),
    "v3_layers": (90, [("v3", ["layer_cuda_bench", V3])]),
    "v3_slice": (45, [("v3_slice", ["layer_cuda_bench", V3_SLICE])]),
    "attention_forms": (60, [("attention_forms", ["attention_form_cuda_bench", V2_LITE])]),
    "decode_steps": (20, [("decode_steps", ["decode_step_cuda_bench", V2_LITE])]),
    "ablations": (30, [("latent_decode", ["latent_decode_cuda_bench"])]),
    "loading": (60, [("loading", ["weights_cuda_bench", V2_LITE, "--layers", "5", "--threads",
                                  "8,4,12"])]),
    "kernels": (120, [
        ("mha_prefill", ["mha_prefill_cuda_bench"]),
        ("few_rows", ["few_rows_cuda_bench"]),
        ("many_rows", ["many_rows_cuda_bench"]),
        ("scaled_linear", ["scaled_linear_cuda_bench"]),
        ("scaled_absorb", ["scaled_absorb_cuda_bench"]),
        ("moe_few_rows", ["moe_few_rows_cuda_bench"]),
        ("moe_many_rows", ["moe_many_rows_cuda_bench"]),
        ("scaled_moe_few_rows", ["scaled_moe_few_rows_cuda_bench"]),
        ("scaled_moe_many_rows", ["scaled_moe_many_rows_cuda_bench"]),
        ("norms", ["rms_norm_cuda_bench"]),
        ("peer_sum", ["peer_sum_cuda_bench"]),
        ("expert_exchange", ["moe_over_ranks_cuda_bench"]),
        ("gate", ["gate_cuda_bench"]),
        ("sampling", ["sample_cuda_bench"]),
    ]),
}


def run(command, seconds):
    """What the program printed as JSON; exits with its words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n"
                           f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    begin = done.stdout.find("{")
    if begin < 0:
        raise RuntimeError(f"{' '.join(command)} printed no JSON:\n{done.stdout[-2000:]}")
    return json.loads(done.stdout[begin:])


def machine():
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=True).stdout
    name, driver = (part.strip() for part in asked.strip().split(","))
    banner = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", banner)
    return {"device": name, "driver": driver, "cuda": cuda.group(1) if cuda else ""}


def chip(device):
    return gpu_report_rows.slug(device.replace("NVIDIA", "")).replace("_", "")


def commit():
    """Of the checkout, with + where tracked files differ from it; "" outside of one."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True,
                              text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"],
                                 capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def write(path, report):
    """One line a row, so that a change of one figure is a change of one line."""
    head = {key: value for key, value in report.items() if key != "rows"}
    lines = [json.dumps(head)[:-1] + ', "rows": {']
    names = sorted(report["rows"])
    for name in names:
        comma = "" if name == names[-1] else ","
        lines.append(f"  {json.dumps(name)}: {json.dumps(report['rows'][name])}{comma}")
    path.write_text("\n".join(lines) + "\n}}\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="groups, separated by commas")
    parser.add_argument("--programs", default="build/release/gpu", help="folder of *_cuda_bench")
    parser.add_argument("--fathom", default="build/release/src/cli/fathom")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="default: bench/results/gpu_report_<chip>.json")
    parser.add_argument("--commit", help="where there is no checkout: what was built")
    parser.add_argument("--budget", type=float, help="begin no program that would end later")
    parser.add_argument("--azure", help="AzureLLMInferenceTrace_conv.csv, of Azure's public dataset "
                        "(its first 5,000 requests); without it the group azure is left out")
    parser.add_argument("--list", action="store_true", help="groups and their times, and end")
    flags = parser.parse_args()
    if flags.repeats < 1:
        sys.exit(f"--repeats is {flags.repeats}, must be at least 1")
    if flags.list:
        for name, (seconds, runs) in GROUPS.items():
            print(f"{name:16} {seconds * flags.repeats:5} s, {flags.repeats} times: "
                  f"{', '.join(name for name, _ in runs)}")
        print(f"{'all':16} {sum(s for s, _ in GROUPS.values()) * flags.repeats:5} s")
        return
    wanted = flags.only.split(",") if flags.only else [
        name for name in GROUPS if name != "azure" or flags.azure]
    for name in wanted:
        if name not in GROUPS:
            sys.exit(f"--only {name}: there is {', '.join(GROUPS)}")
    where = machine()
    built = flags.commit or commit()
    if not built:
        sys.exit("no checkout to take the commit from: say --commit")
    path = pathlib.Path(flags.out or f"bench/results/gpu_report_{chip(where['device'])}.json")
    report = {"schema": 1, **where, "rows": {}}
    if path.exists():
        report["rows"] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    begin, failed = time.monotonic(), []
    for group in wanted:
        seconds, runs = GROUPS[group]
        left = None if flags.budget is None else flags.budget - (time.monotonic() - begin)
        if left is not None and left < seconds * flags.repeats:
            print(f"{group}: left for another run, {left:.0f} s of the budget are left")
            failed.append(group)
            continue
        for name, arguments in runs:
            is_fathom = arguments[0] == "bench"
            arguments = [flags.azure or "" if part == AZURE else part for part in arguments]
            program = flags.fathom if is_fathom else os.path.join(flags.programs, arguments[0])
            command = [program, *arguments] if is_fathom else [program, *arguments[1:], "--json"]
            rows_of = gpu_report_rows.of_fathom if is_fathom else gpu_report_rows.of_benchmark
            started = time.monotonic()
            try:
                found = [rows_of(name, run(command, 600)) for _ in range(flags.repeats)]
            except (OSError, RuntimeError, ValueError, KeyError,
                    subprocess.TimeoutExpired) as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                failed.append(name)
                continue
            shown = [os.path.basename(program), *command[1:]]
            date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
            report["rows"].update(gpu_report_rows.measured(
                found, commit=built, date=date, device=where["device"], driver=where["driver"],
                command=" ".join(shown)))
            write(path, report)
            print(f"{name}: {len(found[0])} rows in {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
