"""The runs of a GPU report (gpu_report.py) by group."""

import typing

V2_LITE, V2_LITE_FP8 = "bench/models/v2-lite", "bench/models/v2-lite-fp8"
V2_LITE_MTP = "bench/models/v2-lite-mtp"
AZURE = "AZURE"  # stands for --azure's file
V3, V3_SLICE = "bench/models/v3-10-layers", "bench/models/v3-10-layers-eighth"
V3_MTP = "bench/models/v3-10-layers-mtp"
V3_SLICE_MTP = "bench/models/v3-10-layers-eighth-mtp"
V3_HALF = "bench/models/v3-40-layers-half"  # four ranks are TP8 slices of V3
KIMI_K2 = "bench/models/kimi-k2-int4-4-layers"
V3_WHOLE, CODER_V2 = "bench/models/v3", "bench/models/coder-v2-instruct-fp8"


class Group(typing.NamedTuple):
    """Runs that are measured together."""
    seconds: int  # for one run of it on H200s, with room: --budget reserves them
    runs: list    # each a name and the arguments of fathom, or a benchmark with its arguments
    gpus: int = 1


def devices(count):
    return ",".join(f"cuda:{number}" for number in range(count))


def latency(model, batch, tokens_in, tokens_out, *more, iters=5, gpus=1):
    return ["bench", "latency", model, "--device", devices(gpus), "--load-format", "dummy",
            "--batch-size", str(batch), "--input-len", str(tokens_in), "--output-len",
            str(tokens_out), "--num-iters", str(iters), "--num-iters-warmup", "1", "--quiet",
            "--json", *more]


def throughput(model, *more, gpus=1):
    return ["bench", "throughput", model, "--device", devices(gpus), "--load-format", "dummy",
            "--max-num-seqs", "1024", "--quiet", "--json", *more]


ZIPF = ["--routing", "zipf"]
TP2, DP2, TP8, DP8 = ["--tp", "2"], ["--dp", "2"], ["--tp", "8"], ["--dp", "8"]
EP = ["--enable-expert-parallel"]

GROUPS = {
    "v2_lite": Group(40, [
        ("v2_lite/b1", latency(V2_LITE, 1, 1024, 128)),
        ("v2_lite/b64", latency(V2_LITE, 64, 1024, 128)),
        ("v2_lite/b512", latency(V2_LITE, 512, 500, 128, "--max-num-seqs", "512", iters=2)),
        ("v2_lite/prefill_8x1024", latency(V2_LITE, 8, 1024, 1)),
        ("v2_lite/prefill_1x8192", latency(V2_LITE, 1, 8192, 1)),
    ]),
    "v2_lite_forms": Group(30, [
        ("v2_lite/b1_no_graphs", latency(V2_LITE, 1, 1024, 128, "--no-cuda-graphs")),
        ("v2_lite/b1_deterministic", latency(V2_LITE, 1, 1024, 128, "--deterministic")),
        ("v2_lite/prefill_8x1024_deterministic", latency(V2_LITE, 8, 1024, 1, "--deterministic")),
        ("v2_lite/prefill_1x8192_deterministic", latency(V2_LITE, 1, 8192, 1, "--deterministic")),
        ("v2_lite/b512_fp8_cache", latency(V2_LITE, 512, 500, 128, "--max-num-seqs", "512",
                                           "--kv-cache-dtype", "fp8", iters=2)),
    ]),
    "v2_lite_fp8": Group(20, [
        ("v2_lite_fp8/b1", latency(V2_LITE_FP8, 1, 1024, 128)),
        ("v2_lite_fp8/b64", latency(V2_LITE_FP8, 64, 1024, 128)),
        ("v2_lite_fp8/prefill_8x1024", latency(V2_LITE_FP8, 8, 1024, 1)),
    ]),
    "throughput": Group(35, [
        ("v2_lite/5000_220_200", throughput(V2_LITE, "--num-prompts", "5000", "--input-len", "220",
                                            "--output-len", "200")),
    ]),
    "azure": Group(170, [
        (f"{name}/azure_5000", throughput(
            model, "--dataset-name", "azure", "--dataset-path", AZURE, "--num-prompts", "5000"))
        for name, model in (("v2_lite", V2_LITE), ("v2_lite_fp8", V2_LITE_FP8))
    ]),
    "v3_layers": Group(60, [("v3", ["layer_cuda_bench", V3])]),
    "kimi_k2_layers": Group(90, [("kimi_k2", ["layer_cuda_bench", KIMI_K2])]),
    "v3_slice": Group(20, [("v3_slice", ["layer_cuda_bench", V3_SLICE])]),
    "attention_forms": Group(30, [("attention_forms", ["attention_form_cuda_bench", V2_LITE])]),
    "slice_of_ranks": Group(10, [("slice_of_ranks", ["decode_layers_ranks_cuda_bench"])]),
    "decode_steps": Group(10, [("decode_steps", ["decode_step_cuda_bench", V2_LITE])]),
    "mtp_steps": Group(90, [
        ("mtp_steps", ["mtp_step_cuda_bench", V2_LITE_MTP]),
        ("mtp_steps_v3", ["mtp_step_cuda_bench", V3_MTP]),
        ("mtp_steps_v3_slice", ["mtp_step_cuda_bench", V3_SLICE_MTP]),
    ]),
    "sparse_attention": Group(80, [
        ("indexer", ["indexer_cuda_bench"]),
        ("sparse_latent", ["sparse_latent_cuda_bench"]),
        ("sparse_layers", ["sparse_layers_cuda_bench"]),
    ]),
    "ablations": Group(10, [("latent_decode", ["latent_decode_cuda_bench"])]),
    "loading": Group(30, [("loading", ["weights_cuda_bench", V2_LITE, "--layers", "5", "--threads",
                                  "8,4,12"])]),
    "kernels": Group(110, [
        ("mha_prefill", ["mha_prefill_cuda_bench"]),
        ("few_rows", ["few_rows_cuda_bench"]),
        ("many_rows", ["many_rows_cuda_bench"]),
        ("scaled_linear", ["scaled_linear_cuda_bench"]),
        ("scaled_absorb", ["scaled_absorb_cuda_bench"]),
        ("moe_few_rows", ["moe_few_rows_cuda_bench"]),
        ("moe_many_rows", ["moe_many_rows_cuda_bench"]),
        ("scaled_moe_few_rows", ["scaled_moe_few_rows_cuda_bench"]),
        ("scaled_moe_many_rows", ["scaled_moe_many_rows_cuda_bench"]),
        ("four_bit_moe", ["four_bit_moe_cuda_bench"]),
        ("norms", ["rms_norm_cuda_bench"]),
        ("peer_sum", ["peer_sum_cuda_bench"]),
        ("expert_exchange", ["moe_over_ranks_cuda_bench"]),
        ("gate", ["gate_cuda_bench"]),
        ("sampling", ["sample_cuda_bench"]),
    ]),
    # The MoE rows of `kernels` and of the collectives with drawn experts, drawn from a Zipf
    # distribution: NAME_zipf/KEYS beside NAME/KEYS.
    "kernels_zipf": Group(45, [
        (f"{name}_zipf", [f"{name}_cuda_bench", *ZIPF])
        for name in ("moe_few_rows", "moe_many_rows", "scaled_moe_few_rows", "scaled_moe_many_rows",
                     "four_bit_moe")
    ] + [("expert_exchange_zipf", ["moe_over_ranks_cuda_bench", *ZIPF])]),
    # Ranks on GPUs that NVLink joins. Rows are named GROUP/WORK_PLACEMENT.
    **{f"v2_lite_{n}gpus": Group(100, [
        (f"v2_lite_{n}gpus/b1_tp{n}", latency(V2_LITE, 1, 1024, 128, "--tp", str(n), gpus=n)),
        (f"v2_lite_{n}gpus/b64_tp{n}", latency(V2_LITE, 64, 1024, 128, "--tp", str(n), gpus=n)),
        (f"v2_lite_{n}gpus/b64_dp{n}", latency(V2_LITE, 64, 1024, 128, "--dp", str(n), gpus=n)),
        (f"v2_lite_{n}gpus/b64_dp{n}_ep", latency(V2_LITE, 64, 1024, 128, "--dp", str(n), *EP,
                                                  gpus=n)),
        (f"v2_lite_{n}gpus/prefill_8x1024_dp{n}", latency(V2_LITE, 8, 1024, 1, "--dp", str(n),
                                                          gpus=n)),
        (f"v2_lite_{n}gpus/prefill_8x1024_dp{n}_ep", latency(V2_LITE, 8, 1024, 1, "--dp", str(n),
                                                             *EP, gpus=n)),
        # Lanes full of prompts: a layer's rows are exchanged in n rounds.
        *((f"v2_lite_{n}gpus/prefill_{8 * n}x1024_dp{n}_ep{name}", latency(
            V2_LITE, 8 * n, 1024, 1, "--dp", str(n), *EP, *flags, gpus=n))
          for name, flags in (("", []), ("_overlap", ["--overlap-expert-exchange"]))),
    ], gpus=n) for n in (2, 4)},
    "v3_10_layers_2gpus": Group(150, [
        ("v3_10_layers_2gpus/b1_tp2", latency(V3, 1, 1024, 64, *TP2, gpus=2, iters=2)),
        ("v3_10_layers_2gpus/b16_tp2", latency(V3, 16, 1024, 64, *TP2, gpus=2, iters=2)),
        ("v3_10_layers_2gpus/b16_dp2_ep", latency(V3, 16, 1024, 64, *DP2, *EP, gpus=2, iters=2)),
        ("v3_10_layers_2gpus/b128_tp2", latency(V3, 128, 1024, 64, *TP2, gpus=2, iters=2)),
        ("v3_10_layers_2gpus/b128_dp2_ep", latency(V3, 128, 1024, 64, *DP2, *EP, gpus=2, iters=2)),
    ], gpus=2),
    # A layer of V3's TP8 slice with its sums: the difference of 34 layers' step and 10 layers', over 24.
    "v3_slice_4gpus": Group(90, [
        (f"v3_slice_4gpus/b{batch}_{layers}_layers",
         latency(V3_HALF, batch, 1024, 64, "--tp", "4", "--num-hidden-layers", str(layers), gpus=4,
                 iters=2))
        for batch in (1, 16, 128) for layers in (10, 34)], gpus=4),
    "v3_8gpus_tp": Group(180, [
        ("v3_8gpus/b1_tp8", latency(V3_WHOLE, 1, 1024, 64, *TP8, gpus=8, iters=1)),
        ("v3_8gpus/b16_tp8", latency(V3_WHOLE, 16, 1024, 64, *TP8, gpus=8, iters=1)),
        ("v3_8gpus/b128_tp8", latency(V3_WHOLE, 128, 1024, 64, *TP8, gpus=8, iters=1)),
    ], gpus=8),
    "v3_8gpus_ep": Group(180, [
        ("v3_8gpus/b16_dp8_ep", latency(V3_WHOLE, 16, 1024, 64, *DP8, *EP, gpus=8, iters=1)),
        ("v3_8gpus/b128_dp8_ep", latency(V3_WHOLE, 128, 1024, 64, *DP8, *EP, gpus=8, iters=1)),
        ("v3_8gpus/b1024_dp8_ep", latency(V3_WHOLE, 1024, 1024, 64, "--max-num-seqs", "1024", *DP8,
                                          *EP, gpus=8, iters=1)),
        ("v3_8gpus/b128_tp2_dp4_ep", latency(V3_WHOLE, 128, 1024, 64, "--tp", "2", "--dp", "4", *EP,
                                             gpus=8, iters=1)),
    ], gpus=8),
    "v3_8gpus_throughput": Group(170, [
        ("v3_8gpus/1000_220_200_dp8_ep", throughput(
            V3_WHOLE, "--num-prompts", "1000", "--input-len", "220", "--output-len", "200", *DP8,
            *EP, gpus=8)),
    ], gpus=8),
    "coder_v2_8gpus": Group(170, [
        (f"coder_v2_8gpus/2000_1024_256_{name}", throughput(
            CODER_V2, "--num-prompts", "2000", "--input-len", "1024", "--output-len", "256",
            "--kv-cache-dtype", "fp8_e5m2", *flags, gpus=8))
        for name, flags in (("tp8", TP8), ("dp8", DP8), ("dp8_ep", [*DP8, *EP]))
    ], gpus=8),
    **{f"collectives_{n}gpus": Group(40, [
        (f"peer_sum_{n}gpus", ["peer_sum_cuda_bench"]),
        (f"expert_exchange_{n}gpus", ["moe_over_ranks_cuda_bench"]),
        (f"expert_exchange_{n}gpus_zipf", ["moe_over_ranks_cuda_bench", *ZIPF]),
    ], gpus=n) for n in (2, 4, 8)},
}
