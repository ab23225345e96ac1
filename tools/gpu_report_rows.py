"""Rows of a GPU report: what one run of a program printed, as named figures.

A report (bench/results/gpu_report_<chip>.json) is

  {"schema": 1, "device": "NVIDIA H200", "driver": "…", "cuda": "…",
   "rows": {NAME: {"value": median, "unit": "us", "repeats": 3, "min": …, "max": …,
                   "commit": "…", "date": "…", "command": "…"}}}

where a row that was measured before there were reports has no min and max and says `from`, the file
of bench/results that it was taken from. NAME is GROUP/KEY/…:METRIC, the keys being the fields of the
program's JSON that say what was measured, in the program's order.
"""

import re

# Fields that are results, with their units; what is not among them says what was measured.
UNITS = {
    "us": "us", "floor_us": "us", "absorbed_us": "us", "mha_us": "us", "moe_layer_us": "us",
    "step_us": "us", "step_of_fewer_layers_us": "us", "by_operations_us": "us",
    "cublaslt_us": "us", "gate_up_us": "us",
    "down_us": "us", "few_rows_us": "us", "one_row_us": "us", "without_us": "us",
    "verify_us": "us", "first_draft_us": "us", "later_draft_us": "us", "gb_s": "GB/s",
    "tflops": "TFLOP/s",
    "weights_tb_s": "TB/s", "device_mb_beside": "MB", "host_mb": "MB", "weights_mb": "MB",
    "avg_latency": "s", "decode_tokens_per_second": "tokens/s",
    "prefill_tokens_per_second": "tokens/s", "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s", "request_throughput": "requests/s",
    "decode_step_bytes": "bytes", "prefill_flops": "flop", "probe_read_bandwidth": "bytes/s",
    "probe_matrix_flops": "flop/s",
}
# Keys of a benchmark's lines that are neither what was measured nor a result.
IGNORED = {"commit", "date", "note", "deepgemm_us", "flop", "bytes", "plan", "tile", "ratio",
           "bytes_ratio", "gain"}


def slug(value):
    """A key as it stands in a name: no blanks, commas, slashes or colons."""
    text = re.sub(r"[,()]", "", str(value).lower())
    return re.sub(r"[\s/:]+", "_", text).strip("_")


def named(group, line, keys=None):
    """{NAME: value} of one object that a program printed. `keys`: in place of the object's own."""
    if keys is None:
        keys = [slug(value) if isinstance(value, str) else slug(f"{name}{value}")
                for name, value in line.items() if name not in UNITS and name not in IGNORED]
    prefix = "/".join([group, *keys])
    return {f"{prefix}:{metric}": float(line[metric]) for metric in line
            if metric in UNITS and isinstance(line[metric], (int, float))}


def of_benchmark(group, printed):
    """{NAME: value} of what a *_cuda_bench printed with --json: {"device": …, "results": […]}."""
    rows = {}
    for line in printed["results"]:
        rows.update(named(group, line))
    return rows


def of_fathom(name, printed):
    """{NAME: value} of what `fathom bench latency|throughput --json` printed."""
    group, _, key = name.partition("/")
    return named(group, printed, [key])


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def measured(runs, **about):
    """Rows of a report from the runs' {NAME: value}; `about`: what all have."""
    rows = {}
    for name in runs[0]:
        values = [run[name] for run in runs if name in run]
        rows[name] = {"value": median(values), "unit": UNITS[name.rpartition(":")[2]],
                      "repeats": len(values), "min": min(values), "max": max(values), **about}
    return rows
