#!/usr/bin/env python3
"""Writes checkpoints of four bits with the libraries that publishers use, and what they read back.

usage: make_four_bit_goldens.py DIR [--seeds N,…] [--cases NAME,…]

Each case is a folder: config.json and model.safetensors, in which one linear layer [32, 256] of a
model of one layer is packed by compressed-tensors, AutoAWQ, AutoGPTQ or GPTQModel, and
values.safetensors with the tensor "values": that library's own dequantised weights.
tests/goldens/four_bits are those of seed 0, the default; src/checkpoint/four_bit_library_test.cc
reads them. With several seeds each has a folder of that name in DIR.

Needs torch, safetensors, numpy, transformers, and by `pip install --no-deps` compressed-tensors
(with loguru), autoawq, auto-gptq, gptqmodel: tools/requirements-four-bits.txt. The last three do
not import beside current versions of their dependencies, or need many more; only their packing
modules are loaded.
"""

import argparse
import importlib
import importlib.machinery
import json
import pathlib
import sys
import types
import unittest.mock

import torch
from safetensors.torch import save_file

MODULE = "model.layers.0.self_attn.o_proj"
ROWS, COLUMNS = 32, 256
CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 3, "hidden_size": ROWS, "num_hidden_layers": 1,
    "max_position_embeddings": 8, "rms_norm_eps": 1e-6, "num_attention_heads": 4,
    "kv_lora_rank": 2, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": COLUMNS // 4,
    "rope_theta": 10000, "intermediate_size": 2,
}
LAYER = "model.layers.0."
OTHERS = {
    "model.embed_tokens.weight": (3, ROWS), "model.norm.weight": (ROWS,),
    "lm_head.weight": (3, ROWS), LAYER + "input_layernorm.weight": (ROWS,),
    LAYER + "post_attention_layernorm.weight": (ROWS,),
    LAYER + "self_attn.q_proj.weight": (12, ROWS),
    LAYER + "self_attn.kv_a_proj_with_mqa.weight": (4, ROWS),
    LAYER + "self_attn.kv_a_layernorm.weight": (2,),
    LAYER + "self_attn.kv_b_proj.weight": (4 * (1 + COLUMNS // 4), 2),
    LAYER + "mlp.gate_proj.weight": (2, ROWS), LAYER + "mlp.up_proj.weight": (2, ROWS),
    LAYER + "mlp.down_proj.weight": (ROWS, 2),
}
IGNORED = ["lm_head", "re:.*mlp.*", "re:.*q_proj", "re:.*kv_.*"]


def write(folder, quantization, tensors, values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": quantization}, indent=1) + "\n")
    whole = {name: torch.full(shape, 0.5) for name, shape in OTHERS.items()}
    whole |= {f"{MODULE}.{name}": tensor.detach().contiguous()
              for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    save_file({"values": values.detach().contiguous()}, folder / "values.safetensors")


def grouped(weight, size):
    """Least and greatest value of each row and group, [rows, groups]."""
    groups = weight.reshape(ROWS, -1, size)
    return groups.amin(-1), groups.amax(-1)


# ---- compressed-tensors ----

def packed(weight, dtype=torch.bfloat16, **weights):
    """INT4 of compressed-tensors' `pack-quantized`, or FP4 by its group's size."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (QuantizationArgs, QuantizationConfig,
                                                 QuantizationScheme)
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(num_bits=4, **weights)
    name = "pack-quantized"
    if args.type == "float":
        name = "nvfp4-pack-quantized" if args.group_size == 16 else "mxfp4-pack-quantized"
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = weight.to(dtype)
    low, high = grouped(weight, args.group_size or COLUMNS)
    state = {"weight": weight}
    if name.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(weight.amin().float(),
                                                       weight.amax().float()).reshape(1)
    scale, zero = calculate_qparams(low, high, args,
                                    global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale if args.type == "float" else scale.to(dtype)
    if not args.symmetric:
        state["weight_zero_point"] = zero.round().to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=name, ignore=IGNORED)
    return config.to_dict(), stored, values


# ---- AutoAWQ, AutoGPTQ and GPTQModel ----

def packing_module(name):
    """A module of a package, without running the __init__ of the packages that it lies in."""
    parts = name.split(".")
    root = importlib.machinery.PathFinder.find_spec(parts[0]).submodule_search_locations[0]
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(pathlib.Path(root, *parts[1:depth]))]
    return importlib.import_module(name)


def stub(name):
    """A module of which packing uses nothing but a name or a context."""
    module = types.ModuleType(name)
    context = unittest.mock.MagicMock()
    context.__exit__.return_value = False
    module.__getattr__ = lambda _: unittest.mock.MagicMock(
        threadpool_limits=lambda *_: context)
    module.__path__ = []
    sys.modules[name] = module


def integers(weight, size, symmetric, group_of=None, least_zero=1):
    """Scales and zero points of `least_zero` to fifteen, [rows, groups]."""
    if group_of is None:
        low, high = grouped(weight, size)
    else:
        columns = [weight[:, group_of == group] for group in range(COLUMNS // size)]
        low = torch.stack([part.amin(1) for part in columns], 1)
        high = torch.stack([part.amax(1) for part in columns], 1)
    if symmetric:
        scale = torch.maximum(-low, high) / 7
        return scale, torch.full_like(scale, 8)
    scale = (high - low) / (15 - least_zero)
    return scale, (least_zero - low / scale).round().clamp(least_zero, 15)


def linear_of(weight):
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = weight.clone()
    return linear


def awq(weight):
    sys.modules.setdefault("accelerate", types.ModuleType("accelerate"))
    packing_module("awq.utils.utils").get_best_device = lambda: "cpu"
    module = packing_module("awq.modules.linear.gemm")
    size = 64
    scale, zero = integers(weight, size, False)
    linear = module.WQLinear_GEMM.from_linear(linear_of(weight), 4, size,
                                              scales=scale.t().half().float().contiguous(),
                                              zeros=zero.t().contiguous())
    stored = {"qweight": linear.qweight, "qzeros": linear.qzeros, "scales": linear.scales}
    values = module.dequantize_gemm(linear.qweight, linear.qzeros, linear.scales.float(), 4, size)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
              "version": "gemm", "modules_to_not_convert": ["q_proj", "kv_", "mlp", "lm_head"]}
    return config, stored, values.t()


def groups_of(size, order):
    group_of = torch.arange(COLUMNS) // size
    return group_of[torch.randperm(COLUMNS)] if order else group_of


def gptq(weight, symmetric, order):
    module = packing_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    size = 64
    group_of = groups_of(size, order)
    scale, zero = integers(weight, size, symmetric, group_of)
    layer = module.QuantLinear(4, size, COLUMNS, ROWS, bias=False, weight_dtype=torch.float32)
    layer.pack(linear_of(weight), scale.half().float(), zero, group_of.to(torch.int32))
    stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half(),
              "g_idx": layer.g_idx}
    # Products with the unit matrix in fp32 are the weights: one term of each sum is not zero.
    values = layer(torch.eye(COLUMNS)).t()
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": symmetric,
              "desc_act": order, "checkpoint_format": "gptq"}
    return config, stored, values


def gptq_v2(weight, order):
    for name in ("adapter.adapter", "models._const", "quantization", "utils.backend", "utils.env",
                 "utils.logger", "utils.safe"):
        stub(f"gptqmodel.{name}")
    packing_module("gptqmodel.utils.planar_packing")
    module = packing_module("gptqmodel.nn_modules.qlinear")

    class Linear(module.PackableQuantLinear):
        dequant_dtype = torch.int8

        @classmethod
        def validate(cls, **_):
            return True, None

    size = 64
    group_of = groups_of(size, order)
    scale, zero = integers(weight, size, False, group_of, least_zero=0)
    layer = Linear(bits=4, group_size=size, desc_act=order, sym=False, in_features=COLUMNS,
                   out_features=ROWS, bias=False, pack_dtype=torch.int32, backend=None,
                   adapter=None, register_buffers=True, enable_wf_unsqueeze=True)
    layer.pack_original(linear_of(weight), scale.half().float(), zero, group_of.to(torch.int32))
    stored = {name: getattr(layer, name).clone()
              for name in ("qweight", "qzeros", "scales", "g_idx")}
    layer.scales = layer.scales.float()  # its products are of the scales' type
    config = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": False,
              "desc_act": order, "checkpoint_format": "gptq_v2"}
    return config, stored, layer.dequantize_weight().t().float()


CASES = {
    "int4_g32": lambda w: packed(w, strategy="group", group_size=32),
    "int4_g32_fp32": lambda w: packed(w, torch.float32, strategy="group", group_size=32),
    "int4_g128": lambda w: packed(w, strategy="group", group_size=128),
    "int4_channel": lambda w: packed(w, strategy="channel"),
    "int4_g32_zeros": lambda w: packed(w, strategy="group", group_size=32, symmetric=False),
    "int4_g128_zeros_fp32": lambda w: packed(w, torch.float32, strategy="group", group_size=128,
                                             symmetric=False),
    "int4_channel_zeros": lambda w: packed(w, strategy="channel", symmetric=False),
    "mxfp4": lambda w: packed(w, type="float", strategy="group", group_size=32),
    "nvfp4": lambda w: packed(w, type="float", strategy="tensor_group", group_size=16),
    "awq_g64": awq,
    "gptq_g64": lambda w: gptq(w, True, False),
    "gptq_g64_zeros": lambda w: gptq(w, False, False),
    "gptq_g64_order": lambda w: gptq(w, False, True),
    "gptq_v2_g64": lambda w: gptq_v2(w, False),
    "gptq_v2_g64_order": lambda w: gptq_v2(w, True),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for seed in seeds:
        folder = options.directory / str(seed) if len(seeds) > 1 else options.directory
        for index, name in enumerate(options.cases.split(",")):
            torch.manual_seed(1000 * seed + index)
            # Rows of different size, and skewed, so that zero points differ.
            weight = torch.randn(ROWS, COLUMNS) * torch.rand(ROWS, 1) * 0.1 + 0.01
            with torch.no_grad():
                write(folder / name, *CASES[name](weight))


if __name__ == "__main__":
    main()
