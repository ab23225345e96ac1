// Sparse latent attention on the GPU: time of a launch in a CUDA graph whose launches have
// different lists; median of 11 replays. Decode rows have a sequence each, rows of prompts one
// sequence together. Lists are random positions, ascending.
//
//   sparse_latent_cuda_bench [FORMAT] [--json]      FORMAT: cache format, exactly as in name_of();
//                                                   bf16 and fp8 by default
#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "cache/latent_row.h"
#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_attention_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kColumns = 576, kLatent = 512, kRope = 64;
constexpr int32_t kTopK = 2048, kPages = 40000;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)

struct Shape {
  int32_t heads, rows, sequences, len, split_keys;

  double keys() const { return static_cast<double>(rows) * std::min(kTopK, len); }
  double flop() const { return 2.0 * (kColumns + kLatent) * heads * keys(); }
  std::string name() const {
    return std::to_string(heads) + " heads, " + std::to_string(rows) + " rows of " +
           std::to_string(sequences) + " x " + std::to_string(len) + ", splits of " +
           std::to_string(split_keys);
  }
};

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
  for (size_t at = 0; at < pages.bytes(); at += some.size()) {
    check(cudaMemcpy(pages.data() + at, some.data(), std::min(some.size(), pages.bytes() - at),
                     cudaMemcpyHostToDevice),
          "filling device memory");
  }
  return pages;
}

// `count` of `length` positions, ascending: one of each run of length / count.
void append_list(std::vector<int32_t>& keys, int32_t length, std::mt19937& random) {
  const int32_t count = std::min(kTopK, length);
  for (int32_t i = 0; i < kTopK; ++i) {
    const int64_t begin = int64_t{i} * length / count, end = (int64_t{i} + 1) * length / count;
    keys.push_back(i < count ? static_cast<int32_t>(begin + static_cast<int64_t>(random()) %
                                                                std::max<int64_t>(end - begin, 1))
                             : 0);
  }
}

double measure(const std::byte* pages, CacheFormat format, const Shape& shape) {
  struct Memory {
    DeviceArray<int32_t> tables, keys;
  };
  const LatentLayout layout{.format = format};
  const int copies = shape.rows > 256 ? 2 : 12;
  const auto max_pages = static_cast<int32_t>(ceil_div(shape.len, kPageSize));
  std::mt19937 random(2);
  std::vector<Memory> memory;
  std::vector<int32_t> sequences, lengths(static_cast<size_t>(shape.rows), shape.len);
  for (int32_t r = 0; r < shape.rows; ++r) {
    sequences.push_back(r / (shape.rows / shape.sequences));
  }
  std::vector<int32_t> shuffled(kPages);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  for (int copy = 0; copy < copies; ++copy) {
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    std::vector<int32_t> tables, keys;
    for (int64_t i = 0; i < int64_t{shape.sequences} * max_pages; ++i) {
      tables.push_back(shuffled[static_cast<size_t>(i) % shuffled.size()]);
    }
    for (int32_t r = 0; r < shape.rows; ++r) append_list(keys, shape.len, random);
    memory.push_back({DeviceArray<int32_t>(tables), DeviceArray<int32_t>(keys)});
  }
  const DeviceArray<int32_t> its_sequences(sequences), its_lengths(lengths);
  const int64_t heads = int64_t{shape.rows} * shape.heads;
  const auto some = random_bf16(1 << 20, 0.6f, random);
  const auto queries = [&](int64_t count) {
    DeviceArray<uint16_t> q(count);
    for (int64_t at = 0; at < count; at += std::ssize(some)) {
      const auto bytes = static_cast<size_t>(std::min(std::ssize(some), count - at)) * 2;
      check(cudaMemcpy(q.data() + at, some.data(), bytes, cudaMemcpyHostToDevice), "filling");
    }
    return q;
  };
  const auto q_latent = queries(heads * kLatent), q_rope = queries(heads * kRope);
  const DeviceArray<uint16_t> out(heads * kLatent);
  const DeviceArray<float> scratch(
      1 + sparse_latent_scratch_words(shape.rows, shape.heads, kTopK, shape.split_keys));
  return time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    const Memory& its = memory[static_cast<size_t>(copy)];
    sparse_latent_attention(DeviceContext::current().num_multiprocessors(),
                            {.rows = shape.rows,
                             .q_latent = q_latent.data(),
                             .q_rope = q_rope.data(),
                             .pages = pages,
                             .page_stride = layout.page_bytes(),
                             .block_tables = its.tables.data(),
                             .max_pages = max_pages,
                             .sequences = its_sequences.data(),
                             .lengths = its_lengths.data(),
                             .keys = its.keys.data(),
                             .top_k = kTopK,
                             .out = out.data(),
                             .heads = shape.heads,
                             .softmax_scale = kScale,
                             .split_keys = shape.split_keys,
                             .scratch = scratch.data(),
                             .format = format},
                            stream);
  });
}

void run(int argc, char** argv) {
  BenchTable table(argc, argv);
  std::optional<CacheFormat> only;
  for (int i = 1; i < argc; ++i) {
    if (const auto format = parse_cache_format(argv[i])) only = *format;
  }
  std::vector<Shape> shapes;
  for (const int32_t split_keys : {128, 256, 512, 1024, 2048}) {
    for (const int32_t rows : {1, 4, 16, 64, 128}) {
      if (split_keys < 512 && rows > 16) continue;
      shapes.push_back({128, rows, rows, 16384, split_keys});
    }
  }
  for (const int32_t heads : {16, 64}) {
    for (const int32_t rows : {1, 128}) {
      shapes.push_back({heads, rows, rows, 16384, rows == 1 ? 128 : 2048});
    }
  }
  shapes.push_back({128, 256, 128, 16384, 2048});  // two rows a sequence
  // Long compute-bound kernels lower the GPU's clock: they run last.
  for (const int32_t len : {8192, 32768}) {
    shapes.push_back({128, 1024, 1, len, 2048});
    shapes.push_back({64, 4096, 1, len, 2048});
    shapes.push_back({128, 4096, 1, len, 2048});
  }
  for (const int32_t split_keys : {512, 1024}) shapes.push_back({128, 1024, 1, 8192, split_keys});
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    if (only ? *only != format
             : format != CacheFormat::kBF16 && format != CacheFormat::kFp8Scaled) {
      continue;
    }
    const LatentLayout layout{.format = format};
    const DeviceArray<std::byte> pages = make_pages(layout);
    for (const Shape& shape : shapes) {
      // Rows of one sequence share what the cache holds of it.
      const double distinct =
          std::min(shape.keys(), static_cast<double>(shape.sequences) * shape.len);
      table.add("sparse_latent " + std::string(name_of(format)), shape.name(),
                measure(pages.data(), format, shape),
                distinct * static_cast<double>(layout.row_bytes()), shape.flop());
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) { fathom::cuda::run(argc, argv); }
