// Latent decode attention over each format of the cache: time of a launch in a CUDA graph of 24
// that take other pages each, more than the L2 holds together; median of 11 replays.
//
//   latent_decode_8_bit_cuda_bench [--json]
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "cache/latent_layout.h"
#include "cache/latent_row.h"
#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/attention/latent_decode_cuda.h"
#include "ops/attention/latent_decode_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kColumns = 576, kLatent = 512, kRope = 64, kPages = 40000;
constexpr int kCopies = 24;

struct Shape {
  int heads, queries, batch, len;
};

// Pages of random rows, again and again.
DeviceArray<std::byte> make_pages(const LatentLayout& layout) {
  constexpr int64_t kRows = 4096;
  DeviceArray<std::byte> pages(kPages * layout.page_bytes());
  std::mt19937 random(1);
  std::vector<std::byte> some(static_cast<size_t>(kRows * layout.row_bytes()));
  for (int64_t row = 0; row < kRows; ++row) {
    const auto values = random_f32(kColumns, 0.6f, random);
    encode_row(layout, values.data(), values.data() + kLatent,
               some.data() + row * layout.row_bytes());
  }
  for (int64_t at = 0; at < pages.size(); at += std::ssize(some)) {
    const int64_t count = std::min(std::ssize(some), pages.size() - at);
    check(cudaMemcpy(pages.data() + at, some.data(), static_cast<size_t>(count),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
  return pages;
}

double measure(const std::byte* pages, CacheFormat format, const Shape& shape) {
  const int processors = num_multiprocessors();
  const std::vector<int32_t> lens(static_cast<size_t>(shape.batch), shape.len),
      queries(static_cast<size_t>(shape.batch), shape.queries);
  std::mt19937 random(2);
  std::vector<DeviceArray<int32_t>> tables, first_parts;
  std::vector<DeviceArray<LatentDecodePart>> parts;
  LatentDecodePlan plan;
  int64_t rows = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    const LatentDecodeProblem problem(shape.heads, lens, queries, kPages,
                                      static_cast<uint32_t>(copy));
    plan = plan_latent_decode(problem.batch(), problem.sequences, shape.heads, processors, format);
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
    const auto at = static_cast<size_t>(copy);
    latent_decode(plan.tile_rows, processors,
                  {.q_latent = q_latent.data(),
                   .q_rope = q_rope.data(),
                   .pages = pages,
                   .num_pages = kPages,
                   .block_tables = tables[at].data(),
                   .out = out.data(),
                   .heads = shape.heads,
                   .softmax_scale = 0.0721688f,
                   .parts = parts[at].data(),
                   .first_part = first_parts[at].data(),
                   .scratch = scratch.data(),
                   .format = format},
                  stream);
  });
}

void run(int argc, char** argv) {
  BenchTable table(argc, argv);
  const Shape shapes[] = {{16, 1, 1, 1024},   {16, 1, 1, 4096},   {16, 1, 1, 32768},
                          {16, 1, 1, 131072}, {16, 1, 16, 4096},  {16, 1, 64, 4096},
                          {16, 1, 128, 1024}, {16, 1, 128, 4096}, {16, 2, 128, 4096},
                          {128, 1, 1, 4096},  {128, 1, 128, 4096}};
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    const LatentLayout layout{.format = format};
    const DeviceArray<std::byte> pages = make_pages(layout);
    for (const Shape& shape : shapes) {
      const double keys = static_cast<double>(shape.batch) * shape.len;
      table.add("latent_decode " + std::string(name_of(format)),
                std::to_string(shape.heads) + " heads, " + std::to_string(shape.queries) + " x " +
                    std::to_string(shape.batch) + " x " + std::to_string(shape.len),
                measure(pages.data(), format, shape),
                keys * static_cast<double>(layout.row_bytes()),
                2.0 * 1088 * shape.heads * shape.queries * keys);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) { fathom::cuda::run(argc, argv); }
