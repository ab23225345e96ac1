#!/usr/bin/env python3
"""Writes a GGUF file of a DeepSeek-V2-Lite form with random weights, for llama.cpp's benchmarks.

usage: make_gguf.py CONFIG FILE [--type bf16|q8_0|q4_0|q4_k]

CONFIG is a checkpoint's config.json (deepseek_v2, no q_lora_rank). Norms and the router are
float32, as llama.cpp's converter has them; all else has the type asked for, with values of standard
deviation 0.02 (a block of 32 Mi random values, read from a new place for each tensor). As
llama-quantize does, four bits leave the head in Q6_K, and q4_k stores in Q5_0 what has rows that
are no multiple of 256 (the experts' down); W_UK and W_UV are Q5_0 in either. Needs numpy and the
package gguf, of PyPI or of llama.cpp's checkout (PYTHONPATH=llama.cpp/gguf-py).
"""

import argparse
import json
import math
import pathlib

import gguf
import numpy

BLOCK = 1 << 25  # random values
DEVIATION = 0.02


def normal(random):
    return random.standard_normal(BLOCK, numpy.float32) * numpy.float32(DEVIATION)


def bf16_bytes(random):
    bits = normal(random).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16).view(numpy.uint8)


def q8_0_bytes(random):
    """Blocks of 32: a float16 scale, then 32 int8."""
    blocks = normal(random).reshape(-1, 32)
    scale = numpy.abs(blocks).max(axis=1, keepdims=True) / 127
    rows = numpy.empty((len(blocks), 34), numpy.uint8)
    rows[:, :2] = scale.astype(numpy.float16).view(numpy.uint8)
    rows[:, 2:] = numpy.rint(blocks / scale).astype(numpy.int8).view(numpy.uint8)
    return rows.reshape(-1)


def random_blocks(random, weights, each, factors):
    """Random codes in blocks of `each` bytes; factors: float16 values at byte offsets."""
    rows = random.integers(0, 256, (BLOCK // weights, each), numpy.uint8)
    for at, value in factors.items():
        rows[:, at:at + 2] = numpy.frombuffer(numpy.float16(value).tobytes(), numpy.uint8)
    return rows


def uniform_deviation(codes):
    return math.sqrt((codes * codes - 1) / 12)


def q4_0_bytes(random):
    """Blocks of 32: scale, codes; (code - 8) * scale."""
    scale = DEVIATION / uniform_deviation(16)
    return random_blocks(random, 32, 18, {0: scale}).reshape(-1)


def q5_0_bytes(random):
    """Blocks of 32: scale, fifth bits, codes; (code - 16) * scale."""
    scale = DEVIATION / uniform_deviation(32)
    return random_blocks(random, 32, 22, {0: scale}).reshape(-1)


def q4_k_bytes(random):
    """Blocks of 256: d, dmin, eight scales and eight minima of six bits, codes.

    A value is d * scale * code - dmin * minimum. Both are 48 here, so that the values' mean is about
    that of the other types: six bits of 48 each, packed in llama.cpp's order.
    """
    six = 48
    d = DEVIATION / uniform_deviation(16) / six
    rows = random_blocks(random, 256, 144, {0: d, 2: d * 7.5})
    rows[:, 4:12] = six | (six >> 4) << 6
    rows[:, 12:16] = (six & 15) | (six & 15) << 4
    return rows.reshape(-1)


def q6_k_bytes(random):
    """Blocks of 256: codes, sixteen int8 scales, d; (code - 32) * scale * d."""
    rows = random_blocks(random, 256, 210, {208: DEVIATION / uniform_deviation(64) / 48})
    rows[:, 192:208] = 48
    return rows.reshape(-1)


TYPES = {  # of llama.cpp: weights a block, bytes a block, maker of BLOCK weights
    "BF16": (32, 64, bf16_bytes),
    "Q8_0": (32, 34, q8_0_bytes),
    "Q4_0": (32, 18, q4_0_bytes),
    "Q5_0": (32, 22, q5_0_bytes),
    "Q4_K": (256, 144, q4_k_bytes),
    "Q6_K": (256, 210, q6_k_bytes),
}


def type_of(wanted, name, row):
    """The type of a tensor with rows of `row` weights."""
    if wanted.startswith("q4") and name == "output.weight":
        return "Q6_K"
    # llama.cpp's AMX buffers take these two in other types and then cannot multiply by them.
    if wanted.startswith("q4") and name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
        return "Q5_0"
    if wanted == "q4_k" and row % 256 != 0:
        return "Q5_0"
    return wanted.upper()


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
    parser.add_argument("--type", choices=("bf16", "q8_0", "q4_0", "q4_k"),
                        default="bf16")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    if config.get("q_lora_rank"):
        parser.error("q_lora_rank is set; this writes the Lite form, which has none")

    random = numpy.random.default_rng()
    writer = gguf.GGUFWriter(options.file, "deepseek2")
    write_facts(writer, config)
    all_of_them = list(tensors(config))
    blocks = {}  # bytes of BLOCK weights by type
    for name, shape, exact in all_of_them:
        if exact:
            writer.add_tensor_info(name, shape, numpy.dtype(numpy.float32), 4 * math.prod(shape))
            continue
        kind = type_of(options.type, name, shape[-1])
        weights, each, make = TYPES[kind]
        if kind not in blocks:
            blocks[kind] = make(random)
        row = shape[-1] // weights * each
        writer.add_tensor_info(name, (*shape[:-1], row), numpy.dtype(numpy.uint8),
                               math.prod(shape[:-1]) * row,
                               raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, exact in all_of_them:
        if exact:
            row = numpy.ones(shape, numpy.float32) if len(shape) == 1 else (
                random.standard_normal(shape, numpy.float32) * numpy.float32(DEVIATION))
            writer.write_tensor_data(row)
            continue
        kind = type_of(options.type, name, shape[-1])
        weights, each, _ = TYPES[kind]
        packed = blocks[kind]
        left = math.prod(shape) // weights * each
        begin = int(random.integers(BLOCK // weights)) * each
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
