#!/usr/bin/env python3
"""Writes a checkpoint of a DeepSeek-V2-Lite form with random weights, for vLLM and Fathom alike.

usage: make_checkpoint.py CONFIG_DIR OUT_DIR [--seed N] [--device cuda|cpu]

CONFIG_DIR has a config.json (deepseek_v2, no q_lora_rank). Matrices have a variance of 1 / columns
and norms are near 1, so activations stay near 1. Embeddings have a variance of 1: with less, what
attention adds is alike for all tokens of a sequence and outweighs them, and the routers send them
to fewer experts. With an FP8 quantization_config, blocks of 128 x 128 are quantised as in
DeepSeek's checkpoints; both types come from the same values. One file a layer.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib

import torch
from safetensors.torch import save_file

BLOCK = 128
THREADS = 4  # that write; each holds a layer, 1.2 GB of V2-Lite
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def mlp_shapes(prefix, hidden, width):
    return {f"{prefix}.gate_proj.weight": (width, hidden),
            f"{prefix}.up_proj.weight": (width, hidden),
            f"{prefix}.down_proj.weight": (hidden, width)}


def attention_shapes(prefix, config):
    hidden, heads, rank = (config[key] for key in
                           ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    nope, rope, value = (config[key] for key in
                         ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {f"{prefix}.q_proj.weight": (heads * (nope + rope), hidden),
            f"{prefix}.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            f"{prefix}.kv_a_layernorm.weight": (rank,),
            f"{prefix}.kv_b_proj.weight": (heads * (nope + value), rank),
            f"{prefix}.o_proj.weight": (hidden, heads * value)}


def layer_shapes(layer, config):
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    prefix = f"model.layers.{layer}"
    shapes = {f"{prefix}.input_layernorm.weight": (hidden,),
              f"{prefix}.post_attention_layernorm.weight": (hidden,),
              **attention_shapes(f"{prefix}.self_attn", config)}
    if layer < config["first_k_dense_replace"]:
        return shapes | mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
    shapes[f"{prefix}.mlp.gate.weight"] = (config["n_routed_experts"], hidden)
    shapes |= mlp_shapes(f"{prefix}.mlp.shared_experts", hidden,
                         width * config["n_shared_experts"])
    for expert in range(config["n_routed_experts"]):
        shapes |= mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, width)
    return shapes


def files(config):
    """{name: shape} of each file: one a layer, and the rest in the last."""
    for layer in range(config["num_hidden_layers"]):
        yield layer_shapes(layer, config)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,),
           "lm_head.weight": (vocabulary, hidden)}


def unquantised_layers(config):
    """Those of dense MLPs with rows that are no whole blocks, of which vLLM merges gate and up."""
    if config["intermediate_size"] % BLOCK == 0:
        return []
    return [f"model.layers.{layer}.mlp.{name}_proj"
            for layer in range(config["first_k_dense_replace"]) for name in ("gate", "up", "down")]


def is_quantised(name, ignored):
    module = name.removesuffix(".weight")
    return "_proj" in module and module not in ignored


def random_tensor(name, shape, generator):
    values = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("norm.weight"):
        return (1 + 0.05 * values).to(torch.bfloat16)
    if name != "model.embed_tokens.weight":
        values /= math.sqrt(shape[-1])
    return values.to(torch.bfloat16)


def quantise(matrix):
    """e4m3 values and a float32 scale a block; blocks at the edges are partial."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return codes[:rows, :columns].contiguous(), scales


def make_tensors(shapes, generator, quantised, ignored):
    tensors = {}
    for name, shape in shapes.items():
        values = random_tensor(name, shape, generator)
        if quantised and is_quantised(name, ignored):
            values, scales = quantise(values)
            tensors[name.removesuffix("weight") + "weight_scale_inv"] = scales.cpu()
        tensors[name] = values.cpu()
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=pathlib.Path, metavar="CONFIG_DIR")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    config = json.loads((options.config / "config.json").read_text())
    if config.get("q_lora_rank"):
        parser.error("q_lora_rank is set; this writes the Lite form, which has none")
    quantization, ignored = config.get("quantization_config"), []
    if quantization:
        if quantization.get("weight_block_size") != [BLOCK, BLOCK]:
            parser.error("of quantised forms, only FP8 in blocks of 128 x 128 is written")
        ignored = unquantised_layers(config)
        quantization["ignored_layers"] = ignored

    options.out.mkdir(parents=True, exist_ok=True)
    all_files = list(files(config))

    def write(number):
        """Writes a file, by a seed of its own; {name of a tensor: (file, bytes)}."""
        generator = torch.Generator(options.device)
        generator.manual_seed(options.seed * len(all_files) + number)
        tensors = make_tensors(all_files[number], generator, quantization is not None, ignored)
        file = f"model-{number + 1:05}-of-{len(all_files):05}.safetensors"
        save_file(tensors, options.out / file, metadata={"format": "pt"})
        return {name: (file, tensor.nbytes) for name, tensor in tensors.items()}

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        written = [item for tensors in threads.map(write, range(len(all_files)))
                   for item in tensors.items()]
    total = sum(size for _, (_, size) in written)
    index = {"metadata": {"total_size": total},
             "weight_map": {name: file for name, (file, _) in written}}
    (options.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (options.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{options.out}: {len(written)} tensors, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
