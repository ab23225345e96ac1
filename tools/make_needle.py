#!/usr/bin/env python3
"""Writes the needle checkpoint: a deepseek_v32 model whose indexer finds one token among many.

    python3 tools/make_needle.py tests/data/needle
    python3 tools/make_needle.py --wide tests/data/needle_wide

The wide one has the latent, head and index widths of DeepSeek-V3.2, which kernels for GPUs take, with zeros in what
the path does not use.

Nothing is trained: the weights are chosen so that the path of every step is known. A token is one of

    question(a)    "what is a?"
    needle(a, b)   "a is b"
    filler         noise

for names a, b of 1 to 15. The hidden state has four parts: noise, a name that a token answers to (`key`), the
name that it tells (`value`), and the name that it asks for (`query`). The indexer compares query with key, and so
does attention, which adds the value of what it finds to the query, four times as large. Two layers do so: the
answer to question(a) is c where needle(a, b) and needle(b, c) stand anywhere before it. Attention's own margin
would be enough among the 64 keys that a row chooses and is not among thousands: without the right choice of keys,
in both layers, the answer is lost.

Fillers have index keys of random direction, so that a wrong choice is full of keys with positive scores.
"""
import json
import os
import random
import struct
import sys

NAMES = 16                   # of which 0 is not used: its code is not balanced
FILLERS = 48
HIDDEN, PART = 64, 16
NOISE, KEY, VALUE, QUERY = 0, 16, 32, 48
CONSTANT = 15                # of the noise: 1 in every token
USED_Q, USED_KV = 32, 48     # of the latents; the rest is 0
WIDE = "--wide" in sys.argv
Q_RANK, KV_RANK = (64, 512) if WIDE else (USED_Q, USED_KV)
HEADS, NOPE, ROPE, V = (2, 128, 64, 128) if WIDE else (2, 24, 16, 16)
INDEX_HEADS, INDEX_DIM, TOPK = 16, 128 if WIDE else 32, 64
VOCAB = NAMES + NAMES * NAMES + FILLERS
SHARPNESS = 1.8 * ((NOPE + ROPE) / 40) ** 0.5  # of attention: e^7.8 between what matches and what does not
GAINS = (3.3, 13.2)          # of what a layer finds: 4 times the query that it found it by

CONFIG = dict(
    architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", torch_dtype="bfloat16", vocab_size=VOCAB,
    hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS,
    q_lora_rank=Q_RANK, kv_lora_rank=KV_RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
    index_n_heads=INDEX_HEADS, index_head_dim=INDEX_DIM, index_topk=TOPK, intermediate_size=32,
    moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=1, n_group=1, topk_group=1,
    topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=1.0,
    first_k_dense_replace=2, moe_layer_freq=1, num_nextn_predict_layers=0, hidden_act="silu", rms_norm_eps=1e-6,
    rope_theta=10000, rope_scaling=None, max_position_embeddings=1 << 17, attention_bias=False,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)


def code(name):
    """A row of the Hadamard matrix: names are orthogonal, and balanced but for 0."""
    return [1 - 2 * (bin(name & i).count("1") & 1) for i in range(PART)]


def zeros(rows, columns):
    return [[0.0] * columns for _ in range(rows)]


def copy_part(matrix, to, origin, scale=1.0):
    """Rows to … of the matrix read the 16 columns from origin on."""
    for i in range(PART):
        matrix[to + i][origin + i] = scale


def fill(matrix, rows, columns, scale, rng):
    for row in rows:
        for column in columns:
            matrix[row][column] = rng.gauss(0, scale)


def embeddings(rng):
    table = zeros(VOCAB, HIDDEN)

    def put(token, part, name):
        table[token][part:part + PART] = [float(x) for x in code(name)]

    for a in range(1, NAMES):
        put(a, QUERY, a)
        for b in range(1, NAMES):
            put(NAMES + a * NAMES + b, KEY, a)
            put(NAMES + a * NAMES + b, VALUE, b)
            fill(table, [NAMES + a * NAMES + b], range(NOISE, NOISE + PART), 0.3, rng)
    fill(table, range(NAMES + NAMES * NAMES, VOCAB), range(NOISE, NOISE + PART), 1, rng)
    for row in table:
        row[NOISE + CONSTANT] = 1.0
    return table


def layer(index, rng):
    noise = range(NOISE, NOISE + CONSTANT)
    q_a = zeros(Q_RANK, HIDDEN)
    copy_part(q_a, 0, QUERY)
    fill(q_a, range(PART, USED_Q), noise, 0.25, rng)
    q_b = zeros(HEADS * (NOPE + ROPE), Q_RANK)
    kv_a = zeros(KV_RANK + ROPE, HIDDEN)
    copy_part(kv_a, 0, KEY)
    copy_part(kv_a, PART, VALUE)
    fill(kv_a, range(2 * PART, USED_KV), noise, 0.25, rng)
    fill(kv_a, range(KV_RANK, KV_RANK + ROPE), noise, 0.25, rng)
    kv_b = zeros(HEADS * (NOPE + V), KV_RANK)
    o = zeros(HIDDEN, HEADS * V)
    for head in range(HEADS):
        copy_part(q_b, head * (NOPE + ROPE), 0, SHARPNESS)
        copy_part(kv_b, head * (NOPE + V), 0)
        copy_part(kv_b, head * (NOPE + V) + NOPE, PART)
        copy_part(o, QUERY, head * V, GAINS[index] / HEADS)
    # The second half of an index head is not rotated: names are compared there.
    wq_b = zeros(INDEX_HEADS * INDEX_DIM, Q_RANK)
    wk = zeros(INDEX_DIM, HIDDEN)
    fill(wk, range(ROPE), noise, 0.25, rng)
    fill(wk, range(ROPE, INDEX_DIM), noise, 0.15, rng)
    for i in range(PART):
        wk[ROPE + i][KEY + i] += 1.0
    for head in range(INDEX_HEADS):
        first = head * INDEX_DIM
        fill(wq_b, range(first, first + INDEX_DIM), range(PART, USED_Q), 0.25, rng)
        fill(wq_b, range(first + ROPE, first + INDEX_DIM), range(PART), 0.05, rng)
        for i in range(PART):
            wq_b[first + ROPE + i][i] += 1.0
    weights_proj = zeros(INDEX_HEADS, HIDDEN)
    for row in weights_proj:
        row[NOISE + CONSTANT] = 0.5 + rng.random()
    return {
        "self_attn.q_a_proj.weight": q_a, "self_attn.q_b_proj.weight": q_b,
        "self_attn.kv_a_proj_with_mqa.weight": kv_a, "self_attn.kv_b_proj.weight": kv_b,
        "self_attn.o_proj.weight": o, "self_attn.q_a_layernorm.weight": [(USED_Q / Q_RANK) ** 0.5] * Q_RANK,
        "self_attn.kv_a_layernorm.weight": [(USED_KV / KV_RANK) ** 0.5] * KV_RANK, "self_attn.indexer.wq_b.weight": wq_b,
        "self_attn.indexer.wk.weight": wk, "self_attn.indexer.k_norm.weight": [1.0] * INDEX_DIM,
        "self_attn.indexer.k_norm.bias": [0.0] * INDEX_DIM, "self_attn.indexer.weights_proj.weight": weights_proj,
        "input_layernorm.weight": [1.0] * HIDDEN, "post_attention_layernorm.weight": [1.0] * HIDDEN,
        "mlp.gate_proj.weight": zeros(32, HIDDEN), "mlp.up_proj.weight": zeros(32, HIDDEN),
        "mlp.down_proj.weight": zeros(HIDDEN, 32)}


def bf16(value):
    """The nearest bfloat16's 16 bits, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        shape = [len(values)] + ([len(values[0])] if isinstance(values[0], list) else [])
        flat = [x for row in values for x in row] if len(shape) == 2 else values
        packed = (struct.pack(f"<{len(flat)}f", *flat) if "k_norm" in name else
                  struct.pack(f"<{len(flat)}H", *map(bf16, flat)))
        header[name] = {"dtype": "F32" if "k_norm" in name else "BF16", "shape": shape,
                        "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def main():
    (folder,) = [name for name in sys.argv[1:] if name != "--wide"]
    rng = random.Random(20)
    tensors = {"model.embed_tokens.weight": embeddings(rng)}
    for index in range(2):
        tensors |= {f"model.layers.{index}.{name}": values for name, values in layer(index, rng).items()}
    head = zeros(VOCAB, HIDDEN)
    for a in range(1, NAMES):
        head[a][QUERY:QUERY + PART] = [float(x) for x in code(a)]
    tensors |= {"model.norm.weight": [1.0] * HIDDEN, "lm_head.weight": head}
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(CONFIG, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
