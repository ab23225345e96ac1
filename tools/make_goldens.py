#!/usr/bin/env python3
"""Generates small random DeepSeek-family checkpoints with golden outputs.

Each form becomes a directory with config.json and model*.safetensors in the published Hugging Face
layout, golden.json (prompt, greedy continuation, margins) and logits.safetensors (float32). The
goldens come from Hugging Face transformers in float32 with eager attention, from the weights as
stored: rounded to their stored type first, FP8 weights multiplied out, activations never quantised.

    python3 -m venv venv && venv/bin/pip install -r tools/requirements-goldens.txt
    venv/bin/python tools/make_goldens.py --out tests/goldens [--only v3 --only odd]

Made with torch 2.15.0, transformers 5.23.0, safetensors 0.8.0 on a CPU. Weights and prompts follow
from the seeds; logits of another machine differ in the last bits.
"""

import argparse
import json
import os
import shutil

import torch
import transformers
from safetensors.torch import save_file

from golden_common import as_float32, forward, load_model, read_checkpoint

GREEDY = 16
MIN_MARGIN = 0.02          # smallest difference between the first two logits of a greedy step
MIN_GREEDY_GAP = 1e-3      # smallest routing distance allowed on generated tokens
MIN_INDEX_GAP = 2e-5       # smallest distance allowed between keys chosen and keys left out
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def yarn(factor, mscale, original=64, beta_fast=32, beta_slow=1):
    return {"type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow, "mscale": mscale,
            "mscale_all_dim": mscale, "original_max_position_embeddings": original}


COMMON = dict(attention_bias=False, attention_dropout=0.0, bos_token_id=0, eos_token_id=1, ep_size=1,
              first_k_dense_replace=1, hidden_act="silu", initializer_range=0.02, max_position_embeddings=4096,
              moe_layer_freq=1, num_hidden_layers=2, pretraining_tp=1, rms_norm_eps=1e-6, rope_scaling=None,
              rope_theta=10000, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, vocab_size=160,
              hidden_size=48, intermediate_size=80, moe_intermediate_size=24, n_shared_experts=1)
SMALL_HEADS = dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=48,
                   qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=16)
V2 = COMMON | SMALL_HEADS | dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", scoring_func="softmax",
                                 norm_topk_prob=False, n_routed_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1,
                                 topk_method="greedy", routed_scaling_factor=1.0, aux_loss_alpha=0.001, seq_aux=True)
V3 = COMMON | SMALL_HEADS | dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", scoring_func="sigmoid",
                                 norm_topk_prob=True, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
                                 topk_method="noaux_tc", routed_scaling_factor=2.5, num_nextn_predict_layers=0)
V32 = V3 | dict(architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", index_n_heads=16, index_head_dim=32,
                index_topk=16)
ONE_GROUP = V3 | dict(n_group=1, topk_group=1)
DENSE = {k: v for k, v in ONE_GROUP.items()
         if not k.startswith(("n_", "norm_topk", "num_experts", "moe_", "topk_", "routed_", "scoring", "first_k", "ep_size"))}
# As GLM-4.7-Flash and GLM-5: wider values than keys, heads that are no power of two.
GLM_HEADS = dict(num_attention_heads=5, num_key_value_heads=5, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=32,
                 rms_norm_eps=1e-5)
GLM_DSA = {k: v for k, v in (V32 | GLM_HEADS).items() if not k.startswith(("scoring", "topk_method"))} | dict(
    architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa", n_group=1, topk_group=1,
    rope_parameters=dict(rope_type="default", rope_theta=1e6), indexer_rope_interleave=True, num_nextn_predict_layers=1)
# Grouped-query attention: Llama, Mistral and Qwen2. Stored in float32, so that a conversion to MLA can be exact.
GQA = {k: v for k, v in COMMON.items()
       if not k.startswith(("n_shared", "moe_", "first_k", "ep_size"))} | dict(torch_dtype="float32", hidden_size=128)
LLAMA = GQA | dict(architectures=["LlamaForCausalLM"], model_type="llama", mlp_bias=False)
QWEN2 = GQA | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1e6, tie_word_embeddings=True,
                   use_sliding_window=False, sliding_window=4096, max_window_layers=2)
QWEN2.pop("attention_bias")
REAL_HEADS = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=48, kv_lora_rank=512,
                  qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.1.mlp.gate"]}
FP8_CHANNEL = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None, "ignore": ["lm_head", "model.layers.1.mlp.gate"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "output_activations": None,
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
                    "group_size": None, "block_structure": None, "observer": "minmax"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
                              "group_size": None, "block_structure": None, "observer": None}}}}

# Per form: config, prompt length, rows kept (None: all), smallest routing distance asked of the prompt, and
# optionally: embedding (its size, where it is the head, too), quant, norms (stored type of norm weights), shards, long (length of a second prompt), bias (range),
# pictures (the language model is a part of a larger one: config.json has it as text_config, names a prefix).
FORMS = {
    "v2lite": dict(
        config=V2 | dict(q_lora_rank=None, n_shared_experts=2, rope_scaling=yarn(40, 0.707), max_position_embeddings=2560), prompt=110,
        rows=[0, 1, 31, 62, 63, 64, 65, 66, 80, 95, 96, 107, 108, 109], gap=5e-3,
        notes="V2-Lite: plain q_proj, softmax greedy router, not normalised; YaRN 0.707, prompt past the original 64"),
    "v2_group": dict(
        config=V2 | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
                         n_shared_experts=2, torch_dtype="float16"), prompt=24, gap=8e-3,
        notes="V2: q_lora, group_limited_greedy, scaling 16, two shared experts; stored in float16"),
    "v3": dict(
        config=V3 | dict(num_nextn_predict_layers=1), prompt=24, gap=1e-2,
        notes="V3: sigmoid noaux_tc router, 4 groups; model.layers.2 is an MTP layer, which the main model skips"),
    "v3_yarn": dict(
        config=V3 | dict(num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=96, qk_nope_head_dim=64,
                         qk_rope_head_dim=64, v_head_dim=48, rope_scaling=yarn(40, 1.0), max_position_embeddings=2560), prompt=320, norms=torch.float32,
        rows=[0, 1, 62, 63, 64, 65, 127, 128, 200, 255, 256, 257, 300, 317, 318, 319], gap=1e-2,
        long=1280, long_rows=[0, 63, 64, 511, 512, 1000, 1023, 1024, 1200, 1278, 1279], long_gap=5e-4,
        notes="V3 with YaRN factor 40, original length 64, mscale 1; norm weights stored in float32"),
    "kimi": dict(
        config=V3 | dict(model_type="kimi_k2", n_group=1, topk_group=1, rope_theta=50000.0, routed_scaling_factor=2.827,
                         qk_rope_head_dim=64, rope_scaling=yarn(32, 1.0, beta_fast=1, beta_slow=1),
                         max_position_embeddings=2048), prompt=100,
        rows=[0, 1, 31, 62, 63, 64, 65, 66, 80, 97, 98, 99], gap=1e-2, shards=3,
        notes="Kimi K2: one group, theta 50000, YaRN with equal betas, scaling 2.827; three shards with index"),
    "odd": dict(
        config=V3 | dict(hidden_size=88, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=56, kv_lora_rank=96,
                         n_routed_experts=15, num_experts_per_tok=4, n_group=3, topk_group=2, intermediate_size=72,
                         moe_intermediate_size=18, vocab_size=131, routed_scaling_factor=1.75), prompt=29, bias=(-1.5, -0.9),
        gap=1e-2,
        notes="nothing a power of two: hidden 88, 3 heads, 3 groups of 5 experts, vocabulary 131; correction biases so "
              "negative that dropped groups must be masked with minus infinity and not with zero"),
    "v3_fp8": dict(
        config=V3 | REAL_HEADS | dict(hidden_size=80, intermediate_size=144, vocab_size=96,
                                      rope_scaling=yarn(40, 1.0, original=4096), max_position_embeddings=163840,
                                      quantization_config=FP8_BLOCK),
        prompt=24, gap=1e-2, quant="block",
        notes="V3 with the published head sizes (nope 128, rope 64, v 128, kv_lora 512, two heads) and YaRN; FP8 e4m3 in "
              "128x128 blocks, ragged in both directions (kv_a 576x80, dense 144x80 and 80x144), float32 weight_scale_inv"),
    "v3_fp8_ue8m0": dict(
        config=V3 | dict(hidden_size=136, vocab_size=96, intermediate_size=72, moe_intermediate_size=16,
                         num_nextn_predict_layers=1, quantization_config=FP8_BLOCK | {"scale_fmt": "ue8m0"}),
        prompt=24, gap=1e-2, quant="block", power_of_two=True,
        notes="V3 block FP8 with scale_fmt ue8m0: scales are powers of two stored as float32; FP8 MTP layer"),
    "v3_fp8_e8m0": dict(
        config=V3 | dict(hidden_size=80, vocab_size=96, intermediate_size=200, moe_intermediate_size=16,
                         quantization_config=FP8_BLOCK | {"scale_fmt": "ue8m0"}),
        prompt=24, gap=1e-2, quant="block", power_of_two=True, scale_dtype=torch.float8_e8m0fnu,
        notes="as v3_fp8_ue8m0 (hidden 80, no MTP), scales stored as F8_E8M0 bytes"),
    "v2_fp8_tensor": dict(
        config=V2 | dict(quantization_config=FP8_TENSOR, n_shared_experts=2), prompt=24, gap=8e-3, quant="tensor",
        notes="V2, FP8 with one weight_scale a tensor (shape [] in some, [1] in others) and static input_scale, which the "
              "goldens do not apply"),
    "v2_ct_channel": dict(
        config=V2 | dict(quantization_config=FP8_CHANNEL, n_shared_experts=2), prompt=24, gap=8e-3, quant="channel",
        notes="V2, compressed-tensors float-quantized: one bfloat16 weight_scale an output row ([out, 1])"),
    "heads": dict(
        config=V3 | dict(hidden_size=28, num_attention_heads=11, num_key_value_heads=11, q_lora_rank=24, kv_lora_rank=128,
                         qk_nope_head_dim=12, v_head_dim=20, n_routed_experts=21, num_experts_per_tok=5, n_group=3,
                         intermediate_size=300, moe_intermediate_size=72, vocab_size=131), prompt=29, gap=1e-2,
        notes="enough of everything for 8 ranks, and nothing that they divide evenly: 11 heads, 3 groups of 7 experts, "
              "vocabulary 131, ten blocks of 32 dense columns, three of an expert's"),
    "fp8_heads": dict(
        config=V3 | dict(hidden_size=40, num_attention_heads=9, num_key_value_heads=9, kv_lora_rank=128, qk_nope_head_dim=20,
                         v_head_dim=128, n_routed_experts=10, n_group=2, topk_group=1, intermediate_size=272,
                         moe_intermediate_size=144, vocab_size=96, quantization_config=FP8_BLOCK),
        prompt=24, gap=1e-2, quant="block",
        notes="as heads in block FP8: 9 heads, each one block of o_proj's columns; scales of kv_b's rows are cut within heads"),
    "v32": dict(
        config=V32 | dict(num_nextn_predict_layers=1), prompt=48, gap=1e-2,
        notes="V3.2: 16 index heads, 16 keys a row; MTP layer with an indexer of its own"),
    "v32_one": dict(
        config=V32 | dict(num_attention_heads=1, num_key_value_heads=1, index_n_heads=1, qk_nope_head_dim=32), prompt=40,
        gap=1e-2, notes="V3.2 with one head and one index head: rows with a negative weight choose among scores of 0"),
    "v32_yarn": dict(
        config=V32 | dict(num_attention_heads=3, num_key_value_heads=3, qk_rope_head_dim=64, index_n_heads=3,
                          index_head_dim=128, index_topk=64, rope_scaling=yarn(40, 1.0), max_position_embeddings=2560),
        prompt=150, norms=torch.float32, gap=1e-2, rows=[0, 1, 31, 62, 63, 64, 65, 66, 100, 127, 128, 129, 147, 148, 149],
        long=1100, long_rows=[0, 63, 64, 65, 128, 511, 512, 1000, 1023, 1024, 1098, 1099], long_gap=5e-4, long_index_gap=4e-6,
        notes="V3.2 with YaRN factor 40, original length 64; three heads, three index heads of the published width, 64 keys"),
    "v32_fp8": dict(
        config=V32 | dict(hidden_size=80, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=128, qk_rope_head_dim=64,
                          index_n_heads=16, index_head_dim=128, index_topk=64, vocab_size=96,
                          quantization_config=FP8_BLOCK | {"scale_fmt": "ue8m0"}),
        prompt=100, gap=5e-3, quant="block", power_of_two=True,
        notes="V3.2 block FP8: wq_b and wk in FP8 with scales, weights_proj in bf16; 16 heads, 16 index heads, 64 keys"),
    "moonlight": dict(
        config=ONE_GROUP | dict(q_lora_rank=None, n_shared_experts=2, n_routed_experts=16, num_experts_per_tok=6,
                                rope_theta=50000.0, routed_scaling_factor=2.446, rms_norm_eps=1e-5), prompt=32, gap=1e-3,
        notes="Moonlight: V3's router in one group without q_lora, two shared experts, theta 50000, scaling 2.446, eps 1e-5"),
    "kanana": dict(
        config=ONE_GROUP | dict(q_lora_rank=None, num_attention_heads=6, num_key_value_heads=6, n_routed_experts=24,
                                num_experts_per_tok=6, rope_theta=1e6, routed_scaling_factor=2.448),
        prompt=32, gap=1e-3,
        notes="Kanana-2: as Moonlight with one shared expert and six heads"),
    "glm_lite": dict(
        config=ONE_GROUP | GLM_HEADS | dict(architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", rope_theta=1e6,
                                            num_experts_per_tok=4, routed_scaling_factor=1.8, num_nextn_predict_layers=1),
        prompt=32, gap=3e-3,
        notes="GLM-4.7-Flash: five heads, values wider than keys, one group, scaling 1.8, eps 1e-5; MTP layer"),
    "youtu": dict(
        config=DENSE | dict(architectures=["YoutuForCausalLM"], model_type="youtu", tie_word_embeddings=True,
                            num_hidden_layers=3, rope_theta=1.6e6, rope_interleave=True), prompt=32, gap=0.0,
        notes="Youtu-LLM: dense layers alone, the embedding is the head"),
    "gigachat": dict(
        config=ONE_GROUP | dict(q_lora_rank=None, v_head_dim=36, rope_theta=100000.0, num_nextn_predict_layers=1,
                                rope_scaling=yarn(8, 1.0), routed_scaling_factor=1.0), prompt=32, gap=3e-3,
        notes="GigaChat3: no q_lora, values wider than keys, MTP layer"),
    "kimi_k25": dict(
        config=ONE_GROUP | dict(model_type="kimi_k2", hidden_size=32, n_routed_experts=384, num_experts_per_tok=8,
                                moe_intermediate_size=4, rope_theta=50000.0, routed_scaling_factor=2.827, rms_norm_eps=1e-5,
                                rope_scaling=yarn(64, 1.0, beta_fast=32), max_position_embeddings=4096), prompt=32, gap=5e-5,
        pictures=True, shards=2,
        notes="Kimi K2.5: 384 experts, the language model as text_config and under language_model., tensors for pictures"),
    "no_rope": dict(
        config=ONE_GROUP | dict(qk_rope_head_dim=0, qk_nope_head_dim=40, num_hidden_layers=3), prompt=32, gap=3e-3,
        notes="V3 form whose heads have no rotated part: no positions at all"),
    "glm_dsa": dict(
        config=GLM_DSA, prompt=48, gap=3e-3,
        notes="GLM-5: V3.2's form with an interleaved indexer, five heads, values wider than keys, eps 1e-5; MTP layer"),
    "glm_dsa_shared": dict(
        config=GLM_DSA | dict(num_hidden_layers=6, index_topk_freq=3, index_skip_topk_offset=2,
                              index_share_for_mtp_iteration=True), prompt=48, gap=1e-3,
        notes="GLM-5.2: layers 0, 1 and 4 choose keys, 2, 3 and 5 attend to those of the last that chose; MTP layer"),
    "v3_mtp3": dict(
        config=V3 | dict(num_nextn_predict_layers=3), prompt=24, gap=5e-3,
        notes="V3 with three MTP layers, which draft in turn"),
    "llama_mqa": dict(
        config=LLAMA | dict(num_attention_heads=4, num_key_value_heads=1, head_dim=64, hidden_size=72),
        prompt=64, gap=0.0, long=2000, long_rows=[0, 1, 63, 64, 511, 512, 1000, 1023, 1024, 1500, 1998, 1999], long_gap=0.0,
        notes="Llama with one KV head of 64; prompts of 64 and 2,000 tokens"),
    "qwen2_mqa": dict(
        config=QWEN2 | dict(num_attention_heads=2, num_key_value_heads=1), prompt=64, gap=0.0, embedding=0.1,
        notes="Qwen2 with one KV head of 64: biases on q, k and v, the embedding is the head, theta 1e6"),
    "qwen2_two": dict(
        config=QWEN2 | dict(num_attention_heads=4, num_key_value_heads=2), prompt=40, gap=0.0, embedding=0.1,
        notes="Qwen2 with two KV heads of 32"),
    "llama_four": dict(
        config=LLAMA | dict(num_attention_heads=8, num_key_value_heads=4, rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
        prompt=100, gap=0.0,
        notes="Llama with four KV heads of 16 and Llama 3.1's scaling of frequencies, prompt past the original 64"),
    "llama_bias": dict(
        config=LLAMA | dict(num_attention_heads=6, num_key_value_heads=3, head_dim=20, hidden_size=60, attention_bias=True,
                            torch_dtype="bfloat16", rms_norm_eps=1e-5),
        prompt=40, gap=0.0, shards=2,
        notes="Llama with biases on all four projections: three KV heads of 20, wider than hidden / heads, eps 1e-5, bfloat16 "
              "in two shards"),
}


def has_indexer(c, layer):
    """Whether a layer chooses keys itself; the MTP layer always does."""
    frequency, offset = c.get("index_topk_freq", 1), c.get("index_skip_topk_offset", 2)
    return "index_topk" in c and (layer >= c["num_hidden_layers"] or max(layer - offset + 1, 0) % frequency == 0)


def layer_shapes(c, layer):
    """Names (without prefix) and shapes of the tensors of one decoder layer."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    shapes = {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}

    def mlp(prefix, width):
        shapes[f"mlp.{prefix}gate_proj.weight"] = shapes[f"mlp.{prefix}up_proj.weight"] = [width, hidden]
        shapes[f"mlp.{prefix}down_proj.weight"] = [hidden, width]

    if "kv_lora_rank" not in c:        # grouped-query attention
        width = c.get("head_dim", hidden // heads)
        for part, rows in (("q", heads), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])):
            shapes[f"self_attn.{part}_proj.weight"] = [rows * width, hidden]
            if c.get("attention_bias", c["model_type"] == "qwen2"):
                shapes[f"self_attn.{part}_proj.bias"] = [rows * width]
        shapes["self_attn.o_proj.weight"] = [hidden, heads * width]
        if c.get("attention_bias"):
            shapes["self_attn.o_proj.bias"] = [hidden]
        mlp("", c["intermediate_size"])
        return shapes
    rank = c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if c["q_lora_rank"] is None:
        shapes["self_attn.q_proj.weight"] = [heads * (nope + rope), hidden]
    else:
        shapes["self_attn.q_a_proj.weight"] = [c["q_lora_rank"], hidden]
        shapes["self_attn.q_a_layernorm.weight"] = [c["q_lora_rank"]]
        shapes["self_attn.q_b_proj.weight"] = [heads * (nope + rope), c["q_lora_rank"]]
    shapes["self_attn.kv_a_proj_with_mqa.weight"] = [rank + rope, hidden]
    shapes["self_attn.kv_a_layernorm.weight"] = [rank]
    shapes["self_attn.kv_b_proj.weight"] = [heads * (nope + value), rank]
    shapes["self_attn.o_proj.weight"] = [hidden, heads * value]
    if has_indexer(c, layer):
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        shapes["self_attn.indexer.wq_b.weight"] = [index_heads * index_dim, c["q_lora_rank"]]
        shapes["self_attn.indexer.wk.weight"] = [index_dim, hidden]
        shapes["self_attn.indexer.k_norm.weight"] = shapes["self_attn.indexer.k_norm.bias"] = [index_dim]
        shapes["self_attn.indexer.weights_proj.weight"] = [index_heads, hidden]
    if layer < c.get("first_k_dense_replace", c["num_hidden_layers"]):
        mlp("", c["intermediate_size"])
        return shapes
    shapes["mlp.gate.weight"] = [c["n_routed_experts"], hidden]
    if c.get("topk_method", "noaux_tc") == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = [c["n_routed_experts"]]
    for expert in range(c["n_routed_experts"]):
        mlp(f"experts.{expert}.", c["moe_intermediate_size"])
    mlp("shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
    return shapes


def all_shapes(c):
    hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    shapes = {"model.embed_tokens.weight": [vocab, hidden]}
    for layer in range(layers + c.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in layer_shapes(c, layer).items()}
        if layer >= layers:
            shapes |= {prefix + "embed_tokens.weight": [vocab, hidden], prefix + "enorm.weight": [hidden],
                       prefix + "hnorm.weight": [hidden], prefix + "eh_proj.weight": [hidden, 2 * hidden],
                       prefix + "shared_head.norm.weight": [hidden], prefix + "shared_head.head.weight": [vocab, hidden]}
    shapes["model.norm.weight"] = [hidden]
    return shapes if c["tie_word_embeddings"] else shapes | {"lm_head.weight": [vocab, hidden]}


def random_weights(form, rng):
    """float32 values of every tensor, scaled so that every part of the model matters to the logits."""
    weights = {}
    for name, shape in all_shapes(form["config"]).items():
        if name.endswith("e_score_correction_bias"):
            low, high = form.get("bias", (0.0, 0.6))
            weights[name] = low + (high - low) * torch.rand(shape, generator=rng)
        elif name.endswith(".bias"):
            weights[name] = 0.3 * torch.randn(shape, generator=rng)
        elif len(shape) == 1:
            weights[name] = 0.5 + torch.rand(shape, generator=rng)
        elif name.endswith("embed_tokens.weight"):
            weights[name] = torch.randn(shape, generator=rng) * form.get("embedding", 1.0)
        else:
            gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0
            weights[name] = torch.randn(shape, generator=rng) * gain / shape[1] ** 0.5
    for name in weights:           # the MTP layer's copies of the embedding and of the head
        if name.endswith("embed_tokens.weight"):
            weights[name] = weights["model.embed_tokens.weight"].clone()
        elif name.endswith("shared_head.head.weight"):
            weights[name] = weights["lm_head.weight"].clone()
    return weights


def quantised(name, value):
    """Whether an FP8 checkpoint stores this tensor in FP8."""
    outside = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight", "shared_head.head.weight",
               "indexer.weights_proj.weight")
    return value.dim() == 2 and not name.endswith(outside)


def quantise(name, value, form, rng):
    """FP8 weight and scales of one matrix, after giving rows and blocks different magnitudes."""
    rows, cols = value.shape

    def spread(*shape):
        return 2.0 ** (2 * torch.rand(shape, generator=rng) - 1)

    if form["quant"] == "block":
        tall, wide = -(-rows // 128), -(-cols // 128)
        unit = spread(tall, wide).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        value = value * unit
        padded = torch.zeros(tall * 128, wide * 128)
        padded[:rows, :cols] = value
        scale = padded.view(tall, 128, wide, 128).abs().amax((1, 3)).clamp(min=1e-4) / FP8_MAX
        if form.get("power_of_two"):
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        stored = {name + "_scale_inv": scale.to(form.get("scale_dtype", torch.float32))}
    elif form["quant"] == "channel":
        value = value * spread(rows, 1)
        full = (value.abs().amax(1, keepdim=True) / FP8_MAX).bfloat16().float()
        stored = {name + "_scale": full.bfloat16()}
    else:
        value = value * spread(1)
        full = value.abs().amax() / FP8_MAX
        shape = [1] if "down_proj" in name or "o_proj" in name else []
        stored = {name + "_scale": full.reshape(shape).clone(),
                  name.removesuffix("weight") + "input_scale": (0.02 * spread(1)).reshape(shape).clone()}
    stored[name] = (value / full).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return stored


def stored_tensors(form, rng):
    """The checkpoint's tensors in their stored types."""
    dtype = getattr(torch, form["config"]["torch_dtype"])
    tensors = {}
    for name, value in random_weights(form, rng).items():
        if name.endswith("e_score_correction_bias") or "indexer.k_norm" in name:
            tensors[name] = value
        elif "quant" in form and quantised(name, value):
            tensors |= quantise(name, value, form, rng)
        else:
            tensors[name] = value.to(form.get("norms", dtype) if value.dim() == 1 else dtype)
    return tensors


def add_pictures(config, tensors):
    """The language model as a part of a larger one, as Kimi K2.5 is stored."""
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": config,
             "vision_config": {"hidden_size": 8}}
    named = {"language_model." + name: value for name, value in tensors.items()}
    for name in ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"):
        named[name] = torch.zeros(8, 8, dtype=torch.bfloat16)
    return outer, named


def write_checkpoint(folder, form, tensors):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    config = form["config"]
    if form.get("pictures"):
        config, tensors = add_pictures(config, tensors)
    write_json(os.path.join(folder, "config.json"), config, indent=2)
    shards = form.get("shards", 1)
    if shards == 1:
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        return
    names = list(tensors)
    where = {}
    for i in range(shards):        # published V3 files pad the first number to 5 digits and the second to 6
        file = f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        part = names[i * len(names) // shards:(i + 1) * len(names) // shards]
        where |= {name: file for name in part}
        save_file({name: tensors[name] for name in part}, os.path.join(folder, file), metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(os.path.join(folder, "model.safetensors.index.json"),
               {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}, indent=1)


def write_json(path, value, indent=None):
    with open(path, "w") as f:
        json.dump(value, f, indent=indent)
        f.write("\n")


class Mtp:
    """An MTP layer, run as a one-layer model whose inputs are embeddings and whose norm and head are its own."""

    def __init__(self, config, plain, dtype, number=0):
        self.prefix = f"model.layers.{config['num_hidden_layers'] + number}."
        one = {"model.embed_tokens.weight": plain["model.embed_tokens.weight"]}
        renamed = {"shared_head.norm.weight": "model.norm.weight", "shared_head.head.weight": "lm_head.weight"}
        for name, value in plain.items():
            short = name.removeprefix(self.prefix)
            if short in renamed:
                one[renamed[short]] = value
            elif short != name and short.startswith(("self_attn", "mlp", "input_lay", "post_att")):
                one["model.layers.0." + short] = value
        self.model = load_model(config | dict(num_hidden_layers=1, first_k_dense_replace=0, index_topk_freq=1, num_nextn_predict_layers=0), one, dtype)
        self.plain, self.dtype, self.eps = plain, dtype, config["rms_norm_eps"]

    def _norm(self, x, name):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.plain[self.prefix + name]

    def inputs(self, ids, hidden):
        """What the block takes in at each position but the last."""
        embeds = self.plain[self.prefix + "embed_tokens.weight"][ids[1:]]
        both = torch.cat([self._norm(embeds, "enorm.weight"), self._norm(hidden[:-1], "hnorm.weight")], -1)
        return both @ self.plain[self.prefix + "eh_proj.weight"].T

    def __call__(self, ids, hidden):
        """Logits for token i + 2 from the state i of the layer before (or of the main model) and token i + 1, and
        the layer's own states, both without the last position."""
        return forward(self.model, embeds=self.inputs(ids, hidden).to(self.dtype))

    def again(self, ids, hidden):
        """Logits for token i + 3 from the layer's own state at position i and token i + 2: its next draft by
        recurrence, where it has the rows up to i and no other."""
        inputs, own = self.inputs(ids, hidden), self(ids, hidden)[1]
        next_inputs = self.inputs(ids[1:], own)
        rows = []
        for i in range(len(next_inputs)):
            embeds = torch.cat([inputs[:i + 1], next_inputs[i:i + 1]])
            rows.append(forward(self.model, embeds=embeds.to(self.dtype))[0][-1])
        return torch.stack(rows)


class MtpChain:
    """All MTP layers. Layer k takes in the states of layer k - 1 and tokens one further on, as transformers' MtpModel
    does and as these layers are trained."""

    def __init__(self, config, plain, dtype):
        self.layers = [Mtp(config, plain, dtype, k) for k in range(config["num_nextn_predict_layers"])]

    def __call__(self, ids, hidden):
        """For each layer k: logits for token i + k + 2 from position i and token i + k + 1, and its probe."""
        results = []
        for k, layer in enumerate(self.layers):
            logits, hidden, probe = layer(ids[k:], hidden)
            results.append((logits, probe))
        return results


def settle_prompt(model, mtp, vocab, length, bound, index_bound, rng):
    """A random prompt, no token of which is routed by less than bound, or chooses its keys by less than
    index_bound: offending tokens are drawn again."""
    ids = torch.randint(3, vocab, (length,), generator=rng)
    for _ in range(400):
        _, hidden, probe = forward(model, ids.tolist())
        gaps, index_gaps = probe.router_gaps, probe.index_gaps
        if mtp:
            for k, (_, layer) in enumerate(mtp(ids.tolist(), hidden)):
                gaps[k + 1:] = torch.minimum(gaps[k + 1:], layer.router_gaps)
                index_gaps[k + 1:] = torch.minimum(index_gaps[k + 1:], layer.index_gaps)
        bad = ((gaps < bound) | (index_gaps < index_bound)).nonzero().flatten()
        if len(bad) == 0:
            return ids.tolist(), gaps.min().item(), index_gaps.min().item()
        ids[bad] = torch.randint(3, vocab, (len(bad),), generator=rng)
    raise RuntimeError("no prompt found: lower the bound")


def greedy(model, prompt):
    """Greedy continuation, margins of its steps, and the smallest routing distance on the way; 0 if a
    choice of keys on it is not clear."""
    ids, margins = list(prompt), []
    for _ in range(GREEDY):
        logits, _, probe = forward(model, ids)
        top = logits[-1].topk(2)
        margins.append((top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    gap = probe.router_gaps[len(prompt):].min().item()
    return ids[len(prompt):], margins, gap if probe.index_gaps[len(prompt):].min() >= MIN_INDEX_GAP else 0.0


def deviation(exact, other, rows, probe, other_probe):
    delta = (exact.log_softmax(-1) - other.log_softmax(-1)).abs()[rows]
    moved = [(a != b).any(-1) for a, b in zip(probe.chosen, other_probe.chosen)]
    return {"max": round(delta.max().item(), 6), "median": round(delta.median().item(), 6),
            "positions_routed_otherwise": int(torch.stack(moved).any(0).sum()) if moved else 0}


def make_golden(folder, suffix, form, models, mtps, length, rows, bound, index_bound, seed):
    """Writes golden<suffix>.json and logits<suffix>.safetensors for one prompt."""
    vocab = form["config"]["vocab_size"]
    exact, rough = models
    for attempt in range(40):
        rng = torch.Generator().manual_seed(seed * 1000 + attempt)
        prompt, gap, index_gap = settle_prompt(exact, mtps and mtps[0], vocab, length, bound, index_bound, rng)
        greedy_ids, margins, greedy_gap = greedy(exact, prompt)
        if min(margins) > MIN_MARGIN and greedy_gap > min(bound, MIN_GREEDY_GAP):
            break
    else:
        raise RuntimeError("no prompt with clear greedy steps found")
    rows = list(range(length)) if rows is None else rows
    logits, hidden, probe = forward(exact, prompt)
    low, low_hidden, low_probe = forward(rough, prompt)
    tensors = {"logits": logits[rows].contiguous(), "rows": torch.tensor(rows, dtype=torch.int32)}
    golden = {"prompt_ids": prompt, "greedy_ids": greedy_ids, "margins": [round(m, 6) for m in margins],
              "min_router_gap": gap, "min_router_gap_greedy": greedy_gap,
              "bf16_deviation": deviation(logits, low, rows, probe, low_probe), "notes": form["notes"]}
    if "index_topk" in form["config"]:
        golden["min_index_gap"] = index_gap
    if mtps:
        layers = list(zip(mtps[0](prompt, hidden), mtps[1](prompt, low_hidden)))
        for k, ((more, more_probe), (less, less_probe)) in enumerate(layers):
            suffix_of_layer = "" if k == 0 else f"_{k + 1}"
            tensors["mtp_logits" + suffix_of_layer] = more.contiguous()
            golden["mtp_bf16_deviation" + suffix_of_layer] = deviation(more, less, list(range(len(more))), more_probe,
                                                                       less_probe)
        golden["notes"] += "; mtp_logits row i: the MTP layer at position i, from state i and prompt token i + 1"
        if len(layers) > 1:
            first, second = mtps[0].layers[:2]
            tensors["mtp_logits_again"] = second.again(prompt[1:], first(prompt, hidden)[1]).contiguous()
            golden["notes"] += "; mtp_logits_2 and on: the layers behind it, from the layer's before state i and one token later each; " \
                               "mtp_logits_again: the second one's next draft by recurrence"
    save_file(tensors, os.path.join(folder, f"logits{suffix}.safetensors"))
    write_json(os.path.join(folder, f"golden{suffix}.json"), golden, indent=None)
    print(f"  {length} tokens: gap {gap:.2e}, greedy {greedy_gap:.2e}, margin {min(margins):.3f}, "
          f"max logit {logits.abs().max():.1f}, bf16 {golden['bf16_deviation']}", flush=True)


def make_form(out, name, form, seed):
    folder = os.path.join(out, name)
    print(name, flush=True)
    write_checkpoint(folder, form, stored_tensors(form, torch.Generator().manual_seed(seed)))
    config, tensors = read_checkpoint(folder)
    plain = as_float32(tensors)
    plain = {k: v for k, v in plain.items() if not k.endswith("input_scale")}
    types = (torch.float32, torch.bfloat16)
    models = [load_model(config, plain, dtype) for dtype in types]
    mtps = [MtpChain(config, plain, dtype) for dtype in types] if config.get("num_nextn_predict_layers") else None
    make_golden(folder, "", form, models, mtps, form["prompt"], form.get("rows"), form["gap"], MIN_INDEX_GAP, seed)
    if "long" in form:
        make_golden(folder, "_long", form, models, None, form["long"], form["long_rows"], form["long_gap"],
                    form.get("long_index_gap", MIN_INDEX_GAP), seed + 1)
    files = [os.path.join(folder, f) for f in os.listdir(folder)]
    for file in files:
        os.chmod(file, 0o644)
    size = sum(map(os.path.getsize, files))
    print(f"  {size / 1000:.0f} kB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="directory that receives one directory per form")
    parser.add_argument("--only", action="append", choices=list(FORMS), help="make only this form (may be repeated)")
    parser.add_argument("--seed", type=int, default=20, help="base seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for i, (name, form) in enumerate(FORMS.items()):
        if not arguments.only or name in arguments.only:
            make_form(arguments.out, name, form, arguments.seed + 10 * i)


if __name__ == "__main__":
    main()
