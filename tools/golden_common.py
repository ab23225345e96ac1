"""Shared pieces of the golden tools: reading checkpoints as float32, running them in
Hugging Face transformers, and measuring how close the routing and the choice of keys come to a tie."""

import glob
import json
import os
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

INFINITE_GAP = 1e30


def dequantise(weight, scale):
    """Multiplies out an FP8 weight: scale is one number, one per output row, or one per 128x128 block."""
    weight, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if scale.shape == (weight.shape[0], 1):
        return weight * scale
    rows, cols = weight.shape
    full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return weight * full


def as_float32(tensors):
    """The weights of a checkpoint as float32, scales multiplied in and left out."""
    plain = {}
    for name, value in tensors.items():
        if name.endswith(("_scale_inv", "_scale")):
            continue
        scale = tensors.get(name + "_scale_inv", tensors.get(name + "_scale"))
        plain[name] = value.float() if scale is None else dequantise(value, scale)
    return plain


def read_checkpoint(folder):
    """config.json and all tensors of a checkpoint folder, as stored; of a model that also takes pictures
    the language model's."""
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    tensors = {}
    for path in sorted(glob.glob(os.path.join(folder, "model*.safetensors"))):
        with safe_open(path, "pt") as f:
            tensors.update({name: f.get_tensor(name) for name in f.keys()})
    if "text_config" not in config:
        return config, tensors
    prefix = "language_model."
    return config["text_config"], {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def load_model(config, plain, dtype):
    """A transformers model with the given float32 weights, run in dtype with eager attention.

    Tensors of layers beyond num_hidden_layers (MTP layers) are left out; everything else must
    be used, and nothing may be missing."""
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype")}
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    if config["model_type"] == "deepseek_v3":
        config["rope_interleave"] = True
    if config["model_type"] == "glm4_moe_lite":        # its class does not read first_k_dense_replace
        dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    first = config["num_hidden_layers"]
    extra = tuple(f"model.layers.{first + i}." for i in range(config.get("num_nextn_predict_layers") or 0))
    main = {k: v.contiguous() for k, v in plain.items() if not k.startswith(extra)}
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f)
        save_file(main, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="eager",
            experts_implementation="eager", output_loading_info=True)
    bad = {k: v for k, v in info.items() if v and k != "error_msgs"} | ({"errors": info["error_msgs"]} if info.get("error_msgs") else {})
    if bad:
        raise RuntimeError(f"the checkpoint does not fit the model: {bad}")
    if config.get("qk_rope_head_dim") == 0:        # transformers takes a width of 0 for one that is not given
        model.model.rotary_emb.inv_freq = torch.zeros(0)
    return model.eval()


def _margin(values, k):
    """Distance between the k-th and the next largest entry of each row."""
    if k >= values.shape[-1]:
        return torch.full(values.shape[:-1], INFINITE_GAP)
    top = values.topk(k + 1, dim=-1).values
    return (top[..., k - 1] - top[..., k]).clamp(max=INFINITE_GAP)


def _route(gate, logits):
    """Per token: the set of chosen experts as a mask, and the smaller of the two distances (groups,
    experts) by which the choice was made, in units of the score that is compared."""
    bias = getattr(gate, "e_score_correction_bias", None)
    k, groups, kept = gate.top_k, gate.num_group, gate.topk_group
    logits = logits.float()
    if bias is not None:
        scores = logits.sigmoid() + bias.float()
        by_group = scores.view(len(scores), groups, -1)
        group_scores, fill = by_group.topk(2, dim=-1).values.sum(-1), float("-inf")
    else:
        scores = logits.softmax(-1)
        if gate.topk_method == "greedy":
            groups = kept = 1
        by_group = scores.view(len(scores), groups, -1)
        group_scores, fill = by_group.amax(-1), 0.0
    gap = _margin(group_scores, kept)
    keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, group_scores.topk(kept, dim=-1).indices, True)
    scores = by_group.masked_fill(~keep[..., None], fill).flatten(1)
    gap = torch.minimum(gap, _margin(scores, k))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k, dim=-1).indices, True)
    return chosen, gap


class RouterProbe:
    """Collects, for one forward pass, the routing of every MoE layer of a model."""

    def __init__(self, model):
        self.gaps, self.chosen = [], []
        self._hooks = [layer.mlp.gate.register_forward_hook(self._take)
                       for layer in model.model.layers if hasattr(layer.mlp, "gate")]

    def _take(self, gate, inputs, output):
        chosen, gap = _route(gate, output[0])
        used = torch.zeros_like(chosen).scatter_(1, output[2], True)
        if (used != chosen).any(-1).logical_and(gap > 1e-6).any():
            raise RuntimeError("this tool's routing rule differs from the model's")
        self.chosen.append(used)
        self.gaps.append(gap)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    def smallest(self, rows):
        """Smallest distance over the layers, per position; infinite without routers."""
        return torch.stack(self.gaps).amin(0) if self.gaps else torch.full((rows,), INFINITE_GAP)


class IndexProbe:
    """Runs the indexers of a model (DeepSeek-V3.2) with a stable choice, and measures how clear it is.

    torch.topk() leaves open which of equal scores it takes; a key for which all heads are cut by the
    ReLU scores exactly 0, so equal scores are common where heads are few. Here the earlier key comes
    first. A row's gap is the distance between the last score taken and the first left out; where
    these are equal, how far the products that the ReLU sees are from 0."""

    def __init__(self, model):
        self.gaps = []
        self._wrapped = []
        for layer in model.model.layers:
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                self._wrap(indexer)

    def _wrap(self, indexer):
        original = indexer.forward

        def chosen(*args, **kwargs):
            products = []

            def relu(x):
                products.append(x)
                return relu_of_torch(x)

            def topk(scores, k, dim=-1, **_):
                order = torch.sort(scores, dim=dim, descending=True, stable=True)
                self.gaps.append(self._gap(scores[0], order.values[0], products[0][0], k))
                return type(order)((order.values[..., :k], order.indices[..., :k]))

            relu_of_torch, topk_of_torch = torch.nn.functional.relu, torch.Tensor.topk
            torch.nn.functional.relu, torch.Tensor.topk = relu, topk
            try:
                return original(*args, **kwargs)
            finally:
                torch.nn.functional.relu, torch.Tensor.topk = relu_of_torch, topk_of_torch

        indexer.forward = chosen
        self._wrapped.append((indexer, original))

    @staticmethod
    def _gap(scores, ordered, products, k):
        """scores and ordered [rows, keys], products [rows, heads, keys]; row r sees r + 1 keys."""
        rows, keys = scores.shape
        gap = torch.full((rows,), INFINITE_GAP)
        for row in range(k, rows):
            last, first = ordered[row, k - 1].item(), ordered[row, k].item()
            gap[row] = last - first if last > first else products[row, :, :row + 1].abs().min().item()
        return gap

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for indexer, original in self._wrapped:
            indexer.forward = original

    def smallest(self, rows):
        """Smallest gap over the layers, per position; infinite without indexers."""
        return torch.stack(self.gaps).amin(0) if self.gaps else torch.full((rows,), INFINITE_GAP)


@torch.no_grad()
def forward(model, ids=None, embeds=None):
    """One full pass without cache: float32 logits [n, vocab], post-norm states [n, hidden], the probe,
    which has the distances of the routing as `router_gaps` and those of the choice of keys as `index_gaps`."""
    arguments = {"input_ids": torch.tensor([ids])} if embeds is None else {"inputs_embeds": embeds[None]}
    with RouterProbe(model) as probe, IndexProbe(model) as index_probe:
        hidden = model.model(**arguments, use_cache=False).last_hidden_state[0]
    probe.router_gaps, probe.index_gaps = probe.smallest(len(hidden)), index_probe.smallest(len(hidden))
    return model.lm_head(hidden).float(), hidden, probe
