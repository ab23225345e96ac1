// query_key on the GPU in a CUDA graph over different memory.
//
//   query_key_cuda_bench [--json]
#include <algorithm>
#include <numeric>
#include <string>

#include "base/math.h"
#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/rope/query_key_cuda.h"
#include "ops/rope/rope.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kColumns = 576, kHead = 192, kMaxPositions = 4096;

struct Memory {
  DeviceArray<uint16_t> projected, q_rope, pages;
};

// The fused projection: heads, then the latent and its rotary key.
void measure(BenchTable& table, const DeviceArray<float>& cos_sin, int64_t rows, int64_t heads) {
  const int64_t stride = heads * kHead + kColumns;
  const double bytes = static_cast<double>(rows) * 2 * (heads * 64 * 3 + kColumns * 2);
  const int copies = static_cast<int>(std::clamp(400e6 / bytes, 4.0, 64.0));
  std::mt19937 random(1);
  std::vector<Memory> memory;
  for (int copy = 0; copy < copies; ++copy) {
    memory.push_back({DeviceArray<uint16_t>(random_bf16(rows * stride, 1, random)),
                      DeviceArray<uint16_t>(rows * heads * 64),
                      DeviceArray<uint16_t>(round_up(rows, kPageSize) * kColumns)});
  }
  const DeviceArray<float> weight(random_f32(512, 1, random));
  std::vector<int32_t> positions;
  std::vector<int64_t> slots(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    positions.push_back(static_cast<int32_t>(random() % kMaxPositions));
  }
  std::iota(slots.begin(), slots.end(), 0);
  const DeviceArray<int32_t> device_positions(positions);
  const DeviceArray<int64_t> device_slots(slots);
  const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& m = memory[static_cast<size_t>(copy)];
    query_key({.q = m.projected.data(),
               .q_stride = stride,
               .q_rope = m.q_rope.data(),
               .kv_a = m.projected.data() + heads * kHead,
               .kv_a_stride = stride,
               .norm_weight = weight.data(),
               .cos_sin = cos_sin.data(),
               .positions = device_positions.data(),
               .slots = device_slots.data(),
               .pages = m.pages.data(),
               .rows = rows,
               .heads = static_cast<int32_t>(heads),
               .nope = 128},
              stream);
  });
  table.add("query_key", std::to_string(rows) + " x " + std::to_string(heads) + " heads", us,
            bytes);
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  using fathom::cuda::measure;
  fathom::cuda::BenchTable table(argc, argv);
  const fathom::cuda::DeviceArray<float> cos_sin(fathom::tabulate(
      fathom::make_rope_table(64, 10000, std::nullopt), fathom::cuda::kMaxPositions));
  for (const int64_t rows : {1, 8, 64, 512, 2048, 8192}) measure(table, cos_sin, rows, 16);
  for (const int64_t rows : {1, 64, 1024}) measure(table, cos_sin, rows, 128);
}
