// Multi-head prefill attention on the GPU: time of a launch in a CUDA graph whose launches use
// different memory, together larger than the L2; median of 11 replays. TFLOP/s count only unmasked
// scores. A run of keys: those before the queries' own, combined with an earlier run and continued
// by a later one.
//
//   mha_prefill_cuda_bench [--json]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/attention/prefill_cuda/mha_prefill_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kQk = 192, kV = 128, kKvColumns = 256, kRope = 64;
constexpr double kTflops = 790;  // measured bf16 rate of an H200

struct Shape {
  int heads, sequences, queries, keys;
  bool is_run = false;
  bool quantizes = false;

  int64_t rows() const { return int64_t{sequences} * queries; }
  int64_t all_keys() const { return int64_t{sequences} * keys; }
  int64_t values() const {
    return rows() * heads * (kQk + kV) + all_keys() * (heads * kKvColumns + kRope);
  }
  double flop() const {
    const double pairs =
        static_cast<double>(queries) * (keys - (is_run ? 0.0 : (queries - 1) / 2.0));
    return 2 * (kQk + kV) * pairs * heads * sequences;
  }
};

struct Memory {
  DeviceArray<uint16_t> q, kv, k_rope, out;
  DeviceArray<float> partial, lse;
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;
};

DeviceArray<uint16_t> random_array(int64_t size, const std::vector<uint16_t>& some) {
  DeviceArray<uint16_t> array(size);
  for (int64_t at = 0; at < size; at += std::ssize(some)) {
    const int64_t count = std::min(std::ssize(some), size - at);
    check(cudaMemcpy(array.data() + at, some.data(), static_cast<size_t>(count) * 2,
                     cudaMemcpyHostToDevice),
          "copying to the device");
  }
  return array;
}

double measure(const Shape& shape, const std::vector<uint16_t>& some, int processors) {
  std::vector<MhaPrefillPart> parts;
  for (int s = 0; s < shape.sequences; ++s) {
    parts.push_back({.first_row = s * shape.queries,
                     .rows = shape.queries,
                     .first_key = s * shape.keys,
                     .num_keys = shape.keys,
                     .visible = shape.is_run ? shape.keys + 1 : shape.keys - shape.queries + 1,
                     .joined = shape.is_run});
  }
  const auto plan = plan_mha_prefill(parts, shape.heads, processors);
  const DeviceArray<MhaPrefillTile> tiles(plan.tiles);
  const DeviceArray<int32_t> first_tile(plan.first_tile);
  constexpr int64_t kValues = int64_t{100} << 20;  // 200 MB
  const auto copies =
      static_cast<int>(std::clamp<int64_t>((kValues - 1) / shape.values() + 1, 2, 24));
  std::vector<Memory> memory;
  for (int copy = 0; copy < copies; ++copy) {
    const int64_t rows = shape.rows() * shape.heads, keys = shape.all_keys();
    memory.push_back({random_array(rows * kQk, some),
                      random_array(keys * shape.heads * kKvColumns, some),
                      random_array(keys * kRope, some), DeviceArray<uint16_t>(rows * kV),
                      DeviceArray<float>(shape.is_run ? rows * kV : 0), DeviceArray<float>(rows),
                      DeviceArray<uint8_t>(shape.quantizes ? rows * kV : 0),
                      DeviceArray<float>(shape.quantizes ? rows : 0)});
    check(cudaMemset(memory.back().partial.data(), 0, memory.back().partial.bytes()), "clearing");
    check(cudaMemset(memory.back().lse.data(), 0, memory.back().lse.bytes()), "clearing");
  }
  return time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& its = memory[static_cast<size_t>(copy)];
    QuantizedRows quantized;
    if (shape.quantizes) {
      quantized = {.values = its.values.data(),
                   .values_row_stride = shape.heads * kV,
                   .scales = its.scales.data(),
                   .scales_block_stride = shape.rows()};
    }
    mha_prefill(processors,
                {.q = its.q.data(),
                 .q_row_stride = shape.heads * kQk,
                 .rows = shape.rows(),
                 .kv = its.kv.data(),
                 .k_rope = its.k_rope.data(),
                 .keys = shape.all_keys(),
                 .out = shape.quantizes ? nullptr : its.out.data(),
                 .quantized = quantized,
                 .partial = its.partial.data(),
                 .lse = its.lse.data(),
                 .heads = shape.heads,
                 .softmax_scale = 0.0721688f,
                 .first_tile = first_tile.data(),
                 .tiles = tiles.data()},
                stream);
  });
}

int run(bool json) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "attribute");
  std::mt19937 random(1);
  const auto some = random_bf16(1 << 22, 1, random);
  const Shape shapes[] = {{16, 1, 512, 512},
                          {16, 1, 1024, 1024},
                          {16, 1, 2048, 2048},
                          {16, 1, 4096, 4096},
                          {16, 1, 8192, 8192},
                          {16, 8, 1024, 1024},
                          {16, 32, 256, 256},
                          {16, 1, 2048, 10240},
                          {16, 1, 2048, 8192, true},
                          {128, 1, 512, 512},
                          {128, 1, 2048, 2048},
                          {128, 1, 4096, 4096},
                          {128, 1, 4096, 4096, true},
                          {128, 1, 512, 512, false, true},
                          {128, 1, 2048, 2048, false, true},
                          {128, 1, 4096, 4096, false, true}};
  if (json) {
    std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
  } else {
    std::printf("%s\nheads sequences queries  keys    mask        us  TFLOP/s  %% of %.0f\n",
                device_line().c_str(), kTflops);
  }
  const char* separator = "";
  for (const Shape& shape : shapes) {
    const double us = measure(shape, some, processors), tflops = shape.flop() / us / 1e6;
    const char* mask = shape.is_run ? "run" : "causal";
    if (json) {
      std::printf(
          "%s\n  {\"heads\": %d, \"sequences\": %d, \"queries\": %d, \"keys\": %d, \"mask\": "
          "\"%s\", \"out\": \"%s\", \"us\": %.2f, \"tflops\": %.1f}",
          separator, shape.heads, shape.sequences, shape.queries, shape.keys, mask,
          shape.quantizes ? "e4m3" : "bf16", us, tflops);
      separator = ",";
    } else {
      std::printf("%5d %9d %7d %5d  %6s  %8.2f  %7.0f  %8.0f%s\n", shape.heads, shape.sequences,
                  shape.queries, shape.keys, mask, us, tflops, 100 * tflops / kTflops,
                  shape.quantizes ? "  out e4m3" : "");
    }
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  return fathom::cuda::run(argc > 1 && std::strcmp(argv[1], "--json") == 0);
}
