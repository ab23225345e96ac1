#!/usr/bin/env python3
"""Writes random weights for a config.json of Llama's form, for `fathom convert` at full size.

usage: make_random_gqa.py CONFIG DIR

bf16, of standard deviation 0.02 (a block of 16 Mi random values, read from a new place for each
tensor); norms are 1. Needs numpy.
"""

import argparse
import json
import math
import pathlib
import shutil
import struct

import numpy

BLOCK = 1 << 24


def shapes(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        yield of + "input_layernorm.weight", (hidden,)
        yield of + "post_attention_layernorm.weight", (hidden,)
        yield of + "self_attn.q_proj.weight", (heads * width, hidden)
        yield of + "self_attn.k_proj.weight", (kv_heads * width, hidden)
        yield of + "self_attn.v_proj.weight", (kv_heads * width, hidden)
        yield of + "self_attn.o_proj.weight", (hidden, heads * width)
        yield of + "mlp.gate_proj.weight", (inner, hidden)
        yield of + "mlp.up_proj.weight", (inner, hidden)
        yield of + "mlp.down_proj.weight", (hidden, inner)


def bf16(values):
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("directory", type=pathlib.Path)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.config, options.directory / "config.json")
    tensors = list(shapes(json.loads(options.config.read_text())))
    random = numpy.random.default_rng(1)
    block = bf16(random.standard_normal(BLOCK, numpy.float32) * 0.02)
    header, offset = {}, 0
    for name, shape in tensors:
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(options.directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors:
            left = math.prod(shape)
            if len(shape) == 1:
                file.write(bf16(numpy.ones(left)).tobytes())
                continue
            begin = int(random.integers(BLOCK))
            while left > 0:
                piece = block[begin:begin + left]
                file.write(piece.tobytes())
                left -= len(piece)
                begin = 0


if __name__ == "__main__":
    main()
