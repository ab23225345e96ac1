// Benchmark of MoE with four-bit experts (INT4, groups of 32) on the GPU: routed experts alone, by
// time in a CUDA graph; the floor is reading the weights of all experts that have tokens.
//
//   four_bit_moe_cuda_bench [--json] [--routing uniform|zipf]
//
// --routing zipf: the shapes with drawn experts, drawn so (expert_draw.h).
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/expert_draw.h"
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"
#include "ops/moe/four_bit_cuda/four_bit_problem_cuda.h"
#include "ops/moe/plans/four_bit_tiles.h"

namespace fathom::cuda {
namespace {

// Fills device memory with copies of `some`.
template <typename T>
void fill(const DeviceArray<T>& memory, const std::vector<T>& some) {
  for (int64_t at = 0; at < memory.size(); at += std::ssize(some)) {
    const int64_t count = std::min(std::ssize(some), memory.size() - at);
    check(cudaMemcpy(memory.data() + at, at == 0 ? some.data() : memory.data(),
                     static_cast<size_t>(count) * sizeof(T), cudaMemcpyDefault),
          "filling memory");
  }
}

class Bench {
 public:
  Bench(int argc, char** argv) : table_(argc, argv) {
    std::mt19937 random(1);
    fill(weights_, down_in_tiles(random_four_bit(1024, 7168, FourBitCode::kInteger, random)));
    fill(x_, random_bf16(512 * 7168, 1.0f, random));
    fill(wide_, random_bf16(512 * 7168, 0.02f, random));
  }

  void time(const std::string& name, const MoeShape& s, int32_t rows, Routing routing) {
    if (int64_t{rows} * s.experts_per_token <= kFourBitFewPairs) {
      time(name + ", few", s, rows, routing, four_bit_moe_few_rows,
           four_bit_moe_few_rows_workspace_bytes);
    }
    if (rows >= 64) {
      time(name + ", many", s, rows, routing, four_bit_moe_many_rows,
           four_bit_moe_many_rows_workspace_bytes);
    }
  }

  // The same shape in bf16, of one layer.
  void time_bf16(const std::string& name, const MoeShape& s, int32_t rows, Routing routing) {
    const DeviceArray<int32_t> ids(
        draw_experts(routing, s.num_experts, s.experts_per_token, rows, 2));
    const DeviceArray<float> factors(
        std::vector<float>(static_cast<size_t>(rows * s.experts_per_token), 0.2f));
    const DeviceArray<float> out(int64_t{rows} * s.hidden);
    const DeviceArray<uint8_t> workspace(moe_many_rows_workspace_bytes(s, rows));
    const int64_t elements = int64_t{s.num_experts} * s.inter * s.hidden;
    const double us = time_in_graph(1, [&](int, cudaStream_t stream) {
      moe_many_rows({.shape = s,
                     .rows = rows,
                     .x = x_.data(),
                     .expert_ids = ids.data(),
                     .expert_weights = factors.data(),
                     .gate_up = wide_.data(),
                     .down = wide_.data() + 2 * elements,
                     .out = out.data(),
                     .workspace = workspace.data()},
                    stream);
    });
    table_.add(name + ", bf16", std::to_string(rows) + " rows", us,
               6.0 * static_cast<double>(elements),
               6.0 * s.hidden * s.inter * rows * s.experts_per_token);
  }

 private:
  void time(const std::string& name, const MoeShape& s, int32_t rows, Routing routing,
            void (*launch)(const FourBitMoeArguments&, GpuStream),
            int64_t (*bytes)(const MoeShape&, int32_t)) {
    const int64_t expert_bytes = four_bit_bytes(3 * s.inter, s.hidden);
    const int64_t layer_bytes = expert_bytes * s.num_experts;
    const auto layers = static_cast<int>(std::clamp<int64_t>(weights_.size() / layer_bytes, 1, 12));
    std::vector<DeviceArray<int32_t>> ids;
    int64_t experts = 0;
    for (int i = 0; i < layers; ++i) {
      const auto chosen = draw_experts(routing, s.num_experts, s.experts_per_token, rows,
                                       static_cast<uint32_t>(2 + i));
      experts += std::ssize(std::set<int32_t>(chosen.begin(), chosen.end()));
      ids.emplace_back(chosen);
    }
    const DeviceArray<float> factors(
        std::vector<float>(static_cast<size_t>(rows * s.experts_per_token), 0.2f));
    const DeviceArray<float> out(int64_t{rows} * s.hidden);
    const DeviceArray<uint8_t> workspace(bytes(s, rows));
    const double us = time_in_graph(layers, [&](int layer, cudaStream_t stream) {
      const uint8_t* const weights = weights_.data() + layer * layer_bytes;
      launch({.shape = s,
              .rows = rows,
              .x = x_.data(),
              .expert_ids = ids[static_cast<size_t>(layer)].data(),
              .expert_weights = factors.data(),
              .gate_up = weights,
              .down = weights + layer_bytes / 3 * 2,
              .out = out.data(),
              .workspace = workspace.data()},
             stream);
    });
    table_.add(name, std::to_string(rows) + " rows", us,
               static_cast<double>(experts) / layers * static_cast<double>(expert_bytes),
               6.0 * s.hidden * s.inter * rows * s.experts_per_token);
  }

  BenchTable table_;
  DeviceArray<uint8_t> weights_{int64_t{20} << 30};
  DeviceArray<uint16_t> x_{int64_t{16384} * 7168}, wide_{int64_t{96} * 3 * 2048 * 7168};
};

void run(int argc, char** argv) {
  Bench bench(argc, argv);
  const MoeShape kimi{7168, 384, 8, 2048}, v3{7168, 256, 8, 2048}, eighth{7168, 384, 8, 256},
      lite{2048, 64, 6, 1408}, quarter{7168, 96, 8, 2048};
  const Routing drawn = routing_flag(argc, argv);
  for (const int32_t rows : {1, 2, 4, 8, 16, 32, 64, 4096}) {
    bench.time("kimi k2", kimi, rows, drawn);
  }
  for (const int32_t rows : {1, 8, 64}) bench.time("v3", v3, rows, drawn);
  for (const int32_t rows : {1, 8, 64}) bench.time("kimi k2 / 8", eighth, rows, drawn);
  for (const int32_t rows : {1, 8, 64}) bench.time("v2-lite", lite, rows, drawn);
  if (drawn != Routing::kUniform) return;
  for (const int32_t rows : {48, 96, 192, 384, 768}) {
    bench.time("kimi k2, even", kimi, rows, Routing::kEven);
  }
  // One GPU of four with whole experts: 8 to 768 rows an expert.
  for (const int32_t rows : {96, 192, 768, 2304, 4608, 9216}) {
    bench.time("kimi k2, 96 experts", quarter, rows, Routing::kEven);
    bench.time_bf16("kimi k2, 96 experts", quarter, rows, Routing::kEven);
  }
  for (const int32_t rows : {32, 256}) bench.time("v3, even", v3, rows, Routing::kEven);
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::run(argc, argv);
  return 0;
}
