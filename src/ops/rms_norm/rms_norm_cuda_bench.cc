// The norms on the GPU in a CUDA graph over different memory.
//
//   rms_norm_cuda_bench [--json]
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/math.h"
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
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;

  QuantizedRows quantized(int64_t rows, int64_t n) const {
    return {.values = values.data(),
            .values_row_stride = n,
            .scales = scales.data(),
            .scales_block_stride = round_up(rows, 4)};
  }
};

// Output types of a norm.
enum class Results { kBf16, kE4m3, kBoth };
constexpr std::pair<Results, const char*> kResults[] = {
    {Results::kBf16, ""}, {Results::kE4m3, " in e4m3"}, {Results::kBoth, " in both"}};

void measure(BenchTable& table, int64_t rows, int64_t n) {
  const double bytes = static_cast<double>(rows) * n * (4 + 4 + 2 + 2);
  const int copies = static_cast<int>(std::clamp(400e6 / bytes, 4.0, 64.0));
  std::mt19937 random(1);
  const auto residual = random_f32(rows * n, 1, random), weight = random_f32(n, 1, random);
  const auto delta = random_bf16(rows * n, 1, random);
  std::vector<Memory> memory;
  for (int copy = 0; copy < copies; ++copy) {
    memory.push_back({DeviceArray<float>(residual), DeviceArray<float>(weight),
                      DeviceArray<uint16_t>(delta), DeviceArray<uint16_t>(rows * n),
                      DeviceArray<uint8_t>(rows * n),
                      DeviceArray<float>(n / kScaleBlock * round_up(rows, 4))});
  }
  const std::string shape = std::to_string(rows) + " x " + std::to_string(n);
  for (const auto& [results, name] : kResults) {
    const double written = results == Results::kBf16 ? 2 : results == Results::kE4m3 ? 1.03 : 3.03;
    const double add_us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
      const Memory& m = memory[static_cast<size_t>(copy)];
      AddRmsNormArguments arguments = {.residual = m.residual.data(),
                                       .delta = m.delta.data(),
                                       .delta_stride = n,
                                       .weight = m.weight.data(),
                                       .rows = rows,
                                       .n = n};
      if (results != Results::kE4m3) arguments.out = m.out.data();
      if (results != Results::kBf16) arguments.quantized = m.quantized(rows, n);
      add_rms_norm(arguments, stream);
    });
    table.add(std::string("add_rms_norm") + name, shape, add_us,
              static_cast<double>(rows) * n * (4 + 4 + 2 + written));
    const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
      const Memory& m = memory[static_cast<size_t>(copy)];
      RmsNormArguments arguments = {.x = m.delta.data(),
                                    .x_stride = n,
                                    .weight = m.weight.data(),
                                    .out_stride = n,
                                    .rows = rows,
                                    .n = n};
      if (results != Results::kE4m3) arguments.out = m.out.data();
      if (results != Results::kBf16) arguments.quantized = m.quantized(rows, n);
      rms_norm(arguments, stream);
    });
    table.add(std::string("rms_norm") + name, shape, us,
              static_cast<double>(rows) * n * (2 + written));
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::BenchTable table(argc, argv);
  for (const int64_t rows : {1, 8, 64, 512, 2048, 8192}) {
    fathom::cuda::measure(table, rows, 2048);
  }
  for (const int64_t rows : {1, 16, 64, 1024, 4096}) fathom::cuda::measure(table, rows, 7168);
  for (const int64_t rows : {1, 64, 4096}) fathom::cuda::measure(table, rows, 1536);
}
