// Latent decode attention on the GPU over each cache format, and its alternatives: time of a launch
// in a CUDA graph whose launches use different memory, together larger than the L2; median of 11
// replays.
//
//   latent_decode            the kernels of this folder
//   one head a block         16 heads as 16 times as many sequences of one head over the same
//                            pages: every head reads its latent rows for itself
//   expanded, given          multi-head attention of one token a sequence over keys and values that
//                            have been expanded already: its roofline is reading those
//
//   latent_decode_cuda_bench [FORMAT] [--json]      FORMAT: cache format, exactly as in
//                                                   name_of(); all formats by default
#include <algorithm>
#include <optional>
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
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/attention/latent_decode_cuda/latent_decode_problem_cuda.h"
#include "ops/attention/prefill_cuda/mha_prefill_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kColumns = 576, kLatent = 512, kRope = 64, kPages = 40000;
constexpr int kCopies = 24;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)

struct Shape {
  int heads, queries, batch, len;

  double keys() const { return static_cast<double>(batch) * len; }
  double flop() const { return 2.0 * (kColumns + kLatent) * heads * queries * keys(); }
  std::string name() const {
    return std::to_string(heads) + " heads, " + std::to_string(queries) + " x " +
           std::to_string(batch) + " x " + std::to_string(len);
  }
};

template <typename T>
void fill(const DeviceArray<T>& array, const std::vector<T>& some) {
  for (int64_t at = 0; at < array.size(); at += std::ssize(some)) {
    const int64_t count = std::min(std::ssize(some), array.size() - at);
    check(cudaMemcpy(array.data() + at, some.data(), static_cast<size_t>(count) * sizeof(T),
                     cudaMemcpyHostToDevice),
          "filling device memory");
  }
}

// Pages with a repeated pattern of random rows.
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
  fill(pages, some);
  return pages;
}

// With `one_head_a_block` each sequence is listed once per head.
LatentDecodeProblem make_problem(const Shape& shape, bool one_head_a_block, uint32_t seed) {
  const int copies = one_head_a_block ? shape.heads : 1;
  const auto sequences = static_cast<size_t>(shape.batch * copies);
  LatentDecodeProblem problem(shape.heads / copies, std::vector(sequences, shape.len),
                              std::vector(sequences, shape.queries), kPages, seed);
  const auto width = static_cast<size_t>(problem.max_pages);
  for (size_t s = 0; s < sequences; ++s) {
    const size_t first = s / static_cast<size_t>(copies) * static_cast<size_t>(copies);
    std::copy_n(problem.block_tables.data() + first * width, width,
                problem.block_tables.data() + s * width);
  }
  return problem;
}

double measure(const std::byte* pages, CacheFormat format, const Shape& shape,
               bool one_head_a_block = false) {
  const int processors = DeviceContext::current().num_multiprocessors();
  std::mt19937 random(2);
  std::vector<DeviceArray<int32_t>> tables, first_parts;
  std::vector<DeviceArray<LatentDecodePart>> parts;
  LatentDecodePlan plan;
  int64_t rows = 0;
  int heads = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    const auto problem = make_problem(shape, one_head_a_block, static_cast<uint32_t>(copy));
    heads = problem.heads;
    rows = problem.rows();
    plan = plan_latent_decode(problem.batch(), problem.sequences, heads, processors);
    tables.emplace_back(problem.block_tables);
    parts.emplace_back(plan.parts);
    first_parts.emplace_back(plan.first_part);
  }
  const DeviceArray<uint16_t> q_latent(random_bf16(rows * kLatent, 0.6f, random)),
      q_rope(random_bf16(rows * kRope, 0.6f, random)), out(rows * kLatent);
  const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
  prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
  check(cudaDeviceSynchronize(), "preparing");
  return time_in_graph(kCopies, [&](int copy, cudaStream_t stream) {
    const auto at = static_cast<size_t>(copy);
    latent_decode(plan.tile_rows, processors,
                  {.rows = rows / heads,
                   .q_latent = q_latent.data(),
                   .q_rope = q_rope.data(),
                   .pages = pages,
                   .num_pages = kPages,
                   .block_tables = tables[at].data(),
                   .out = out.data(),
                   .heads = heads,
                   .softmax_scale = kScale,
                   .parts = parts[at].data(),
                   .first_part = first_parts[at].data(),
                   .scratch = scratch.data(),
                   .format = format},
                  stream);
  });
}

// ---- multi-head attention over expanded keys and values

constexpr int64_t kQk = 192, kV = 128;

double expanded_bytes(const Shape& shape) {
  return shape.keys() * 2.0 * static_cast<double>(shape.heads * 2 * kV + kRope);
}

double measure_expanded(const Shape& shape, const std::vector<uint16_t>& some) {
  const int processors = DeviceContext::current().num_multiprocessors();
  std::vector<MhaPrefillPart> parts;
  for (int s = 0; s < shape.batch; ++s) {
    parts.push_back({.first_row = s,
                     .rows = 1,
                     .first_key = s * shape.len,
                     .num_keys = shape.len,
                     .visible = shape.len});
  }
  const auto plan = plan_mha_prefill(parts, shape.heads, processors);
  const DeviceArray<MhaPrefillTile> tiles(plan.tiles);
  const DeviceArray<int32_t> first_tile(plan.first_tile);
  struct Memory {
    DeviceArray<uint16_t> kv, k_rope;
  };
  std::vector<Memory> memory;
  const int copies = std::clamp(static_cast<int>(400e6 / expanded_bytes(shape)), 2, kCopies);
  const int64_t rows = int64_t{shape.batch} * shape.heads, keys = int64_t{shape.batch} * shape.len;
  for (int copy = 0; copy < copies; ++copy) {
    memory.push_back(
        {DeviceArray<uint16_t>(keys * shape.heads * 2 * kV), DeviceArray<uint16_t>(keys * kRope)});
    fill(memory.back().kv, some);
    fill(memory.back().k_rope, some);
  }
  const DeviceArray<uint16_t> q(rows * kQk), out(rows * kV);
  fill(q, some);
  return time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& its = memory[static_cast<size_t>(copy)];
    mha_prefill(processors,
                {.q = q.data(),
                 .q_row_stride = shape.heads * kQk,
                 .rows = shape.batch,
                 .kv = its.kv.data(),
                 .k_rope = its.k_rope.data(),
                 .keys = keys,
                 .out = out.data(),
                 .heads = shape.heads,
                 .softmax_scale = kScale,
                 .first_tile = first_tile.data(),
                 .tiles = tiles.data()},
                stream);
  });
}

void run(int argc, char** argv) {
  BenchTable table(argc, argv);
  std::optional<CacheFormat> only;
  for (int i = 1; i < argc; ++i) {
    if (const auto format = parse_cache_format(argv[i])) only = *format;
  }
  // Long compute-bound kernels lower the GPU's clock: they run last.
  const std::vector<Shape> reads = {
      {16, 1, 1, 1024},   {16, 1, 1, 4096},   {16, 1, 1, 32768},  {16, 1, 1, 131072},
      {16, 1, 4, 4096},   {16, 1, 16, 4096},  {16, 1, 64, 4096},  {16, 1, 128, 1024},
      {16, 1, 128, 4096}, {16, 2, 1, 4096},   {16, 2, 128, 4096}, {128, 1, 1, 1024},
      {128, 1, 1, 4096},  {128, 1, 1, 32768}, {128, 1, 16, 1024}, {128, 1, 128, 1024}};
  const std::vector<Shape> more = {{16, 4, 1, 4096},    {64, 1, 1, 4096},  {64, 1, 1, 32768},
                                   {128, 1, 1, 131072}, {128, 1, 4, 4096}, {128, 1, 16, 4096},
                                   {128, 2, 1, 4096},   {128, 4, 1, 4096}, {32, 1, 128, 4096},
                                   {64, 1, 128, 4096}};
  const std::vector<Shape> choices = {
      {16, 1, 1, 4096}, {16, 1, 1, 32768}, {16, 1, 16, 4096}, {16, 1, 128, 4096}};
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    if (only && *only != format) continue;
    const LatentLayout layout{.format = format};
    const DeviceArray<std::byte> pages = make_pages(layout);
    const auto line = [&](const std::string& operation, const Shape& shape, double us) {
      table.add(operation, shape.name(), us, shape.keys() * static_cast<double>(layout.row_bytes()),
                shape.flop());
    };
    const auto measure_all = [&](const std::vector<Shape>& shapes) {
      for (const Shape& shape : shapes) {
        line("latent_decode " + std::string(name_of(format)), shape,
             measure(pages.data(), format, shape));
      }
    };
    measure_all(reads);
    if (format == CacheFormat::kBF16) {
      measure_all(more);
      for (const Shape& shape : choices) {
        line("one head a block", shape, measure(pages.data(), format, shape, true));
      }
      measure_all({{128, 1, 64, 4096}, {128, 2, 128, 4096}});
    }
    measure_all({{128, 1, 128, 4096}});
  }
  if (only) return;
  std::mt19937 random(3);
  const auto some = random_bf16(1 << 22, 0.6f, random);
  for (const Shape& shape : choices) {
    table.add("expanded, given", shape.name(), measure_expanded(shape, some), expanded_bytes(shape),
              2.0 * (kQk + kV) * shape.heads * shape.keys());
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) { fathom::cuda::run(argc, argv); }
