#!/usr/bin/env python3
"""Measures every GPU figure of README.md and docs/performance.md, each several times.

usage: gpu_report.py [--only NAME[,NAME]] [--programs DIR] [--fathom FILE] [--repeats N]
                     [--out FILE] [--commit HASH] [--budget SECONDS] [--list]

The figures are those of tools/gpu_report_groups.py, all without --only, which names groups or runs;
groups of more GPUs than there are are not run. Programs come from `make gpu` (or were built elsewhere and copied); one that
is missing ends its group. Rows that are measured replace those of the same name in the output,
which is written after each program: a run that is cut off by its machine's limit is continued by
another with the groups that are left. tools/make_tables.py makes the documents' tables of the
result. Run from the repository's root.
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
from gpu_report_groups import AZURE, GROUPS  # noqa: E402

def run(command, seconds, gpus_of_run):
    """What the program printed as JSON; exits with its words where it fails."""
    # Benchmarks of ranks take all the GPUs that they see.
    visible = ",".join(str(gpu) for gpu in range(gpus_of_run))
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n"
                           f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    begin = done.stdout.find("{")
    if begin < 0:
        raise RuntimeError(f"{' '.join(command)} printed no JSON:\n{done.stdout[-2000:]}")
    return json.loads(done.stdout[begin:])


def gpus():
    """How many there are."""
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True,
                            check=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


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
    """The checkout's commit, with + where tracked files differ from it; "" outside of one."""
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


def named_groups(names):
    """The groups of these names; of a run's name, its group with that run alone."""
    groups = {}
    for name in names:
        if name in GROUPS:
            groups[name] = GROUPS[name]
            continue
        found = [(group, run) for group, of in GROUPS.items() for run in of.runs if run[0] == name]
        if not found:
            sys.exit(f"--only {name}: no group and no run has this name; groups: {', '.join(GROUPS)}")
        (group, one), = found
        before = groups.get(group, GROUPS[group]._replace(seconds=0, runs=[]))
        share = GROUPS[group].seconds / len(GROUPS[group].runs)
        groups[group] = before._replace(seconds=before.seconds + share, runs=[*before.runs, one])
    return groups


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="groups or runs (v2_lite/b1), separated by commas")
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
        for name, (seconds, runs, needed) in GROUPS.items():
            print(f"{name:18} {needed} GPU{'s' * (needed > 1)} {seconds * flags.repeats:5} s, "
                  f"{flags.repeats} times: {', '.join(name for name, _ in runs)}")
        print(f"{'all':18} {sum(g.seconds for g in GROUPS.values()) * flags.repeats:12} s")
        return
    wanted = named_groups(flags.only.split(",") if flags.only else [
        name for name in GROUPS if name != "azure" or flags.azure])
    where, available = machine(), gpus()
    built = flags.commit or commit()
    if not built:
        sys.exit("no checkout to take the commit from: say --commit")
    path = pathlib.Path(flags.out or f"bench/results/gpu_report_{chip(where['device'])}.json")
    report = {"schema": 1, **where, "rows": {}}
    if path.exists():
        report["rows"] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    begin, failed = time.monotonic(), []
    for group, (seconds, runs, needed) in wanted.items():
        if needed > available:
            print(f"{group}: not run, needs {needed} GPUs of {available}")
            if flags.only:
                failed.append(group)
            continue
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
                found = [rows_of(name, run(command, 600, needed)) for _ in range(flags.repeats)]
            except (OSError, RuntimeError, ValueError, KeyError,
                    subprocess.TimeoutExpired) as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                failed.append(name)
                continue
            shown = [os.path.basename(program), *command[1:]]
            date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
            report["rows"].update(gpu_report_rows.measured(
                found, commit=built, date=date,
                driver=where["driver"],
                device=where["device"] if needed == 1 else f"{needed} {where['device']}",
                command=" ".join(shown)))
            write(path, report)
            print(f"{name}: {len(found[0])} rows in {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
