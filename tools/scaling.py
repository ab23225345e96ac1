#!/usr/bin/env python3
"""Computes decode speed of DeepSeek-V3 on 8, 16 and 64 H200 by placement (docs/scaling.md).

usage: scaling.py [--gpus N] [--requests R] [--context TOKENS] [--cache fp8|bf16] [--tables]

Prints, for one load, the step of every placement and its parts. --tables prints the document's
tables instead; `make tables` writes them. Everything here is computed: from times measured on one
H200 (bench/results), from collectives' costs that were measured elsewhere, and from assumptions.
REFERENCED and ASSUMED name the last two with their sources; docs/scaling.md has the formulas.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import random

ROOT = pathlib.Path(__file__).resolve().parent.parent

# DeepSeek-V3's config.json.
HIDDEN, LAYERS, DENSE_LAYERS, EXPERTS, TOP_K, GROUPS, TOP_GROUPS = 7168, 61, 3, 256, 8, 8, 4
EXPERT_COLUMNS, DENSE_COLUMNS, VOCABULARY, Q_RANK, HEADS = 2048, 18432, 129280, 1536, 128
MOE_LAYERS = LAYERS - DENSE_LAYERS
EXPERT_BYTES = 3 * HIDDEN * EXPERT_COLUMNS  # e4m3; scales are 0.02 % of it
HEAD_BYTES = 2 * HIDDEN * VOCABULARY  # bf16
ROW_BYTES = 2 * HIDDEN  # a token between layers, bf16
MEASURED_BATCHES = (1, 16, 128)  # of layers, one token a sequence, 1K context
CACHE_BYTES = {"fp8": LAYERS * 656, "bf16": LAYERS * 1152}  # a token
# By rows: the persistent kernel takes steps up to so many bytes of a layer's cache
# (most_decode_layers_bytes(), src/ops/decode_layers/decode_layers_support.h).
SLICE_BYTES = {1: 8.9e6, 2: 5.6e6, 3: 4.2e6, 4: 3.8e6}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that was not measured by a benchmark of this repository's bench/results."""
    value: float
    unit: str
    what: str
    source: str


REFERENCED = {
    "read_tb_s": Figure(
        4.3, "TB/s", "read bandwidth of one H200",
        "measured, [performance](performance.md#glossary)"),
    "slice_launches_us": Figure(
        71.0, "us", "a layer of the TP8 slice at batch 1 in separate launches",
        "measured, [decode_layers](kernels/decode_layers.md)"),
    "slice_attention_us": Figure(
        2.6, "us", "attention over 1,000 more keys in the persistent kernel",
        "measured, [decode_layers](kernels/decode_layers.md#length)"),
    "all_reduce_us": Figure(
        4.75, "us", "smallest all-reduce over 8 GPUs, 14 KB",
        "own probe on 8 H200: flag-in-data kernel in graphs, 4 to 5.5 us; NCCL 24.7 us"),
    "nvlink_gb_s": Figure(
        336, "GB/s", "NVLink, out of each of 8 GPUs, all-to-all",
        "own probe on 8 H200 through NCCL; DeepEP has 337 on an H20"),
    "nic_gb_s": Figure(
        46, "GB/s", "a GPU's 400 Gb/s InfiniBand port",
        "46 to 48, NVIDIA/nccl-tests#290"),
    "memory_mib": Figure(
        143771, "MiB", "memory of one H200",
        "nvidia-smi, as in sgl-project/sglang#3196"),
}
# (bytes, us) over 8 H200: up to 229 KB the probe's one-shot kernel, not tuned; above it NCCL.
ALL_REDUCE_8 = ((14336, 4.75), (57344, 7.4), (114688, 9.9), (229376, 14.5), (917504, 27.6),
                (7.34e6, 70.0), (58.7e6, 326.0))
# DeepEP V1, low latency, 128 tokens a rank, H800: ranks to us of dispatch and of combine
# (deepseek-ai/DeepEP, docs/legacy.md).
DEEPEP_US = {16: (118, 195), 64: (173, 314)}
DEEPEP_TOKENS = 128

ASSUMED = {
    "memory_share": Figure(
        0.9, "", "share of memory for weights and cache",
        "the peers' default"),
    "hop_us": Figure(
        20, "us", "smallest exchange over InfiniBand, kernel to kernel; an all-reduce takes two",
        "NCCL's smallest all-reduce inside a node takes 24.7 us"),
    "handoffs": Figure(
        3, "", "handoffs of an exchange in a node: expert ids, dispatch, combine",
        "each as long as the smallest all-reduce"),
    "dispatch_bytes": Figure(
        7456, "B", "a dispatched token",
        "7,168 e4m3, 56 scales, 8 ids and weights"),
    "return_rows": Figure(
        8, "", "rows of 14,336 B that a token gets back in a node: one an expert",
        "sums in top-k order have one GPU's bits"),
    "routing_draws": Figure(
        32, "", "draws of uniform routing, 8 experts in 4 of 8 groups",
        "seed 5"),
}


def value(name):
    return (REFERENCED.get(name) or ASSUMED[name]).value


def interpolated(points, x):
    """Piecewise linear through sorted (x, y), flat below the first; the last piece goes on."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x <= x1:
            break
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def by_share(whole, slice_, share):
    """Linear in a rank's share of heads or columns through the measured whole and TP8 slice."""
    return slice_ + (whole - slice_) * (share - 1 / 8) / (7 / 8)


class Measured:
    """Times of one H200 in us from bench/results, as functions of rows (tokens of the step)."""
    def __init__(self, root=ROOT):
        self.folder = root / "bench/results"
        self.report = self.read("gpu_report_h200.json")["rows"]
        linear = {}
        for name in ("scaled_few_rows_h200.json", "scaled_linear_h200.json"):
            for row in self.read(name)["results"]:
                if row["operation"] == "linear":
                    linear.setdefault((row["n"], row["k"]), []).append((row["rows"], row["us"]))
        self.linear = {shape: sorted(points) for shape, points in linear.items()}
        self.absorb = {}
        for row in self.read("scaled_absorb_h200.json")["results"]:
            self.absorb.setdefault((row["product"], row["heads"]), []).append(
                (row["rows"], row["us"]))
        fused = self.read("fused_h200.json")
        self.norms, self.gate = {}, []
        for row in fused["norms"]:
            rows, width = (int(part) for part in row["shape"].split(" x "))
            self.norms.setdefault((row["operation"], width), []).append((rows, row["us"]))
        for row in fused["gate"]:
            if row["operation"] == f"gate {EXPERTS}x{HIDDEN}":
                self.gate.append((int(row["shape"].split()[0]), row["us"]))
        self.latent = {}
        for name, heads in (("latent_decode_h200.json", 16),
                            ("latent_decode_8_bit_rows_h200.json", 128)):
            for row in self.read(name)["results"]:
                form, shape = row["operation"].removeprefix("latent_decode "), row["shape"]
                if shape.startswith(f"{heads} heads, 1 x ") and form in CACHE_BYTES:
                    sequences, keys = (int(part) for part in shape.split(" x ")[1:])
                    if keys in (1024, 4096):
                        self.latent.setdefault((form, heads, keys), []).append(
                            (sequences, row["us"]))
        for points in self.latent.values():
            points.sort()
        self.read_experts()

    def read(self, name):
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def read_experts(self):
        few = {
            (row["shape"], row["rows"]): row["us"]
            for row in self.read("scaled_moe_launch_h200.json")["results"]
        }
        many = {}
        for name in ("scaled_moe_many_rows_launches_h200.json", "scaled_moe_many_rows_h200.json"):
            for row in self.read(name)["results"]:  # the second file is the newer
                many[row["model"], row["tokens"]] = row["us"]
        self.columns = {}
        for width, few_name, many_name in ((1, "v3", "V3"), (8, "eighth v3", "V3, an eighth")):
            points = {
                rows: us
                for (shape, rows), us in few.items() if shape == few_name and rows <= 64
            }
            points |= {
                rows: us
                for (model, rows), us in many.items() if model == many_name and rows >= 128
            }
            self.columns[width] = sorted(points.items())
        # By rank: a layer's launches cost `launch`, a touched expert with r rows `expert(r)`.
        eight, thirty_two = few["8 experts x 1", 1], few["32 experts x 4", 16]
        slope = (thirty_two - eight) / 24
        self.launch = eight - 8 * slope
        self.expert_points = [(1, slope)]
        for rows in (20, 64, 192):
            us = many["V3, 32 experts", rows * 32 // TOP_K]
            self.expert_points.append((rows, (us - self.launch) / 32))

    def expert(self, rows):
        """One whole expert with this many rows; beyond 192 in proportion: bound by arithmetic."""
        last_rows, last_us = self.expert_points[-1]
        if rows > last_rows:
            return last_us * rows / last_rows
        return interpolated(self.expert_points, rows)

    def latent_decode(self, cache, share, sequences, context):
        def heads(count):
            short, long = (interpolated(self.latent[cache, count, keys], sequences)
                           for keys in (1024, 4096))
            return interpolated(((1024, short), (4096, long)), context) if context > 1024 else short

        # Every rank of a group reads the whole latent cache: fewer than 16 heads do not read less.
        return by_share(heads(128), heads(16), max(share, 1 / 8))

    def projections(self, share, rows):
        """Norms, GEMMs and router of a layer: all but attention over the cache and experts."""
        def split(whole, slice_):
            return by_share(interpolated(whole, rows), interpolated(slice_, rows), share)

        return (split(self.linear[24576, 1536], self.linear[3072, 1536])
                + split(self.linear[7168, 16384], self.linear[7168, 2048])
                + split(self.absorb["W_UK e4m3", 128], self.absorb["W_UK e4m3", 16])
                + split(self.absorb["W_UV e4m3, out e4m3", 128],
                        self.absorb["W_UV e4m3, out e4m3", 16])
                + interpolated(self.linear[2112, 7168], rows) + interpolated(self.gate, rows)
                + interpolated(self.norms["add_rms_norm in e4m3", HIDDEN], rows)
                + interpolated(self.norms["add_rms_norm in both", HIDDEN], rows)
                + interpolated(self.norms["rms_norm in e4m3", Q_RANK], rows))

    def experts_by_columns(self, share, tokens):
        return by_share(*(interpolated(self.columns[width], tokens) for width in (1, 8)), share)

    def layer(self, width, sequences, field="moe_layer_us", new=1, cached=1024):
        """A measured MoE layer (or step) of the whole model (1) or the TP8 slice (8)."""
        model = {1: "v3", 8: "v3_slice"}[width]
        return self.report[f"{model}/sequences{sequences}/new{new}/cached{cached}:{field}"]["value"]

    def kernels(self, width, rows):
        """The sum of a layer's kernels at 1K context, to be compared with layer()."""
        return (self.projections(1 / width, rows) + self.experts_by_columns(1 / width, rows)
                + self.latent_decode("fp8", 1 / width, rows, 1024))

    def layer_of_launches(self, width, count):
        """layer(), but the slice's at batch 1 as it is without the persistent kernel."""
        return value("slice_launches_us") if (width, count) == (8, 1) else self.layer(width, count)

    @functools.cached_property
    def factors(self):
        """{1 or 8: [(log(rows), measured layer over the sum of its kernels)]}"""
        return {width: [(math.log(count),
                         self.layer_of_launches(width, count) / self.kernels(width, count))
                        for count in MEASURED_BATCHES] for width in (1, 8)}

    def calibration(self, share, rows):
        """Linear in the share and in log(rows); beyond the largest measured batch as at it."""
        at = math.log(min(rows, MEASURED_BATCHES[-1]))
        return by_share(*(interpolated(self.factors[width], at) for width in (1, 8)),
                        max(share, 1 / 8))

    def rest(self, share, rows):
        """Three dense layers, embedding, final norm and head at 1K context: what a measured step of
        five layers has beside its two MoE layers. The slice was measured with a whole head."""
        def measured(width):
            points = [
                (count,
                 self.layer(width, count, "step_of_fewer_layers_us") - 2 * self.layer(width, count))
                for count in MEASURED_BATCHES
            ]
            head = HEAD_BYTES / value("read_tb_s") / 1e6 * (1 - 1 / width)
            return interpolated(points, rows) - head

        return max(by_share(measured(1), measured(8), share), 0.0)


@dataclasses.dataclass(frozen=True)
class Placement:
    """An engine of tp x dp ranks, `replicas` times behind a router."""
    tp: int
    dp: int
    by_rank: bool  # experts by rank (--enable-expert-parallel) or by columns
    replicas: int = 1

    @property
    def world(self):
        return self.tp * self.dp

    @property
    def gpus(self):
        return self.world * self.replicas

    @property
    def is_slice(self):
        """Ranks compute what bench/models/v3-10-layers-eighth computes."""
        return (self.tp, self.dp, self.by_rank) == (8, 1, False)

    @property
    def name(self):
        parts = [f"{axis} {size}" for axis, size in (("tp", self.tp), ("dp", self.dp)) if size > 1]
        name = ", ".join(parts + ["ep"] * self.by_rank)
        return f"{self.replicas} x ({name})" if self.replicas > 1 else name

    @property
    def flags(self):
        parts = [
            f"--{axis} {size}" for axis, size in (("tp", self.tp), ("dp", self.dp)) if size > 1
        ]
        parts += ["--enable-expert-parallel"] * self.by_rank
        return " ".join(parts + [f"--nnodes {self.world // 8}"] * (self.world > 8))

    def weight_bytes(self):
        """Bytes of one rank. MTP's layer is left out."""
        routed = MOE_LAYERS * EXPERTS * EXPERT_BYTES / self.world
        shared_over = self.world if not self.by_rank else self.tp if self.dp == 1 else 1
        q_kv_a, q_b, kv_b = 2112 * HIDDEN, 192 * HEADS * Q_RANK, 256 * HEADS * 512
        attention = LAYERS * (q_kv_a + (q_b + kv_b + HIDDEN * 128 * HEADS) / self.tp)
        dense = DENSE_LAYERS * 3 * HIDDEN * DENSE_COLUMNS / self.tp
        router = MOE_LAYERS * 2 * EXPERTS * HIDDEN
        return (routed + MOE_LAYERS * EXPERT_BYTES / shared_over + attention + dense + router
                + 2 * HEAD_BYTES / self.tp)

    def capacity(self, context, cache):
        """Sequences of this context that fit into the cache of all lanes."""
        room = value("memory_mib") * 2**20 * value("memory_share") - self.weight_bytes()
        return max(int(room / (CACHE_BYTES[cache] * context)), 0) * self.dp * self.replicas


ON_8 = (Placement(8, 1, False), Placement(8, 1, True), Placement(4, 2, True), Placement(2, 4, True),
        Placement(1, 8, False), Placement(1, 8, True))
ON_16 = (Placement(8, 1, False, 2), Placement(1, 8, True, 2), Placement(16, 1, False),
         Placement(8, 2, True), Placement(1, 16, True))
ON_64 = (Placement(8, 1, False, 8), Placement(1, 8, True, 8), Placement(1, 16, True, 4),
         Placement(8, 8, True), Placement(1, 64, True))
PLACEMENTS = {8: ON_8, 16: ON_16, 64: ON_64}


def touched_ranks(world):
    """Mean number of ranks (or nodes) that hold experts of one token, drawn as draw_experts()."""
    size = EXPERTS // GROUPS
    groups, of_each = max(EXPERTS // world // size, 1), min(EXPERTS // world, size)
    pool = TOP_GROUPS * size
    untouched = sum(
        math.comb(groups, chosen) * math.comb(GROUPS - groups, TOP_GROUPS - chosen)
        / math.comb(GROUPS, TOP_GROUPS)
        * math.comb(pool - chosen * of_each, TOP_K) / math.comb(pool, TOP_K)
        for chosen in range(groups + 1))
    return world * (1 - untouched)


@dataclasses.dataclass(frozen=True)
class Network:
    """Costs of collectives in us. The fields are what docs/scaling.md varies."""
    all_reduce_us: float = value("all_reduce_us")
    hop_us: float = value("hop_us")
    return_a_rank: bool = False  # one row a GPU comes back instead of one an expert
    copy_a_node: bool = False  # over InfiniBand a copy a token and node, not DeepEP's one an expert
    hidden: float = 0.0  # share of an exchange's bytes behind computation

    def least(self, ranks):
        return 0.0 if ranks == 1 else self.all_reduce_us if ranks <= 8 else 2 * self.hop_us

    def all_reduce(self, ranks, size):
        """Over fewer than 8 GPUs what exceeds the smallest goes by a ring's bytes. Over nodes:
        a node's sum, and each GPU's eighth through its own port."""
        if ranks == 1:
            return 0.0
        local = min(ranks, 8)
        over_8 = max(self.all_reduce_us, interpolated(ALL_REDUCE_8, size))
        us = (over_8 - self.all_reduce_us) * (local - 1) / local / (7 / 8)
        if ranks > 8:
            nodes = ranks / 8
            us += 2 * (nodes - 1) / nodes * size / 8 / (value("nic_gb_s") * 1e3)
        return self.least(ranks) + us

    def exchange(self, world, tokens):
        """Dispatch and combine of `tokens` of each rank: (latency, time of the bytes)."""
        if world <= 8:
            rows = touched_ranks(world) if self.return_a_rank else value("return_rows")
            sent = touched_ranks(world) * value("dispatch_bytes") + rows * ROW_BYTES
            latency = value("handoffs") * self.all_reduce_us
            us = tokens * (world - 1) / world * sent / (value("nvlink_gb_s") * 1e3)
        elif self.copy_a_node:  # over InfiniBand to each node, over NVLink to its ranks
            nodes, both = world // 8, value("dispatch_bytes") + ROW_BYTES
            away = touched_ranks(nodes) * (nodes - 1) / nodes
            latency = 2 * self.hop_us
            us = tokens * both * (away / (value("nic_gb_s") * 1e3)
                                  + touched_ranks(world) / (value("nvlink_gb_s") * 1e3))
        else:
            latency = 2 * self.hop_us
            us = max(sum(DEEPEP_US[world]) - 2 * value("hop_us"), 0) * tokens / DEEPEP_TOKENS
        return latency, us * (1 - self.hidden)


def draw_experts(draw):
    """8 experts of 4 of the 8 groups, uniformly. Only draw() is used: the same in every Python."""
    def chosen(items, count):
        for place in range(count):
            other = place + int(draw() * (len(items) - place))
            items[place], items[other] = items[other], items[place]
        return items[:count]

    size = EXPERTS // GROUPS
    groups = chosen(list(range(GROUPS)), TOP_GROUPS)
    return chosen([group * size + expert for group in groups for expert in range(size)], TOP_K)


ROUTED_TOKENS, ROUTED_WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (8, 16, 64)


@functools.lru_cache(maxsize=None)
def routing():
    """{ranks: {tokens: (touched experts, rows) of the busiest rank}}, means over uniform draws.

    The rank with most touched experts and the one with most rows need not be one.
    """
    draw, trials = random.Random(5).random, int(value("routing_draws"))
    sums = {world: {tokens: [0.0, 0.0] for tokens in ROUTED_TOKENS} for world in ROUTED_WORLDS}
    for _ in range(trials):
        rows = [0] * EXPERTS
        for token in range(1, ROUTED_TOKENS[-1] + 1):
            for expert in draw_experts(draw):
                rows[expert] += 1
            if token not in ROUTED_TOKENS:
                continue
            for world, of_world in sums.items():
                size = EXPERTS // world
                ranks = [rows[first:first + size] for first in range(0, EXPERTS, size)]
                touched = max(size - rank.count(0) for rank in ranks)
                of_world[token][0] += touched / trials
                of_world[token][1] += max(map(sum, ranks)) / trials
    return sums


def busiest(world, tokens):
    """(touched experts, rows) of the busiest rank. Beyond the draws the excess of rows grows as the
    root of the tokens."""
    drawn, last = routing()[world], ROUTED_TOKENS[-1]
    if tokens > last:
        excess = (drawn[last][1] - TOP_K * last / world) * math.sqrt(tokens / last)
        return drawn[last][0], TOP_K * tokens / world + excess
    return tuple(interpolated([(count, pair[i]) for count, pair in drawn.items()], tokens)
                 for i in (0, 1))


@dataclasses.dataclass
class Step:
    """A decode step of one engine in us, by what bounds its parts."""
    experts: float = 0.0
    attention: float = 0.0
    projections: float = 0.0
    latency: float = 0.0
    bytes: float = 0.0
    rest: float = 0.0
    rows_an_expert: float = 0.0

    PARTS = ("experts", "attention", "projections", "latency", "bytes", "rest")

    @property
    def us(self):
        return sum(getattr(self, part) for part in self.PARTS)

    def add(self, count, latency, us):
        """`count` collectives: their latency, and what their bytes take beyond it."""
        self.latency += count * latency
        self.bytes += count * us


class Model:
    """`skew` multiplies the busiest rank's rows; `launches`: no persistent kernel for a few
    tokens."""
    def __init__(self, measured=None, network=Network(), skew=1.0, launches=False):
        self.measured, self.network = measured or Measured(), network
        self.skew, self.launches, self.steps = skew, launches, {}

    def experts(self, placement, tokens, own):
        """us of a layer's experts on the busiest rank; the shared one takes the `own` tokens."""
        if not placement.by_rank:
            return self.measured.experts_by_columns(1 / placement.world, tokens)
        touched, rows = busiest(placement.world, tokens)
        shared = (self.measured.expert(tokens) / placement.tp if placement.dp == 1
                  else self.measured.expert(max(own, 1)))
        return (self.measured.launch + shared
                + touched * self.measured.expert(rows * self.skew / touched))

    def compute(self, placement, rows, tokens, context, cache, neighbours=1):
        """(experts, attention, projections) of an MoE layer in us, calibrated; `neighbours` rows
        are of one request, which the persistent kernel alone makes use of."""
        share, own = 1 / placement.tp, rows / placement.tp
        parts = [
            self.experts(placement, tokens, own),
            self.measured.latent_decode(cache, share, rows, context),
            self.measured.projections(share, rows),
        ]
        sequences = math.ceil(rows / neighbours)
        cached = sequences * context * CACHE_BYTES[cache] / LAYERS  # bytes of a layer
        if placement.is_slice and cached <= SLICE_BYTES.get(rows, 0) and not self.launches:
            attention = sequences * value("slice_attention_us") / 1000
            layer = (self.measured.layer(8, 1, new=rows) if sequences == 1
                     else self.measured.layer(8, rows))
            others = layer - attention * 1024
            factor = others / (parts[0] + parts[2])
            return parts[0] * factor, attention * max(context, 1024), parts[2] * factor
        return [part * self.measured.calibration(share, rows) for part in parts]

    def step(self, placement, requests, context, cache="fp8", neighbours=1):
        """One engine's step with this many requests spread evenly over its lanes, or rows, of
        which `neighbours` are of one request each."""
        rows, tokens = max(math.ceil(requests / placement.dp), 1), max(requests, 1)
        measured, network = self.measured, self.network
        step = Step(rows_an_expert=tokens * TOP_K / EXPERTS)
        experts, attention, projections = self.compute(placement, rows, tokens, context, cache,
                                                       neighbours)
        step.experts, step.attention = MOE_LAYERS * experts, MOE_LAYERS * attention
        step.projections = MOE_LAYERS * projections
        share = 1 / placement.tp
        step.rest = measured.rest(share, rows) + DENSE_LAYERS * (
            measured.latent_decode(cache, share, rows, context)
            - measured.latent_decode("fp8", share, rows, 1024))
        least = network.least(placement.tp)
        group = network.all_reduce(placement.tp, rows * ROW_BYTES)
        step.add(2 * DENSE_LAYERS, least, group - least)
        if placement.dp == 1:
            step.add(2 * MOE_LAYERS, least, group - least)
            return step
        # Reduce-scatter before the experts, all-gather behind them: an all-reduce in two calls.
        step.add(MOE_LAYERS, 2 * least, group - least)
        if placement.by_rank:
            step.add(MOE_LAYERS, *network.exchange(placement.world, rows / placement.tp))
        else:  # all-gather of all lanes' rows, reduce-scatter of the sums
            least = network.least(placement.world)
            step.add(MOE_LAYERS, 2 * least,
                     network.all_reduce(placement.world, tokens * ROW_BYTES) - least)
        return step

    def draft_us(self, placement, requests, context, cache="fp8"):
        """One draft of each request: a layer with its collectives, W_e and W_h, and the head."""
        step = self.step(placement, requests, context, cache)
        layer = (step.us - step.rest) / MOE_LAYERS
        read = (HEAD_BYTES + 2 * 2 * HIDDEN * HIDDEN) / placement.tp / value("read_tb_s") / 1e6
        return layer + read

    def drafting_step(self, placement, requests, context, drafts, cache="fp8"):
        """us of a step in which each request has so many drafts. But in the persistent kernel, rows
        of a request are counted as requests of their own: each reads the cache."""
        verify = self.step(placement, requests * (1 + drafts), context, cache, 1 + drafts).us
        return verify + drafts * self.draft_us(placement, requests, context, cache)

    def tokens_per_second(self, placement, requests, context, cache="fp8"):
        """Tokens per second of all replicas; None where the cache does not hold the requests."""
        if requests > placement.capacity(context, cache):
            return None
        work = (placement.tp, placement.dp, placement.by_rank,
                math.ceil(requests / placement.replicas), context, cache)
        if work not in self.steps:
            self.steps[work] = self.step(placement, *work[3:]).us
        return requests / self.steps[work] * 1e6

    def with_queue(self, placement, requests, context, cache="fp8"):
        """The same where requests that the cache does not hold wait; None if it holds none."""
        held = min(requests, placement.capacity(context, cache))
        return self.tokens_per_second(placement, held, context, cache) if held else None

    def prefill(self, placement):
        """Prompt tokens/s of one engine, 4,096 a lane and step, as the layer was measured."""
        new = 4096
        layer = self.measured.layer(placement.tp, 1, new=new, cached=0)
        layer += (2 * self.network.all_reduce(placement.tp, new * ROW_BYTES)
                  if placement.dp == 1 else sum(self.network.exchange(placement.world, new)))
        return new * placement.dp / (LAYERS * layer) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8, choices=sorted(PLACEMENTS))
    parser.add_argument("--requests", type=int, default=64, help="concurrent requests")
    parser.add_argument("--context", type=int, default=4096, help="cached tokens of each")
    parser.add_argument("--cache", default="fp8", choices=sorted(CACHE_BYTES))
    parser.add_argument("--tables", action="store_true", help="print the tables of docs/scaling.md")
    flags = parser.parse_args()
    if flags.requests < 1 or flags.context < 1:
        parser.error("--requests and --context are at least 1")
    if flags.tables:
        import scaling_tables  # it imports this module
        for name, make in scaling_tables.TABLES.items():
            print(f"{name}\n\n{make(ROOT)}")
        return
    model = Model()
    print(f"computed, not measured: {flags.requests} requests of {flags.context} tokens, "
          f"{flags.cache} cache, {flags.gpus} H200")
    print(f"{'':20}{'tokens/s':>10}{'ms/step':>9}  parts of the step, ms")
    for placement in PLACEMENTS[flags.gpus]:
        speed = model.tokens_per_second(placement, flags.requests, flags.context, flags.cache)
        if speed is None:
            print(f"{placement.name:20}{'-':>10}  holds "
                  f"{placement.capacity(flags.context, flags.cache)} requests")
            continue
        step = model.step(placement, math.ceil(flags.requests / placement.replicas), flags.context,
                          flags.cache)
        parts = ", ".join(f"{part} {getattr(step, part) / 1000:.2f}" for part in Step.PARTS)
        print(f"{placement.name:20}{speed:>10,.0f}{step.us / 1000:>9.2f}  {parts}")


if __name__ == "__main__":
    main()
