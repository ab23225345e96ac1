// The mixture of experts for many tokens on the GPU: time of all its launches, three repetitions in
// a CUDA graph; median of 11 replays. TFLOP/s count the tokens' routed experts alone.
//
//   moe_many_rows_cuda_bench [--json] [--routing uniform|zipf]
//
// --routing zipf: the shapes with drawn experts, drawn so (expert_draw.h).
#include <cstdio>
#include <cstring>
#include <vector>

#include "device/cuda/graph_timer.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_problem_cuda.h"
#include "ops/moe/expert_draw.h"

namespace fathom::cuda {
namespace {

constexpr double kFlopPerUs = 790e6;  // bf16 GEMMs of an H200 on random data

struct Run {
  const char* name;
  MoeShape shape;
  bool balanced;
  int32_t rows;
};

constexpr MoeShape kV2Lite = {
    .hidden = 2048, .num_experts = 64, .experts_per_token = 6, .inter = 1408, .shared_inter = 2816};
// TP8 slice without the shared expert.
constexpr MoeShape kV3 = {
    .hidden = 7168, .num_experts = 32, .experts_per_token = 8, .inter = 2048, .shared_inter = 0};

int run(bool json, Routing routing) {
  std::vector<Run> runs;
  for (const int32_t rows : {32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}) {
    runs.push_back({"V2-Lite", kV2Lite, false, rows});
  }
  for (const int32_t rows_an_expert : {64, 128, 192, 256, 512, 1024}) {
    runs.push_back({"V3 / 8", kV3, true, rows_an_expert * 4});
  }
  std::printf(json ? "{\"device\": \"%s\", \"results\": [" : "%s\n", device_line().c_str());
  if (!json) std::printf("model    tokens rows/expert        us TFLOP/s   %%\n");
  const char* separator = "";
  for (const Run& r : runs) {
    if (routing == Routing::kZipf && r.balanced) continue;
    const auto ids = draw_experts(r.balanced ? Routing::kEven : routing, r.shape.num_experts,
                                  r.shape.experts_per_token, r.rows, 5);
    const MoeProblem problem(r.shape, r.rows, ids, 1);
    const MoeArguments arguments = problem.arguments(DType::kF32);
    const double us =
        time_in_graph(3, [&](int, cudaStream_t stream) { moe_many_rows(arguments, stream); });
    const double rate = problem.flop() / us;
    const int rows_an_expert = r.rows * r.shape.experts_per_token / r.shape.num_experts;
    if (json) {
      std::printf("%s\n  {\"model\": \"%s\", \"tokens\": %d, \"us\": %.2f, \"tflops\": %.1f}",
                  separator, r.name, r.rows, us, rate / 1e6);
      separator = ",";
    } else {
      std::printf("%-8s %6d %11d %9.1f %7.0f %3.0f\n", r.name, r.rows, rows_an_expert, us,
                  rate / 1e6, 100 * rate / kFlopPerUs);
    }
    std::fflush(stdout);
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  bool json = false;
  for (int i = 1; i < argc; ++i) json = json || std::strcmp(argv[i], "--json") == 0;
  return fathom::cuda::run(json, fathom::routing_flag(argc, argv));
}
