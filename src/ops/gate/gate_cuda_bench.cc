// The router on the GPU in a CUDA graph over different memory.
//
//   gate_cuda_bench [--json]
#include <algorithm>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/gate/gate_cuda.h"

namespace fathom::cuda {
namespace {

struct Memory {
  DeviceArray<uint16_t> x, weight;
};

void measure(BenchTable& table, const std::string& name, const GateOptions& options,
             int64_t experts, int64_t hidden, int64_t rows) {
  const double bytes = 2.0 * hidden * (rows + experts);
  const int copies = static_cast<int>(std::clamp(200e6 / bytes, 4.0, 64.0));
  const int64_t k = options.experts_per_token;
  std::mt19937 random(1);
  const auto x = random_bf16(rows * hidden, 1, random);
  const auto weight = random_bf16(experts * hidden, 0.05f, random);
  std::vector<Memory> memory;
  for (int copy = 0; copy < copies; ++copy) {
    memory.push_back({DeviceArray<uint16_t>(x), DeviceArray<uint16_t>(weight)});
  }
  const DeviceArray<float> bias(random_f32(experts, 0.1f, random)), weights(rows * k);
  const DeviceArray<int32_t> ids(rows * k);
  const DeviceArray<float> scratch(gate_scratch_words(rows, hidden, experts));
  check(cudaMemset(scratch.data(), 0xFF, scratch.bytes()), "preparing");
  const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& m = memory[static_cast<size_t>(copy)];
    GateArguments arguments;
    arguments.x = m.x.data();
    arguments.weight = m.weight.data();
    if (options.scoring == GateScoring::kSigmoidBias) arguments.bias = bias.data();
    arguments.options = options;
    arguments.expert_ids = ids.data();
    arguments.expert_weights = weights.data();
    arguments.rows = rows;
    arguments.hidden = hidden;
    arguments.experts = experts;
    arguments.scratch = scratch.data();
    gate(arguments, stream);
  });
  table.add(name, std::to_string(rows) + " rows", us, bytes, 2.0 * rows * experts * hidden);
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  using fathom::cuda::measure;
  fathom::cuda::BenchTable table(argc, argv);
  for (const int64_t rows : {1, 8, 16, 64, 256, 512, 1024, 2048, 8192}) {
    measure(table, "gate 64x2048", {fathom::GateScoring::kSoftmaxGreedy, 1, 1, 6, false, 1}, 64,
            2048, rows);
  }
  for (const int64_t rows : {1, 8, 16, 32, 64, 128, 256, 1024, 4096}) {
    measure(table, "gate 256x7168", {fathom::GateScoring::kSigmoidBias, 8, 4, 8, true, 2.5f}, 256,
            7168, rows);
  }
}
