// The absorption GEMMs in e4m3 and in bf16 on the GPU, in a CUDA graph over different memory.
//
//   scaled_absorb_cuda_bench [--json | --plans]
//
// --plans: few rows with many plans.
#include <algorithm>
#include <string>
#include <vector>

#include "base/math.h"
#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/linear/linear_cuda.h"
#include "ops/scaled_linear/scaled_absorb_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kSome = 1 << 20;  // random numbers, repeated

enum class Form { kE4m3, kE4m3Out, kBf16 };

struct Memory {
  DeviceArray<uint16_t> x, out, wide_weight;
  DeviceArray<uint8_t> weight, values;
  DeviceArray<float> scales;
};

// Random bits that are finite: the largest exponent is left out.
std::vector<uint8_t> random_e4m3(int64_t count, std::mt19937& random) {
  std::vector<uint8_t> values(static_cast<size_t>(count));
  for (uint8_t& value : values) value = static_cast<uint8_t>(random() & 0xB7);
  return values;
}

// Repeats `some`.
template <typename T>
DeviceArray<T> repeated(int64_t count, const std::vector<T>& some) {
  DeviceArray<T> values(count);
  for (int64_t at = 0; at < count; at += std::ssize(some)) {
    const int64_t piece = std::min(std::ssize(some), count - at);
    check(cudaMemcpy(values.data() + at, some.data(), static_cast<size_t>(piece) * sizeof(T),
                     cudaMemcpyHostToDevice),
          "copying to the device");
  }
  return values;
}

void measure(BenchTable& table, const std::string& name, Form form, int32_t rows, int32_t heads,
             int32_t n, int32_t k, const ScaledAbsorbPlan* plan = nullptr) {
  const bool wide = form == Form::kBf16;
  const int64_t elements = int64_t{heads} * n * k, ins = int64_t{rows} * heads * k,
                outs = int64_t{rows} * heads * n;
  const double bytes = static_cast<double>(elements) * (wide ? 2 : 1) + 2.0 * ins +
                       static_cast<double>(outs) * (form == Form::kE4m3Out ? 1.03 : 2);
  const int copies = static_cast<int>(std::clamp(400e6 / bytes, 2.0, 64.0));
  std::mt19937 random(1);
  const auto x = random_bf16(std::min(ins, kSome), 1, random);
  const auto weight = random_e4m3(kSome, random);
  const auto wide_weight = random_bf16(kSome, 0.05f, random);
  const DeviceArray<float> weight_scales(random_f32(heads * 4, 0.01f, random));
  std::vector<Memory> memory;
  for (int copy = 0; copy < copies; ++copy) {
    memory.push_back({repeated(ins, x), DeviceArray<uint16_t>(outs),
                      repeated(wide ? elements : 0, wide_weight),
                      repeated(wide ? 0 : elements, weight), DeviceArray<uint8_t>(outs),
                      DeviceArray<float>(heads * round_up(rows, 4))});
  }
  const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& m = memory[static_cast<size_t>(copy)];
    if (wide) {
      linear({.x = m.x.data(),
              .x_row_stride = int64_t{heads} * k,
              .x_batch_stride = k,
              .weight = m.wide_weight.data(),
              .out = m.out.data(),
              .out_row_stride = int64_t{heads} * n,
              .out_batch_stride = n,
              .rows = rows,
              .n = n,
              .k = k,
              .batches = heads},
             stream);
      return;
    }
    ScaledAbsorbArguments arguments = {.x = m.x.data(),
                                       .x_row_stride = int64_t{heads} * k,
                                       .x_head_stride = k,
                                       .weight = m.weight.data(),
                                       .weight_scales = weight_scales.data(),
                                       .out_row_stride = int64_t{heads} * n,
                                       .out_head_stride = n,
                                       .rows = rows,
                                       .heads = heads,
                                       .n = n,
                                       .k = k};
    if (form == Form::kE4m3) arguments.out = m.out.data();
    if (form == Form::kE4m3Out) {
      arguments.quantized = {.values = m.values.data(),
                             .values_row_stride = int64_t{heads} * n,
                             .scales = m.scales.data(),
                             .scales_block_stride = round_up(rows, 4)};
    }
    if (plan != nullptr) {
      scaled_absorb(*plan, arguments, stream);
    } else {
      scaled_absorb(arguments, stream);
    }
  });
  table.add(name + ", " + std::to_string(heads) + " heads", std::to_string(rows) + " rows", us,
            bytes, 2.0 * rows * static_cast<double>(elements));
}

void measure_plans(BenchTable& table, int32_t rows, int32_t heads) {
  for (const bool into_latent : {true, false}) {
    for (const int tokens : {8, 16, 32}) {
      for (const int n_parts : {1, 2, 4}) {
        if (tokens >= 2 * rows || (!into_latent && n_parts > 1)) continue;
        const int tiles = static_cast<int>(ceil_div(rows, tokens));
        const int blocks = heads * n_parts * tiles;
        if (blocks > 4 * DeviceContext::current().num_multiprocessors()) continue;
        const ScaledAbsorbPlan plan = {.tokens = tokens, .n_parts = n_parts, .row_parts = tiles};
        measure(table,
                std::string(into_latent ? "W_UK " : "W_UV ") + std::to_string(tokens) +
                    " tokens, parts " + std::to_string(n_parts),
                Form::kE4m3, rows, heads, into_latent ? 512 : 128, into_latent ? 128 : 512, &plan);
      }
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  using fathom::cuda::Form;
  using fathom::cuda::measure;
  fathom::cuda::BenchTable table(argc, argv);
  const bool plans = std::count(argv + 1, argv + argc, std::string("--plans")) > 0;
  for (const int heads : {16, 128}) {
    for (const int rows : {1, 16, 32, 64, 128, 256, 512, 4096}) {
      if (plans) {
        if (rows <= 128) fathom::cuda::measure_plans(table, rows, heads);
        continue;
      }
      measure(table, "W_UK bf16", Form::kBf16, rows, heads, 512, 128);
      measure(table, "W_UK e4m3", Form::kE4m3, rows, heads, 512, 128);
      measure(table, "W_UV bf16", Form::kBf16, rows, heads, 128, 512);
      measure(table, "W_UV e4m3", Form::kE4m3, rows, heads, 128, 512);
      measure(table, "W_UV e4m3, out e4m3", Form::kE4m3Out, rows, heads, 128, 512);
    }
  }
}
