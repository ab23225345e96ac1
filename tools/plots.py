#!/usr/bin/env python3
"""Draws the documents' figures (docs/images/*.svg) from bench/results/*.json ("scaling": computed).

usage: plots.py [--check]     --check: fail if a figure differs from what the results give
"""
import argparse
import io
import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

import scaling as placements  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "bench/results", ROOT / "docs/images"
INK, PEER, LIMIT = "#1f6feb", "#d1242f", "#6e7781"
# Text stays text, and equal results give equal files.
plt.rcParams.update({"svg.hashsalt": "fathom", "svg.fonttype": "none", "font.family": "sans-serif",
                     "font.size": 10, "axes.grid": True, "grid.alpha": 0.3,
                     "axes.spines.top": False, "axes.spines.right": False})


def results(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["results"]


def shape_of(row: dict) -> tuple[int, int, int, int]:
    """heads, new tokens, sequences, keys of latent_decode_cuda_bench's rows"""
    heads, rest = row["shape"].split(" heads, ")
    return int(heads), *(int(part) for part in rest.split(" x "))


def batch() -> plt.Figure:
    """Throughput and time per output token against batch, V2-Lite's shape."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for name, label, color in (("v2_lite_h200.json", "bf16", INK),
                               ("v2_lite_fp8_h200.json", "FP8", "#8250df")):
        rows = {}
        for row in results(name):
            if re.fullmatch(r"batch \d+", row["what"]):
                rows.setdefault(row["batch_size"], row["decode_tokens_per_second"])
        sizes = sorted(rows)
        rates = [rows[size] for size in sizes]
        left.plot(sizes, rates, "o-", color=color, label=label)
        right.plot(sizes, [1000 * size / rate for size, rate in zip(sizes, rates)], "o-",
                   color=color, label=label)
    for axis, title in ((left, "output tokens/s"), (right, "ms per output token")):
        axis.set(xscale="log", yscale="log", xlabel="sequences in the batch", title=title)
        axis.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        axis.legend(frameon=False)
    left.set_yticks([500, 2000, 8000, 32000], ["500", "2,000", "8,000", "32,000"], minor=False)
    right.set_yticks([2, 4, 8, 16], ["2", "4", "8", "16"], minor=False)
    for axis in (left, right):
        axis.minorticks_off()
    figure.suptitle("V2-Lite's shape, one H200, decode (1K context; 500 at batch 512)")
    return figure


def layers() -> plt.Figure:
    """An MoE layer of DeepSeek-V3 beside its roofline."""
    measured = {(row["sequences"], row["new"]): row["moe_layer_us"]
                for row in json.loads((RESULTS / "v3_layers_h200.json").read_text())["whole_layers"]}
    rooflines = {(1, 1): 136, (16, 1): 1100, (128, 1): 2700, (1, 4096): 4200}
    names = ["batch 1", "batch 16", "batch 128", "prefill 4,096"]
    figure, axis = plt.subplots(figsize=(7, 3.4))
    places = range(len(rooflines))
    axis.bar([p - 0.2 for p in places], rooflines.values(), 0.4, color=LIMIT, label="roofline")
    axis.bar([p + 0.2 for p in places], [measured[key] for key in rooflines], 0.4, color=INK,
             label="Fathom")
    for place, key in zip(places, rooflines):
        axis.text(place + 0.2, measured[key], f"{measured[key] / rooflines[key]:.2f}x", ha="center",
                  va="bottom")
    axis.set(yscale="log", ylabel="us a layer", title="An MoE layer of DeepSeek-V3, FP8, one H200")
    axis.set_xticks(list(places), names)
    axis.legend(frameon=False)
    return figure


def attention() -> plt.Figure:
    """Decode attention of one sequence against context, beside FlashMLA and the roofline."""
    ours, floors = {}, {}
    for row in results("latent_decode_h200.json"):
        if row["operation"] != "latent_decode bf16":
            continue
        heads, new, sequences, keys = shape_of(row)
        if new == 1 and sequences == 1:
            ours.setdefault(heads, {})[keys] = row["us"]
            floors.setdefault(heads, {})[keys] = row["floor_us"]
    theirs = {}
    for row in results("flashmla_h200.json"):
        if row["sequences"] == 1:
            theirs.setdefault(row["heads"], {})[row["keys"]] = row["us"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, heads in zip(axes, (16, 128)):
        for label, line, color, style in (("roofline", floors, LIMIT, "--"),
                                          ("FlashMLA", theirs, PEER, "s-"),
                                          ("Fathom", ours, INK, "o-")):
            keys = sorted(line[heads])
            axis.plot(keys, [line[heads][k] for k in keys], style, color=color, label=label)
        axis.set(xscale="log", yscale="log", xlabel="keys", title=f"{heads} heads")
        axis.set_xticks([1024, 4096, 32768, 131072], ["1K", "4K", "32K", "128K"])
        axis.legend(frameon=False)
    axes[0].set_ylabel("us a launch")
    figure.suptitle("Latent decode attention, one sequence, bf16 cache, one H200")
    return figure


def scaling() -> plt.Figure:
    """Computed throughput a GPU against the speed of each request, V3 on 8 H200 by placement."""
    colors = (INK, "#8250df", "#1a7f37", "#bf8700", LIMIT, PEER)
    model = placements.Model()
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axis, context in zip(axes, (1024, 4096)):
        for placement, color in zip(placements.ON_8, colors):
            capacity, loads = placement.capacity(context, "fp8"), [1, 2, 4]
            while loads[-1] < capacity:
                loads.append(min(2 * loads[-1], capacity))
            rates = [model.tokens_per_second(placement, load, context) for load in loads]
            each = [rate / load for rate, load in zip(rates, loads)]
            axis.plot(each, [rate / placement.gpus for rate in rates],
                      "o-", markersize=3, color=color, label=placement.name)
        axis.set(xscale="log", yscale="log", xlabel="tokens/s, each request",
                 title=f"{context // 1024}K context, fp8 cache")
        axis.set_xticks([5, 10, 20, 50, 100, 200], "5 10 20 50 100 200".split())
        axis.minorticks_off()
    axes[0].set_yticks([10, 100, 1000, 5000], ["10", "100", "1,000", "5,000"])
    axes[0].set_ylabel("tokens/s a GPU")
    axes[0].legend(frameon=False, loc="lower left")
    figure.suptitle("DeepSeek-V3 on 8 H200, decode, computed (not measured); "
                    "lines end where the cache is full")
    return figure


FIGURES = {"decode_batch": batch, "v3_layers": layers, "decode_attention": attention,
           "scaling": scaling}


def draw(make) -> str:
    figure = make()
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return text.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true",
                        help="fail if a figure differs from what the results give")
    check = parser.parse_args().check
    stale = []
    for name, make in FIGURES.items():
        path, text = IMAGES / f"{name}.svg", draw(make)
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.relative_to(ROOT))
        elif not check:
            path.write_text(text)
            print(path.relative_to(ROOT))
    if stale:
        print("not what bench/results gives (make plots):", *stale, file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
