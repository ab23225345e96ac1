// The norms on the GPU in a CUDA graph over different memory.
//
//   rms_norm_cuda_bench [--json]
#include <algorithm>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"

namespace fathom::cuda {
namespace {

struct Memory {
  DeviceArray<float> residual, weight;
  DeviceArray<uint16_t> delta, out;
};

void measure(BenchTable& table, int64_t rows, int64_t n) {
  const double bytes = static_cast<double>(rows) * n * (4 + 4 + 2 + 2);
  const int copies = static_cast<int>(std::clamp(400e6 / bytes, 4.0, 64.0));
  std::mt19937 random(1);
  std::vector<Memory> memory;
  for (int copy = 0; copy < copies; ++copy) {
    memory.push_back({DeviceArray<float>(random_f32(rows * n, 1, random)),
                      DeviceArray<float>(random_f32(n, 1, random)),
                      DeviceArray<uint16_t>(random_bf16(rows * n, 1, random)),
                      DeviceArray<uint16_t>(rows * n)});
  }
  const std::string shape = std::to_string(rows) + " x " + std::to_string(n);
  const double add_us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& m = memory[static_cast<size_t>(copy)];
    add_rms_norm({.residual = m.residual.data(),
                  .delta = m.delta.data(),
                  .delta_stride = n,
                  .weight = m.weight.data(),
                  .out = m.out.data(),
                  .rows = rows,
                  .n = n},
                 stream);
  });
  table.add("add_rms_norm", shape, add_us, bytes);
  const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& m = memory[static_cast<size_t>(copy)];
    rms_norm({.x = m.delta.data(),
              .x_stride = n,
              .weight = m.weight.data(),
              .out = m.out.data(),
              .out_stride = n,
              .rows = rows,
              .n = n},
             stream);
  });
  table.add("rms_norm", shape, us, static_cast<double>(rows) * n * 4);
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::BenchTable table(argc, argv);
  for (const int64_t rows : {1, 8, 64, 512, 2048, 8192}) {
    fathom::cuda::measure(table, rows, 2048);
  }
  for (const int64_t rows : {1, 64, 1024}) fathom::cuda::measure(table, rows, 7168);
}
