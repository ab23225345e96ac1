#!/usr/bin/env python3
"""Draws the documents' figures (docs/images/*.svg) of tools/plot_data.py. usage: plots.py"""
import io
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

import plot_data  # noqa: E402

IMAGES = pathlib.Path(__file__).resolve().parent.parent / "docs/images"
INK, FP8, PEER, LIMIT = "#1f6feb", "#8250df", "#d1242f", "#6e7781"
# Text stays text, and equal results give equal files.
plt.rcParams.update({"svg.hashsalt": "fathom", "svg.fonttype": "none", "font.family": "sans-serif",
                     "font.size": 10, "axes.grid": True, "grid.alpha": 0.3,
                     "axes.spines.top": False, "axes.spines.right": False})


def decode_batch(lines):
    """Throughput and time per output token against batch, V2-Lite's shape."""
    styles = {"Fathom, bf16": ("o-", INK), "Fathom, FP8": ("o-", FP8),
              "vLLM, bf16": ("s--", PEER), "vLLM, FP8": ("s--", "#bf8700")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for label, points in lines.items():
        style, color = styles[label]
        left.plot(points.keys(), points.values(), style, color=color, label=label)
        right.plot(points.keys(), [1000 * size / rate for size, rate in points.items()], style,
                   color=color, label=label)
    for axis, title in ((left, "output tokens/s"), (right, "ms per output token")):
        axis.set(xscale="log", yscale="log", xlabel="sequences in the batch", title=title)
        axis.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        axis.legend(frameon=False)
    left.set_yticks([500, 2000, 8000, 32000], ["500", "2,000", "8,000", "32,000"], minor=False)
    right.set_yticks([2, 4, 8, 16], ["2", "4", "8", "16"], minor=False)
    for axis in (left, right):
        axis.minorticks_off()
    figure.suptitle("V2-Lite's shape, one H200, decode behind 1,024 tokens, in turns")
    return figure


def v3_layers(works):
    """An MoE layer of DeepSeek-V3 beside its roofline."""
    figure, axis = plt.subplots(figsize=(7, 3.4))
    places = range(len(works))
    for shift, label, color in ((-0.2, "roofline", LIMIT), (0.2, "Fathom", INK)):
        axis.bar([place + shift for place in places], [work[label] for work in works.values()], 0.4,
                 color=color, label=label)
    for place, work in zip(places, works.values()):
        axis.text(place + 0.2, work["Fathom"], f"{work['Fathom'] / work['roofline']:.2f}x",
                  ha="center", va="bottom")
    axis.set(yscale="log", ylabel="us a layer", title="An MoE layer of DeepSeek-V3, FP8, one H200")
    axis.set_xticks(list(places), works)
    axis.legend(frameon=False)
    return figure


def decode_attention(by_heads):
    """Decode attention of one sequence against context, beside FlashMLA and the roofline."""
    styles = {"roofline": (LIMIT, "--"), "FlashMLA": (PEER, "s-"), "Fathom": (INK, "o-")}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, (heads, lines) in zip(axes, by_heads.items()):
        for label, points in lines.items():
            color, style = styles[label]
            axis.plot(points.keys(), points.values(), style, color=color, label=label)
        axis.set(xscale="log", yscale="log", xlabel="keys", title=f"{heads} heads")
        axis.set_xticks([1024, 4096, 32768, 131072], ["1K", "4K", "32K", "128K"])
        axis.legend(frameon=False)
    axes[0].set_ylabel("us a launch")
    figure.suptitle("Latent decode attention, one sequence, bf16 cache, one H200")
    return figure


def scaling(by_context):
    """Computed throughput a GPU against the speed of each request, V3 on 8 H200 by placement."""
    colors = (INK, FP8, "#1a7f37", "#bf8700", LIMIT, PEER)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axis, (context, placements) in zip(axes, by_context.items()):
        for (name, points), color in zip(placements.items(), colors):
            axis.plot(*zip(*points), "o-", markersize=3, color=color, label=name)
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


DRAWN = {"decode_batch": decode_batch, "v3_layers": v3_layers,
         "decode_attention": decode_attention, "scaling": scaling}


def main():
    for name, make in plot_data.FIGURES.items():
        data = make()
        figure = DRAWN[name](data)
        figure.tight_layout()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
        path = IMAGES / f"{name}.svg"
        path.write_text(f"{text.getvalue()}<!-- data: {plot_data.digest(data)} -->\n")
        print(path.relative_to(plot_data.ROOT))


if __name__ == "__main__":
    main()
