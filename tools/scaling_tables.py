"""The tables of docs/scaling.md, made by the model of scaling.py. make_tables.py writes them."""

import functools
import math

import scaling
from scaling import Model, Network, PLACEMENTS

TP8, DP8, DP64 = scaling.ON_8[0], scaling.ON_8[-1], scaling.ON_64[-1]
REQUESTS = {
    8: (1, 4, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 4096, 6144),
    16: (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144),
    64: (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 24576)
}
MARGIN = 1.02  # a placement takes over when it is this much faster: less is a tie
PART_NAMES = {
    "experts": "experts",
    "attention": "attention over the cache",
    "projections": "projections, norms, router",
    "latency": "collectives' latency",
    "bytes": "collectives' bytes",
    "rest": "dense layers, head"
}


@functools.lru_cache(maxsize=None)
def model(root):
    return Model(scaling.Measured(root))


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def keys(context):
    return f"{context // 1024}K"


def grid(limit):
    """Numbers of requests: all up to 64, then some 3 % apart."""
    count = 1
    while count <= limit:
        yield count
        count += max(1, count // 32)


def bound(step):
    """The largest part of a step, in words."""
    part = max(step.PARTS, key=lambda name: getattr(step, name))
    if part == "experts":
        return "expert weights" if step.rows_an_expert <= 64 else "expert GEMMs"
    return PART_NAMES[part]


def segments(of, gpus, context, cache="fp8"):
    """[[first, last, placement]]: which placement is fastest for how many requests; those that its
    cache does not hold wait."""
    placements, found = PLACEMENTS[gpus], []
    for requests in grid(max(placement.capacity(context, cache) for placement in placements)):
        speeds = {
            placement: of.with_queue(placement, requests, context, cache)
            for placement in placements
        }
        best = max(speeds, key=speeds.get)
        if found and speeds[best] < MARGIN * speeds[found[-1][2]]:
            best = found[-1][2]
        if not found or found[-1][2] != best:
            if found:
                found[-1][1] = requests - 1
            found.append([requests, requests, best])
    found[-1][1] = found[-1][2].capacity(context, cache)
    return found


def choice(root):
    rows, of = [], model(root)
    for gpus in PLACEMENTS:
        for context in (1024, 4096):
            for first, last, placement in segments(of, gpus, context):
                speeds = [
                    of.tokens_per_second(placement, count, context) for count in (first, last)
                ]
                each = math.ceil(last / placement.replicas)
                rows.append([
                    gpus, keys(context), f"{first:,} to {last:,}", placement.name,
                    f"`{placement.flags}`",
                    f"{speeds[0]:,.0f} to {speeds[1]:,.0f}",
                    f"{speeds[0] / first:.0f} to {speeds[1] / last:.0f}",
                    bound(of.step(placement, each, context))
                ])
    return table([
        "H200", "context", "requests at once", "placement", "flags of one engine", "tokens/s, all",
        "tokens/s, each request", "largest part at the end"
    ], rows)


def targets(root):
    rows, of = [], model(root)
    for speed in (150, 100, 75, 50, 33, 25, 20, 15):
        row = [speed]
        for gpus, placements in PLACEMENTS.items():
            best = None
            for placement in placements:
                for requests in grid(placement.capacity(4096, "fp8")):
                    got = of.tokens_per_second(placement, requests, 4096)
                    if got / requests >= speed and (not best or got > best[0]):
                        best = got, requests, placement
            if best:
                row += [f"{best[2].name}, {best[1]:,}", f"{best[0] / gpus:,.0f}"]
            else:
                row += ["–", "–"]
        rows.append(row)
    head = ["tokens/s, each request"]
    for gpus in PLACEMENTS:
        head += [f"{gpus} H200: placement, requests", "tokens/s a GPU"]
    return table(head, rows)


def speeds(gpus, context, root):
    of, rows = model(root), []
    for requests in REQUESTS[gpus]:
        got = [of.tokens_per_second(placement, requests, context) for placement in PLACEMENTS[gpus]]
        if not any(got):
            break
        best = max(speed or 0 for speed in got)
        cells = [
            "–" if speed is None else f"**{speed:,.0f}**" if speed == best else f"{speed:,.0f}"
            for speed in got
        ]
        rows.append([f"{requests:,}", *cells, f"{1000 * requests / best:.1f}"])
    return table(["requests at once"] + [placement.name for placement in PLACEMENTS[gpus]]
                 + ["fastest, ms a token"], rows)


def parts(root):
    of, rows = model(root), []
    tp16, dp16 = scaling.ON_16[2], scaling.ON_16[4]
    works = [(TP8, 1, 1024), (TP8, 16, 4096), (TP8, 128, 4096), (TP8, 1024, 1024), (DP8, 8, 4096),
             (DP8, 128, 4096), (DP8, 1024, 1024), (DP8, 1024, 4096), (DP8, 1600, 4096),
             (tp16, 1, 4096), (dp16, 256, 4096), (dp16, 2048, 4096), (scaling.ON_64[3], 512, 4096),
             (DP64, 1024, 4096), (DP64, 8192, 4096)]
    for placement, requests, context in works:
        step = of.step(placement, requests, context)
        rows.append([
            f"{placement.name}, {requests:,} x {keys(context)}", f"{step.us / 1000:.1f}",
            *(f"{100 * getattr(step, part) / step.us:.0f}" for part in step.PARTS),
            f"{step.rows_an_expert:.2g}" if step.rows_an_expert < 10 else
            f"{step.rows_an_expert:.0f}", bound(step)
        ])
    return table([
        "placement, requests x context", "ms a step",
        *(f"{name}, %" for name in PART_NAMES.values()), "tokens an expert", "bound by"
    ], rows)


def memory(root):
    del root
    rows = []
    for placement in (*scaling.ON_8,
                      *(each for each in (*scaling.ON_16, *scaling.ON_64) if each.replicas == 1)):
        rows.append([
            placement.name, placement.gpus, f"{placement.weight_bytes() / 1e9:.1f}",
            *(f"{placement.capacity(context, cache):,}" for cache in ("fp8", "bf16")
              for context in (1024, 4096, 32768))
        ])
    return table([
        "placement", "H200", "weights a GPU, GB",
        *(f"{cache}, {context}" for cache in ("fp8", "bf16") for context in ("1K", "4K", "32K"))
    ], rows)


def calibration(root):
    measured, rows = model(root).measured, []
    for width, name in ((1, "whole layer"), (8, "TP8 slice")):
        for count in scaling.MEASURED_BATCHES:
            layer = measured.layer_of_launches(width, count)
            total = measured.kernels(width, count)
            rows.append([
                f"{name}, batch {count}", f"{total:.0f}", f"{layer:.0f}", f"{layer / total:.2f}",
                f"{measured.rest(1 / width, count):.0f}"
            ])
    return table([
        "1K context", "sum of kernels, us", "measured layer, us", "factor", "rest of the step, us"
    ], rows)


def experts(root):
    measured, rows = model(root).measured, []
    rows.append(["launches of a layer's experts", f"{measured.launch:.1f}"])
    for count in (1, 20, 64, 192):
        rows.append([
            f"one touched expert with {count} row{'s' * (count > 1)}",
            f"{measured.expert(count):.2f}"
        ])
    return table(["experts by rank", "us"], rows)


def routed(root):
    del root
    rows = []
    for tokens in scaling.ROUTED_TOKENS:
        row = [f"{tokens:,}"]
        for world in (8, 16, 64):
            touched, count = scaling.busiest(world, tokens)
            row += [f"{touched:.1f} of {256 // world}", f"{count / (8 * tokens / world):.2f}"]
        rows.append(row)
    head = ["tokens in the step"]
    for world in (8, 16, 64):
        head += [f"{world} GPUs: touched experts", "rows / mean"]
    return table(head, rows)


def figures(which, root):
    del root
    return table(["what", "value", "source" if which is scaling.REFERENCED else "why"],
                 [[figure.what, f"{figure.value:,g} {figure.unit}".strip(), figure.source]
                  for figure in which.values()])


def collectives(root):
    del root
    rows = [["all-reduce, 8 H200", f"{size / 1000:,.0f} KB", f"{us:g}",
             "own probe, one-shot kernel" if size < 3e5 else "own probe, NCCL"]
            for size, us in scaling.ALL_REDUCE_8]
    rows += [[f"dispatch and combine, {ranks} H800 over InfiniBand",
              f"{scaling.DEEPEP_TOKENS} tokens a GPU", f"{sent} + {back}",
              "DeepEP V1, low latency, deepseek-ai/DeepEP, docs/legacy.md"]
             for ranks, (sent, back) in scaling.DEEPEP_US.items()]
    return table(["collective", "size", "us", "source"], rows)


def first_lanes(of, cache):
    """Requests from which a placement with lanes beats tp 8 by the margin, 8 GPUs, 4K."""
    lanes = [placement for placement in scaling.ON_8 if placement.dp > 1]
    for requests in grid(TP8.capacity(4096, cache)):
        if (max(of.tokens_per_second(placement, requests, 4096, cache) for placement in lanes)
                > MARGIN * of.tokens_per_second(TP8, requests, 4096, cache)):
            return f"{requests:,}"
    return "none"


def last_of(of, placement, cache):
    """Requests of 4K up to which this placement is the fastest of its GPUs."""
    lasts = [
        last for _, last, best in segments(of, placement.gpus, 4096, cache) if best == placement
    ]
    return f"{lasts[-1]:,}" if lasts else "none"


def sensitivity(root):
    measured, rows = model(root).measured, []

    def case(name, cache="fp8", skew=1.0, launches=False, **network):
        return name, cache, Model(measured, Network(**network), skew, launches)

    for name, cache, of in (
            case("as in the tables"),
            case("smallest all-reduce 24.7 us (NCCL) instead of 4.75", all_reduce_us=24.7),
            case("no persistent kernel for few tokens", launches=True),
            case("one row a GPU comes back in a node, not one an expert", return_a_rank=True),
            case("busiest GPU has 1.5 times the drawn rows", skew=1.5),
            case("InfiniBand hop 10 us instead of 20", hop_us=10),
            case("InfiniBand hop 40 us", hop_us=40),
            case("one copy a token and node over InfiniBand", copy_a_node=True),
            case("all bytes of exchanges hidden behind computation", hidden=1.0),
            case("bf16 cache", cache="bf16")):
        at_6144 = {placement: speed for placement in scaling.ON_64
                   if (speed := of.tokens_per_second(placement, 6144, 4096, cache))}
        rows.append([
            name, f"{of.tokens_per_second(TP8, 1, 1024, cache):,.0f}", first_lanes(of, cache),
            last_of(of, scaling.ON_16[-1], cache),
            f"{of.tokens_per_second(DP8, 768, 4096, cache):,.0f}", f"{at_6144[DP64]:,.0f}",
            max(at_6144, key=at_6144.get).name
        ])
    return table([
        "changed", "tp 8, one request, 1K, tokens/s", "8 H200, 4K: lanes win from requests",
        "16 H200, 4K: dp 16, ep wins to requests", "dp 8, ep, 768 x 4K, tokens/s",
        "dp 64, ep, 6,144 x 4K, tokens/s", "fastest of 64, 6,144 x 4K"
    ], rows)


def drafts(root):
    """What 1 to 3 drafts of the MTP layer give, in the placement that is fastest without."""
    of, rows = model(root), []
    for context in (1024, 4096):
        for requests in (1, 16, 128):
            placement = max(scaling.ON_8,
                            key=lambda each: of.tokens_per_second(each, requests, context) or 0)
            plain = of.step(placement, requests, context).us
            cells = []
            for count in (1, 2, 3):
                cost = of.drafting_step(placement, requests, context, count) / plain
                gains = [sum(share**i for i in range(count + 1)) / cost for share in (0.85, 0.7)]
                cells.append(f"{cost:.2f}: {gains[0]:.2f}, {gains[1]:.2f}")
            rows.append([requests, keys(context), placement.name, f"{plain / 1000:.2f}", *cells])
    return table(["requests", "context", "placement", "step without, ms"]
                 + [f"k = {count}: step, gain" for count in (1, 2, 3)], rows)


def prefill(root):
    of = model(root)
    return table(["placement", "prompt tokens/s"],
                 [[placement.name, f"{of.prefill(placement):,.0f}"] for placement in (TP8, DP8)])


def anchors(root):
    of, rows = model(root), []

    def ms(who, machine, placement, requests, context, published):
        computed = of.step(placement, requests, context).us / 1000
        rows.append([
            who, machine, placement.name, f"{requests:,} x {context:,}",
            f"{published:g} ms a token", f"{computed:.1f}", f"{published / computed:.2f}"
        ])

    def rate(who, machine, placement, requests, context, published, computed, unit):
        rows.append([
            who, machine, placement.name, f"{requests:,} x {context:,}", f"{published:,} {unit}",
            f"{computed:,.0f}", f"{computed / published:.2f}"
        ])

    ep8 = scaling.ON_8[1]
    ms("SGLang 0.4.1, V3, 37 tokens/s", "8 H200", TP8, 1, 1024, 27)
    ms("TensorRT-LLM 0.21, R1, 1,600 in, 600 out (NVIDIA/TensorRT-LLM#5929)", "8 H200", TP8, 1,
       1900, 13.78)
    ms("the same, EP 8", "8 H200", ep8, 1, 1900, 11.0)
    ms("the same, TP 8", "8 H200", TP8, 8, 1900, 18.18)
    ms("the same, EP 8", "8 H200", ep8, 8, 1900, 16.42)
    ms("SGLang 0.5.7, R1, random 1K in, 8K out", "8 H200", TP8, 4, 5120, 10.9)
    for requests, published in ((8, 12.8), (16, 17.2), (32, 25.6), (64, 34.6)):
        ms("SGLang 0.5.7, R1, 1K in, 1K out", "8 H200", TP8, requests, 1536, published)
    ms("SGLang, R1-0528, 1K in (tenstorrent/tt-inference-server#356)", "16 H100, InfiniBand",
       scaling.ON_16[2], 1, 1088, 23.2)
    decode, prompts = of.tokens_per_second(DP8, 1024, 2048), of.prefill(DP8)
    rate("TensorRT-LLM, R1, attention data parallel, 1K in, 2K out, whole runs", "8 H200", DP8,
         1024, 2048, 11489, 1 / (1 / decode + 0.5 / prompts), "output tokens/s")
    hidden = Model(of.measured, Network(hidden=1.0))
    for way, how in ((of, ""), (hidden, "; exchanges hidden")):
        rate("SGLang, R1, EP 72 for decode, 2K in, about 100 ms a token (LMSYS, 2025-05-05)" + how,
             "72 H100, InfiniBand", DP64, 64 * 256, 2048, 2788,
             way.tokens_per_second(DP64, 64 * 256, 2048) / 64, "tokens/s a GPU")
    for way, how in ((of, ""), (hidden, "; exchanges hidden")):
        requests = max(count for count in grid(64 * 512)
                       if way.tokens_per_second(DP64, count, 4989) / count >= 21)
        rate(
            "DeepSeek's service, EP 144, 4,989 cached on average, 20 to 22 tokens/s each "
            "(deepseek-ai/open-infra-index, day 6)" + how, "144 H800, InfiniBand", DP64, requests,
            4989, 1850, way.tokens_per_second(DP64, requests, 4989) / 64, "tokens/s a GPU")
    rate("V3, 8 prompts of 1,024 ([performance](performance.md))", "8 H200", TP8, 8, 1024, 29700,
         of.prefill(TP8), "prompt tokens/s")
    return table([
        "published by", "machine", "computed for", "requests x context", "published", "computed",
        "computed speed / published"
    ], rows)


TABLES = {
    "scaling_choice": choice,
    "scaling_targets": targets,
    **{
        f"scaling_{gpus}_{keys(context).lower()}": functools.partial(speeds, gpus, context)
        for gpus in PLACEMENTS
        for context in (1024, 4096)
    },
    "scaling_parts": parts,
    "scaling_memory": memory,
    "scaling_drafts": drafts,
    "scaling_prefill": prefill,
    "scaling_anchors": anchors,
    "scaling_sensitivity": sensitivity,
    "scaling_calibration": calibration,
    "scaling_experts": experts,
    "scaling_routing": routed,
    "scaling_referenced": functools.partial(figures, scaling.REFERENCED),
    "scaling_collectives": collectives,
    "scaling_assumed": functools.partial(figures, scaling.ASSUMED),
}
