// The mixture of experts in e4m3 for many tokens on the GPU: time of all its launches, three
// repetitions in a CUDA graph; median of 11 replays. TFLOP/s count the tokens' routed experts
// alone, TB/s the experts' weights once. With balanced experts also each of the two grouped GEMMs
// alone, in graphs of 12 over three different sets of weights.
//
//   scaled_moe_many_rows_cuda_bench [--json] [--only NAME] [--rows ROWS] [--routing uniform|zipf]
//
// --routing zipf: the shapes with drawn experts, drawn so (expert_draw.h).
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

struct Products {
  double gate_up, down;  // us
};

Products time_products(const MoeShape& shape, int32_t rows) {
  const auto ids = balanced_experts(shape, rows);
  std::vector<ScaledMoeProblem> problems;
  for (uint32_t seed = 1; seed <= 3; ++seed) problems.emplace_back(shape, rows, ids, seed);
  constexpr int kCopies = 12;
  const DeviceArray<int32_t> tiles_taken(2 * kCopies);
  const auto time = [&](ScaledMoeLaunches launches) {
    return time_in_graph(kCopies, [&](int copy, cudaStream_t stream) {
      if (copy == 0) {
        check(cudaMemsetAsync(tiles_taken.data(), 0, tiles_taken.bytes(), stream), "clearing");
      }
      launches.tiles_taken = tiles_taken.data() + 2 * copy;
      scaled_moe_many_rows(problems[static_cast<size_t>(copy % 3)].arguments(DType::kBF16), stream,
                           launches);
    });
  };
  for (const ScaledMoeProblem& problem : problems) {
    scaled_moe_many_rows(problem.arguments(DType::kBF16), nullptr,
                         {.down = false, .combine = false});
  }
  check(cudaDeviceSynchronize(), "synchronize");
  return {.gate_up = time({.sort_and_gather = false, .down = false, .combine = false}),
          .down = time({.sort_and_gather = false, .gate_up = false, .combine = false})};
}

int run(bool json, const std::string& only, int only_rows, Routing routing) {
  const Run runs[] = {
      // The shapes of the DeepGEMM grouped GEMM measurements: 4, 20, 64, 192 rows an expert, or 1.
      {"V3, 32 experts", v3(32, 2048, 0), true, {16, 80, 256, 512, 768}},
      {"V3, an eighth, 32 experts", v3(32, 256, 0), true, {16, 80, 256, 768}},
      {"V3", v3(256, 2048, 2048), false, {32, 64, 128, 256, 1024, 4096, 16384}},
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
      const Products products = by_product ? time_products(s, rows) : Products{};
      if (json) {
        std::printf(
            "%s\n  {\"model\": \"%s\", \"tokens\": %d, \"us\": %.2f, \"tflops\": %.1f, "
            "\"weights_tb_s\": %.2f",
            separator, r.name, rows, us, tflops, tbs);
        if (by_product) {
          std::printf(", \"gate_up_us\": %.2f, \"down_us\": %.2f", products.gate_up, products.down);
        }
        std::printf("}");
        separator = ",";
      } else {
        std::printf("%-26s %6d %11d %9.1f %7.0f %5.2f", r.name, rows, rows_an_expert, us, tflops,
                    tbs);
        if (by_product) std::printf("  %.1f + %.1f", products.gate_up, products.down);
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
  bool json = false;
  std::string only;
  int rows = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) json = true;
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    if (std::strcmp(argv[i], "--rows") == 0 && i + 1 < argc) rows = std::atoi(argv[++i]);
  }
  return fathom::cuda::run(json, only, rows, fathom::routing_flag(argc, argv));
}
