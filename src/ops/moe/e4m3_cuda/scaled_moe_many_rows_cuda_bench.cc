// The mixture of experts in e4m3 for many tokens on the GPU: time of all its launches, three
// repetitions in a CUDA graph; median of 11 replays. TFLOP/s count the tokens' routed experts
// alone, TB/s the experts' weights once. With balanced experts also each of the two grouped GEMMs
// alone, in graphs of 12 over three different sets of weights.
//
//   scaled_moe_many_rows_cuda_bench [--json] [--only NAME] [--rows ROWS] [--routing uniform|zipf]
//                                   [--parts]
//
// --routing zipf: the shapes with drawn experts, drawn so (expert_draw.h).
// --parts: the launches one by one, of all shapes, each in a graph of three. With "V3, even", whose
// experts have equally many tokens, they show what the last tokens of an expert cost.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "device/cuda/error.h"
#include "device/cuda/graph_timer.h"
#include "ops/moe/bf16_cuda/moe_problem_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_problem_cuda.h"
#include "ops/moe/expert_draw.h"

namespace fathom::cuda {
namespace {

struct Run {
  const char* name;
  MoeShape shape;
  bool balanced;
  std::vector<int32_t> rows;
};

constexpr MoeShape v3(int32_t experts, int32_t inter, int32_t shared_inter) {
  return {.hidden = 7168,
          .num_experts = experts,
          .experts_per_token = 8,
          .inter = inter,
          .shared_inter = shared_inter};
}

struct Parts {
  double sort_and_gather = 0, gate_up = 0, down = 0, combine = 0;  // us
};

// Each launch in a graph of `copies`, over `sets` sets of weights in turn.
Parts time_parts(const MoeShape& shape, int32_t rows, const std::vector<int32_t>& ids,
                 uint32_t sets, int copies) {
  std::vector<ScaledMoeProblem> problems;
  for (uint32_t seed = 1; seed <= sets; ++seed) problems.emplace_back(shape, rows, ids, seed);
  const DeviceArray<int32_t> tiles_taken(2 * static_cast<size_t>(copies));
  const auto time = [&](ScaledMoeLaunches launches) {
    return time_in_graph(copies, [&](int copy, cudaStream_t stream) {
      if (copy == 0) {
        check(cudaMemsetAsync(tiles_taken.data(), 0, tiles_taken.bytes(), stream), "clearing");
      }
      launches.tiles_taken = tiles_taken.data() + 2 * copy;
      const ScaledMoeProblem& problem = problems[static_cast<size_t>(copy) % sets];
      scaled_moe_many_rows(problem.arguments(DType::kBF16), stream, launches);
    });
  };
  for (const ScaledMoeProblem& problem : problems) {
    scaled_moe_many_rows(problem.arguments(DType::kBF16), nullptr,
                         {.down = false, .combine = false});
  }
  check(cudaDeviceSynchronize(), "synchronize");
  // In this order: down overwrites what gate and up read.
  Parts parts;
  parts.sort_and_gather = time({.gate_up = false, .down = false, .combine = false});
  parts.gate_up = time({.sort_and_gather = false, .down = false, .combine = false});
  parts.down = time({.sort_and_gather = false, .gate_up = false, .combine = false});
  parts.combine = time({.sort_and_gather = false, .gate_up = false, .down = false});
  return parts;
}

int run(bool json, const std::string& only, int only_rows, Routing routing, bool by_part) {
  const Run runs[] = {
      // The shapes of the DeepGEMM grouped GEMM measurements: 4, 20, 64, 192 rows an expert, or 1.
      {"V3, 32 experts", v3(32, 2048, 0), true, {16, 80, 256, 512, 768}},
      {"V3, an eighth, 32 experts", v3(32, 256, 0), true, {16, 80, 256, 768}},
      {"V3", v3(256, 2048, 2048), false, {32, 64, 128, 256, 1024, 4096, 16384}},
      {"V3, even", v3(256, 2048, 2048), true, {4096, 4608, 5120, 6144}},
      {"V3, an eighth", v3(256, 256, 256), false, {64, 128, 1024, 4096}},
      {"V3, dense",
       {.hidden = 7168, .num_experts = 1, .experts_per_token = 1, .inter = 18432},
       true,
       {65, 128, 256, 512, 1024, 4096}},
      {"V2-Lite",
       {.hidden = 2048,
        .num_experts = 64,
        .experts_per_token = 6,
        .inter = 1408,
        .shared_inter = 2816},
       false,
       {128, 512, 2048, 8192}},
  };
  std::printf(json ? "{\"device\": \"%s\", \"results\": [" : "%s\n", device_line().c_str());
  if (!json) std::printf("%-26s tokens rows/expert        us TFLOP/s  TB/s  products\n", "model");
  const char* separator = "";
  for (const Run& r : runs) {
    if (!only.empty() && only != r.name) continue;
    const bool is_even_v3 = r.balanced && r.shape.shared_inter > 0;
    if (is_even_v3 && !by_part) continue;
    if (routing == Routing::kZipf && r.balanced) continue;
    const MoeShape& s = r.shape;
    for (const int32_t rows : r.rows) {
      if (only_rows > 0 && rows != only_rows) continue;
      const auto ids = draw_experts(r.balanced ? Routing::kEven : routing, s.num_experts,
                                    s.experts_per_token, rows, 5);
      const ScaledMoeProblem problem(s, rows, ids, 1);
      const ScaledMoeArguments arguments = problem.arguments(DType::kBF16);
      const double us = time_in_graph(
          3, [&](int, cudaStream_t stream) { scaled_moe_many_rows(arguments, stream); });
      const double tflops = problem.flop() / us / 1e6;
      const double tbs =
          3.0 * s.hidden * (double{1} * s.num_experts * s.inter + s.shared_inter) / us / 1e6;
      const int rows_an_expert = rows * s.experts_per_token / s.num_experts;
      const bool by_product = r.balanced && s.num_experts > 1;
      Parts parts;
      if (by_part) {
        parts = time_parts(s, rows, ids, 1, 3);
      } else if (by_product) {
        parts = time_parts(s, rows, ids, 3, 12);
      }
      if (json) {
        std::printf(
            "%s\n  {\"model\": \"%s\", \"tokens\": %d, \"us\": %.2f, \"tflops\": %.1f, "
            "\"weights_tb_s\": %.2f",
            separator, r.name, rows, us, tflops, tbs);
        if (by_part) {
          std::printf(", \"sort_and_gather_us\": %.2f, \"combine_us\": %.2f", parts.sort_and_gather,
                      parts.combine);
        }
        if (by_part || by_product) {
          std::printf(", \"gate_up_us\": %.2f, \"down_us\": %.2f", parts.gate_up, parts.down);
        }
        std::printf("}");
        separator = ",";
      } else {
        std::printf("%-26s %6d %11d %9.1f %7.0f %5.2f", r.name, rows, rows_an_expert, us, tflops,
                    tbs);
        if (by_part || by_product) std::printf("  %.1f + %.1f", parts.gate_up, parts.down);
        if (by_part) std::printf(", around %.1f + %.1f", parts.sort_and_gather, parts.combine);
        std::printf("\n");
      }
      std::fflush(stdout);
    }
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  bool json = false, by_part = false;
  std::string only;
  int rows = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) json = true;
    if (std::strcmp(argv[i], "--parts") == 0) by_part = true;
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    if (std::strcmp(argv[i], "--rows") == 0 && i + 1 < argc) rows = std::atoi(argv[++i]);
  }
  return fathom::cuda::run(json, only, rows, fathom::routing_flag(argc, argv), by_part);
}
