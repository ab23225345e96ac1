#!/usr/bin/env python3
"""Teacher-forced goldens of the bundled trained model, and how far bfloat16 strays from float32 on it.

    venv/bin/python tools/measure_bf16_deviation.py --bf16 MODELS/fathom-tiny --fp8 MODELS/fathom-tiny-fp8 \\
        --golden MODELS/golden/bf16/golden.json --prose MODELS/eval/prose.txt --out tests/goldens

Writes OUT/fathom-tiny/golden.json and topk.safetensors (float32: the 20 likeliest tokens and their
log-probabilities at every position of three pieces of prose, for the bf16 and for the FP8 weights,
the latter multiplied out) and OUT/bf16_deviation.json (Hugging Face transformers in bfloat16 against
float32, same weights, on the golden prompts and on four 512-token pieces of prose).

The environment is that of make_goldens.py (tools/requirements-goldens.txt). Takes about a minute.
"""

import argparse
import json
import os

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from golden_common import as_float32, forward, load_model, read_checkpoint

TOP = 20
PIECES, PIECE = 3, 256
LONG_PIECES, LONG_PIECE = 4, 512
GAPS = (0.0, 1e-3, 3e-3, 1e-2, 2e-2)
BOS = 0


def pieces(ids, count, length):
    """count pieces of length tokens, evenly spaced over the text, each starting with BOS."""
    step = (len(ids) - length) // count
    return [(i * step, [BOS] + ids[i * step:i * step + length - 1]) for i in range(count)]


def top_tokens(model, prompts):
    """Ids and log-probabilities of the likeliest tokens, and the smallest routing distance, per position."""
    rows = []
    for ids in prompts:
        logits, _, probe = forward(model, ids)
        top = logits.log_softmax(-1).topk(TOP)
        rows.append((top.indices.int(), top.values, probe.router_gaps))
    return [torch.stack(part) for part in zip(*rows)]


def compare(exact, rough, prompts):
    """Per position over all prompts: |difference of log-probability| of the top tokens, whether the likeliest token
    agrees, the smallest routing distance in float32, and whether any layer chose other experts."""
    deltas, agree, gaps, moved = [], [], [], []
    for ids in prompts:
        a, _, probe = forward(exact, ids)
        b, _, other = forward(rough, ids)
        top = a.log_softmax(-1).topk(TOP)
        deltas.append((top.values - b.log_softmax(-1).gather(-1, top.indices)).abs())
        agree.append(a.argmax(-1) == b.argmax(-1))
        gaps.append(probe.router_gaps)
        moved.append(torch.stack([(x != y).any(-1) for x, y in zip(probe.chosen, other.chosen)]).any(0))
    return [torch.cat(part) for part in (deltas, agree, gaps, moved)]


def summary(deltas, agree, keep):
    if not keep.any():
        return None
    values = deltas[keep].flatten().double()
    return {"positions": int(keep.sum()), "median": round(values.median().item(), 5),
            "p90": round(values.quantile(0.9).item(), 5), "p99": round(values.quantile(0.99).item(), 5),
            "max": round(values.max().item(), 5), "same_likeliest_token": round(agree[keep].float().mean().item(), 4)}


def describe(deltas, agree, gaps, moved):
    return {
        "positions": len(gaps), "positions_routed_otherwise": int(moved.sum()),
        "by_smallest_router_gap": {f">= {gap:g}": summary(deltas, agree, gaps >= gap) for gap in GAPS},
        "same_experts_in_every_layer": summary(deltas, agree, ~moved),
        "other_experts_in_some_layer": summary(deltas, agree, moved)}


def write_json(path, value, indent=None):
    with open(path, "w") as f:
        json.dump(value, f, indent=indent)
        f.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", required=True, help="bf16 checkpoint folder")
    parser.add_argument("--fp8", required=True, help="FP8 checkpoint folder")
    parser.add_argument("--golden", required=True, help="golden.json with prompt_ids of the bf16 checkpoint")
    parser.add_argument("--prose", required=True, help="text file")
    parser.add_argument("--out", required=True, help="goldens directory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()

    tokenizer = Tokenizer.from_file(os.path.join(arguments.bf16, "tokenizer.json"))
    with open(arguments.prose, encoding="utf-8") as f:
        text = tokenizer.encode(f.read(), add_special_tokens=False).ids
    with open(arguments.golden) as f:
        prompts = [entry["prompt_ids"] for entry in json.load(f)]
    short, long = pieces(text, PIECES, PIECE), pieces(text, LONG_PIECES, LONG_PIECE)

    folder = os.path.join(arguments.out, "fathom-tiny")
    os.makedirs(folder, exist_ok=True)
    tensors, models = {}, {}
    for name, path in (("bf16", arguments.bf16), ("fp8", arguments.fp8)):
        config, stored = read_checkpoint(path)
        plain = as_float32(stored)
        models[name] = load_model(config, plain, torch.float32)
        if name == "bf16":
            rough = load_model(config, plain, torch.bfloat16)
        ids, values, gaps = top_tokens(models[name], [p for _, p in short])
        tensors |= {name + "_ids": ids, name + "_logprobs": values, name + "_router_gaps": gaps}
    save_file(tensors, os.path.join(folder, "topk.safetensors"))
    os.chmod(os.path.join(folder, "topk.safetensors"), 0o644)
    write_json(os.path.join(folder, "golden.json"), {
        "pieces": [{"first_token": at, "prompt_ids": ids} for at, ids in short], "positions": list(range(PIECE)), "top": TOP,
        "notes": "BOS + 255 tokens of prose; row p: the tokens likeliest to follow positions 0..p, float32, for the bf16 "
                 "and the FP8 weights; router_gaps: smallest distance by which experts or groups were chosen in any layer"})

    result = {"what": "absolute difference in log-probability of the 20 likeliest tokens (of float32), bfloat16 against "
                      "float32 run of the same bf16 weights, teacher forced",
              "golden_prompts": describe(*compare(models["bf16"], rough, prompts)),
              "prose": describe(*compare(models["bf16"], rough, [p for _, p in long]))}
    everything = compare(models["bf16"], models["fp8"], [p for _, p in long])
    result["fp8_weights_in_float32_on_prose"] = describe(*everything)
    write_json(os.path.join(arguments.out, "bf16_deviation.json"), result, indent=1)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
