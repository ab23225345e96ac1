"""What the documents' figures show, from bench/results ("scaling": computed): for tools/plots.py,
and for a test that the figures are up to date. Needs no package.
"""
import hashlib
import json
import pathlib
import re

import scaling as placements

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = "bench/results/gpu_report_h200.json"


def load(name):
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def decode_batch():
    """{engine and weights: {sequences: output tokens/s}}, V2-Lite's shape, 1K context, in turns."""
    lines = {}
    for row in load("bench/results/vllm_h200.json")["rows"]:
        if row["metric"] == "decode tokens/s":
            for engine, name in (("fathom", "Fathom"), ("vllm", "vLLM")):
                label = f"{name}, {row['weights'].replace('fp8', 'FP8')}"
                lines.setdefault(label, {})[row["batch"]] = row[engine]["median"]
    return {label: dict(sorted(points.items())) for label, points in lines.items()}


def v3_layers():
    """{work: us of roofline and Fathom}; rooflines are those of the documents' table."""
    table = (ROOT / "bench/tables/v3_layers.md").read_text(encoding="utf-8")
    rows, shown = load(REPORT)["rows"], {}
    for line in table.splitlines():
        found = re.match(r"\| (decode|prefill)(.*?) \| ([\d,]+) \|.*?\{\{(v3/[^|}]+)", line)
        if found:
            work = found[2].removeprefix(", ").removesuffix(", 1K context").removesuffix(", 1K")
            shown[work if found[1] == "decode" else f"prefill {work.removesuffix(' tokens')}"] = {
                "roofline": float(found[3].replace(",", "")), "Fathom": rows[found[4]]["value"]}
    return shown


def decode_attention():
    """{heads: {line: {keys: us}}} of one sequence."""
    rows, lines = load(REPORT)["rows"], {}
    for name, row in rows.items():
        found = re.fullmatch(r"latent_decode/latent_decode_bf16/(\d+)_heads_1_x_1_x_(\d+):us", name)
        if found and int(found[1]) in (16, 128):
            heads, keys = int(found[1]), int(found[2])
            of_heads = lines.setdefault(heads, {"roofline": {}, "FlashMLA": {}, "Fathom": {}})
            of_heads["Fathom"][keys] = row["value"]
            of_heads["roofline"][keys] = rows[f"{name.removesuffix('us')}floor_us"]["value"]
    for row in load("bench/results/flashmla_h200.json")["results"]:
        if row["sequences"] == 1 and row["heads"] in lines:
            lines[row["heads"]]["FlashMLA"][row["keys"]] = row["us"]
    return {heads: {label: dict(sorted(points.items())) for label, points in of_heads.items()}
            for heads, of_heads in sorted(lines.items())}


def scaling():
    """{context: {placement: [tokens/s of each request, tokens/s a GPU]}}, V3 on 8 H200."""
    model, shown = placements.Model(), {}
    for context in (1024, 4096):
        for placement in placements.ON_8:
            capacity, loads = placement.capacity(context, "fp8"), [1, 2, 4]
            while loads[-1] < capacity:
                loads.append(min(2 * loads[-1], capacity))
            rates = [model.tokens_per_second(placement, load, context) for load in loads]
            shown.setdefault(context, {})[placement.name] = [
                [rate / load, rate / placement.gpus] for rate, load in zip(rates, loads)]
    return shown


FIGURES = {"decode_batch": decode_batch, "v3_layers": v3_layers,
           "decode_attention": decode_attention, "scaling": scaling}


def digest(data):
    """Names the data that a figure was drawn from; six digits are enough of a computed one."""
    text = json.dumps(data, default=str)
    return hashlib.sha256(re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda number: f"{float(number[0]):.6g}",
                                 text).encode()).hexdigest()[:16]
