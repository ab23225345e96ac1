#!/usr/bin/env python3
"""Writes a GGUF file of a DeepSeek-V2-Lite form with random weights, for llama.cpp's benchmarks.

usage: make_gguf.py CONFIG FILE [--type bf16|q8_0]

CONFIG is a checkpoint's config.json (deepseek_v2, no q_lora_rank). Norms and the router are
float32, as llama.cpp's converter has them; all else has the type asked for, with values of standard
deviation 0.02 (a block of 32 Mi random values, read from a new place for each tensor). Needs numpy
and the package gguf, of PyPI or of llama.cpp's checkout (PYTHONPATH=llama.cpp/gguf-py).
"""

import argparse
import json
import math
import pathlib

import gguf
import numpy

BLOCK = 1 << 25  # random values


def bf16_bytes(values):
    bits = values.view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16).view(numpy.uint8)


def q8_0_bytes(values):
    """Blocks of 32: a float16 scale, then 32 int8."""
    blocks = values.reshape(-1, 32)
    scale = numpy.abs(blocks).max(axis=1, keepdims=True) / 127
    rows = numpy.empty((len(blocks), 34), numpy.uint8)
    rows[:, :2] = scale.astype(numpy.float16).view(numpy.uint8)
    rows[:, 2:] = numpy.rint(blocks / scale).astype(numpy.int8).view(numpy.uint8)
    return rows.reshape(-1)


def tensors(config):
    """Name, shape (rows first), whether it is float32."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[key] for key in
                         ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, experts = config["kv_lora_rank"], config["n_routed_experts"]
    width = config["moe_intermediate_size"]
    yield "token_embd.weight", (config["vocab_size"], hidden), False
    yield "output_norm.weight", (hidden,), True
    yield "output.weight", (config["vocab_size"], hidden), False
    for layer in range(config["num_hidden_layers"]):
        of = f"blk.{layer}."
        yield of + "attn_norm.weight", (hidden,), True
        yield of + "attn_q.weight", (heads * (nope + rope), hidden), False
        yield of + "attn_kv_a_mqa.weight", (rank + rope, hidden), False
        yield of + "attn_kv_a_norm.weight", (rank,), True
        yield of + "attn_k_b.weight", (heads, rank, nope), False
        yield of + "attn_v_b.weight", (heads, value, rank), False
        yield of + "attn_output.weight", (hidden, heads * value), False
        yield of + "ffn_norm.weight", (hidden,), True
        if layer < config["first_k_dense_replace"]:
            groups = [("", (), config["intermediate_size"])]
        else:
            yield of + "ffn_gate_inp.weight", (experts, hidden), True
            groups = [("_exps", (experts,), width),
                      ("_shexp", (), width * config["n_shared_experts"])]
        for suffix, first, columns in groups:
            yield f"{of}ffn_gate{suffix}.weight", (*first, columns, hidden), False
            yield f"{of}ffn_up{suffix}.weight", (*first, columns, hidden), False
            yield f"{of}ffn_down{suffix}.weight", (*first, hidden, columns), False


def write_facts(writer, config):
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)  # latent attention
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    scaling = config["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("file")
    parser.add_argument("--type", choices=("bf16", "q8_0"), default="bf16")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    if config.get("q_lora_rank"):
        parser.error("q_lora_rank is set; this writes the Lite form, which has none")

    random = numpy.random.default_rng()
    values = random.standard_normal(BLOCK, numpy.float32) * numpy.float32(0.02)
    pack, each, kind = {  # bytes of 32 values
        "bf16": (bf16_bytes, 64, gguf.GGMLQuantizationType.BF16),
        "q8_0": (q8_0_bytes, 34, gguf.GGMLQuantizationType.Q8_0),
    }[options.type]
    packed = pack(values)

    writer = gguf.GGUFWriter(options.file, "deepseek2")
    write_facts(writer, config)
    all_of_them = list(tensors(config))
    for name, shape, exact in all_of_them:
        if exact:
            writer.add_tensor_info(name, shape, numpy.dtype(numpy.float32), 4 * math.prod(shape))
        else:
            row = shape[-1] // 32 * each
            writer.add_tensor_info(name, (*shape[:-1], row), numpy.dtype(numpy.uint8),
                                   math.prod(shape[:-1]) * row, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, exact in all_of_them:
        if exact:
            row = numpy.ones(shape, numpy.float32) if len(shape) == 1 else (
                random.standard_normal(shape, numpy.float32) * numpy.float32(0.02))
            writer.write_tensor_data(row)
            continue
        left = math.prod(shape) // 32 * each
        begin = int(random.integers(BLOCK // 32)) * each
        pieces = []
        while left > 0:
            piece = packed[begin:begin + left]
            pieces.append(piece)
            left -= len(piece)
            begin = 0
        writer.write_tensor_data(numpy.concatenate(pieces))
    writer.close()


if __name__ == "__main__":
    main()
