// Latent decode attention on the GPU: time of a launch in a CUDA graph of 24 that take other pages
// each, more than the L2 holds together; median of 11 replays.
//
//   latent_decode_cuda_bench [--json]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/attention/latent_decode_cuda.h"
#include "ops/attention/latent_decode_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kColumns = 576, kLatent = 512, kRope = 64;
constexpr int kCopies = 24;

struct Shape {
  int heads, queries, batch, len;
};

struct Memory {
  DeviceArray<uint16_t> pages;
  int64_t num_pages;
};

Memory make_memory() {
  constexpr int64_t kPages = 40000;  // 2.9 GB
  Memory memory{DeviceArray<uint16_t>(kPages * 64 * kColumns), kPages};
  std::mt19937 random(1);
  const auto some = random_bf16(1 << 22, 0.6f, random);
  for (int64_t at = 0; at < memory.pages.size(); at += std::ssize(some)) {
    const int64_t count = std::min(std::ssize(some), memory.pages.size() - at);
    check(cudaMemcpy(memory.pages.data() + at, some.data(), static_cast<size_t>(count) * 2,
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
  return memory;
}

double measure(const Memory& memory, const Shape& shape, int processors) {
  const std::vector<int32_t> lens(static_cast<size_t>(shape.batch), shape.len),
      queries(static_cast<size_t>(shape.batch), shape.queries);
  std::mt19937 random(2);
  std::vector<DeviceArray<int32_t>> tables;
  std::vector<DeviceArray<LatentDecodePart>> parts;
  std::vector<DeviceArray<int32_t>> first_parts;
  LatentDecodePlan plan;
  int64_t rows = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    const LatentDecodeProblem problem(shape.heads, lens, queries, memory.num_pages,
                                      static_cast<uint32_t>(copy));
    plan = plan_latent_decode(problem.batch(), problem.sequences, shape.heads, processors);
    tables.emplace_back(problem.block_tables);
    parts.emplace_back(plan.parts);
    first_parts.emplace_back(plan.first_part);
    rows = problem.rows();
  }
  const DeviceArray<uint16_t> q_latent(random_bf16(rows * kLatent, 0.6f, random)),
      q_rope(random_bf16(rows * kRope, 0.6f, random)), out(rows * kLatent);
  const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
  prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
  check(cudaDeviceSynchronize(), "preparing");
  return time_in_graph(kCopies, [&](int copy, cudaStream_t stream) {
    latent_decode(plan.tile_rows, processors,
                  {.rows = rows / shape.heads,
                   .q_latent = q_latent.data(),
                   .q_rope = q_rope.data(),
                   .pages = memory.pages.data(),
                   .num_pages = memory.num_pages,
                   .block_tables = tables[static_cast<size_t>(copy)].data(),
                   .out = out.data(),
                   .heads = shape.heads,
                   .softmax_scale = 0.0721688f,
                   .parts = parts[static_cast<size_t>(copy)].data(),
                   .first_part = first_parts[static_cast<size_t>(copy)].data(),
                   .scratch = scratch.data()},
                  stream);
  });
}

int run(bool json) {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "driver");
  const Memory memory = make_memory();
  const Shape shapes[] = {
      {16, 1, 1, 1024},   {16, 1, 1, 4096},   {16, 1, 1, 32768},  {16, 1, 1, 131072},
      {16, 1, 4, 4096},   {16, 1, 16, 4096},  {16, 1, 64, 4096},  {16, 1, 128, 1024},
      {16, 1, 128, 4096}, {16, 2, 1, 4096},   {16, 4, 1, 4096},   {16, 2, 128, 4096},
      {32, 1, 128, 4096}, {64, 1, 1, 4096},   {64, 1, 1, 32768},  {64, 1, 128, 4096},
      {128, 1, 1, 1024},  {128, 1, 1, 4096},  {128, 1, 1, 32768}, {128, 1, 1, 131072},
      {128, 1, 4, 4096},  {128, 1, 16, 4096}, {128, 1, 64, 4096}, {128, 1, 128, 4096},
      {128, 2, 1, 4096},  {128, 4, 1, 4096},  {128, 2, 128, 4096}};
  if (json) {
    std::printf("{\"device\": \"%s\", \"multiprocessors\": %d, \"cuda_driver\": %d, \"results\": [",
                device.name, device.multiProcessorCount, driver);
  } else {
    std::printf("%s\nheads queries batch    keys        us  floor us  GB/s  TFLOP/s\n",
                device.name);
  }
  const char* separator = "";
  for (const Shape& shape : shapes) {
    const double us = measure(memory, shape, device.multiProcessorCount);
    const double bytes = 1152.0 * shape.batch * shape.len;
    const double flop = 2.0 * 1088 * shape.heads * shape.queries * shape.batch * shape.len;
    if (json) {
      std::printf(
          "%s\n  {\"heads\": %d, \"queries\": %d, \"batch\": %d, \"keys\": %d, \"us\": %.2f}",
          separator, shape.heads, shape.queries, shape.batch, shape.len, us);
      separator = ",";
    } else {
      std::printf("%5d %7d %5d %7d  %8.2f  %8.1f %5.0f %8.0f\n", shape.heads, shape.queries,
                  shape.batch, shape.len, us, bytes / kReadBytesPerUs, bytes / us / 1e3,
                  flop / us / 1e6);
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
