// Times of the indexer's operations on a GPU, at DeepSeek-V3.2's sizes: 64 heads of 128, 2,048
// keys. usage: indexer_cuda_bench [--json]
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/math.h"
#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/indexer/index_keys_cuda.h"
#include "ops/indexer/index_scores_cuda.h"
#include "ops/indexer/top_keys_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kHeads = 64;
constexpr int32_t kTopKeys = 2048;

// As many copies as fill the L2 several times over.
int copies_of(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / bytes, 1, 61));
}

std::vector<uint8_t> random_codes(int64_t count, std::mt19937& random) {
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) {
    code = static_cast<uint8_t>(random() & 0xBF);  // finite, below 2
  }
  return codes;
}

// With the codes again and again.
void fill(const DeviceArray<std::byte>& memory, const std::vector<uint8_t>& codes) {
  for (int64_t at = 0; at < memory.size(); at += std::ssize(codes)) {
    const auto count = static_cast<size_t>(std::min(std::ssize(codes), memory.size() - at));
    check(cudaMemcpy(memory.data() + at, codes.data(), count, cudaMemcpyHostToDevice),
          "filling memory");
  }
}

struct Rows {
  int64_t rows, keys, sequences;
  std::vector<int32_t> lengths, starts, tables;
};

// `sequences` of `keys` keys, the last rows / sequences of which are the step's.
Rows rows_of(int64_t rows, int64_t sequences, int64_t keys) {
  Rows out{rows, keys, sequences, {}, {}, {}};
  const int64_t pages = ceil_div(keys, kPageSize), each = rows / sequences;
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t i = 0; i < each; ++i) {
      out.lengths.push_back(static_cast<int32_t>(keys - each + i + 1));
      out.starts.push_back(static_cast<int32_t>(s * pages));
    }
    for (int64_t page = 0; page < pages; ++page) {
      out.tables.push_back(static_cast<int32_t>(s * pages + (page * 37 + 11) % pages));
    }
  }
  return out;
}

// `most_keys`: the columns, as of a graph for longer contexts.
void bench_scores(BenchTable& table, int64_t rows, int64_t sequences, int64_t keys,
                  int64_t most_keys, int sms) {
  std::mt19937 random(1);
  const Rows of = rows_of(rows, sequences, keys);
  const int64_t pages = std::ssize(of.tables), bytes = pages * kIndexPageBytes;
  const int copies = copies_of(bytes);
  const DeviceArray<std::byte> cache(copies * bytes);
  fill(cache, random_codes(int64_t{1} << 22, random));  // scales too
  const DeviceArray<uint8_t> values(random_codes(rows * kHeads * kIndexDim, random));
  const DeviceArray<float> weights(random_f32(rows * kHeads, 0.1f, random));
  const DeviceArray<int32_t> lengths(of.lengths), starts(of.starts), tables(of.tables);
  const int64_t columns = round_up(most_keys, int64_t{16});
  const DeviceArray<float> scores(rows * columns);
  const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    index_scores({.values = values.data(),
                  .weights = weights.data(),
                  .lengths = lengths.data(),
                  .table_starts = starts.data(),
                  .block_tables = tables.data(),
                  .pages = {cache.data() + copy * bytes, kIndexPageBytes},
                  .scores = scores.data(),
                  .columns = columns,
                  .rows = static_cast<int32_t>(rows),
                  .heads = kHeads,
                  .dense_keys = kTopKeys},
                 sms, stream);
  });
  const double pairs = std::accumulate(of.lengths.begin(), of.lengths.end(), 0.0);
  table.add("index_scores",
            std::to_string(rows) + " rows, " + std::to_string(sequences) + " x " +
                std::to_string(keys) + " keys of " + std::to_string(most_keys),
            us, static_cast<double>(bytes) + 4 * pairs, pairs * 2 * kHeads * kIndexDim);
}

void bench_choice(BenchTable& table, int64_t rows, int64_t keys, int64_t most_keys) {
  std::mt19937 random(2);
  const int64_t columns = round_up(most_keys, int64_t{16});
  std::vector<float> values(static_cast<size_t>(rows * columns));
  std::normal_distribution<float> normal(0, 1);
  for (float& value : values) value = normal(random);
  const DeviceArray<float> scores(values);
  const DeviceArray<int32_t> lengths(
      std::vector<int32_t>(static_cast<size_t>(rows), static_cast<int32_t>(keys)));
  const DeviceArray<int32_t> lists(rows * kTopKeys);
  const double us = time_in_graph(20, [&](int, cudaStream_t stream) {
    select_top_keys({.scores = scores.data(),
                     .columns = columns,
                     .lengths = lengths.data(),
                     .keys = lists.data(),
                     .rows = static_cast<int32_t>(rows),
                     .k = kTopKeys},
                    stream);
  });
  table.add("select_top_keys",
            std::to_string(rows) + " rows of " + std::to_string(keys) + " keys of " +
                std::to_string(most_keys),
            us, static_cast<double>(rows) * 4 * static_cast<double>(keys + kTopKeys));
}

void bench_sides(BenchTable& table, int64_t rows) {
  std::mt19937 random(3);
  constexpr int64_t kStride = 1536 + kIndexDim + 576, kPages = 256;
  const DeviceArray<uint16_t> k(random_bf16(rows * kStride, 1, random));
  const DeviceArray<uint16_t> q(random_bf16(rows * kHeads * kIndexDim, 1, random));
  const DeviceArray<float> norm(random_f32(kIndexDim, 1, random)),
      head_weights(random_f32(rows * kHeads, 1, random)), cos_sin(random_f32(8192 * 64, 1, random)),
      weights(rows * kHeads);
  std::vector<int32_t> at(static_cast<size_t>(rows));
  std::vector<int64_t> slot(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) at[i] = static_cast<int32_t>(4000 + i % 4000), slot[i] = i;
  const DeviceArray<int32_t> positions(at);
  const DeviceArray<int64_t> slots(slot);
  const DeviceArray<std::byte> pages(kPages * kIndexPageBytes);
  const DeviceArray<uint8_t> values(rows * kHeads * kIndexDim);
  const std::string shape = std::to_string(rows) + " rows";
  table.add("write_index_keys", shape,
            time_in_graph(20,
                          [&](int, cudaStream_t stream) {
                            write_index_keys({.k = k.data(),
                                              .k_stride = kStride,
                                              .norm_weight = norm.data(),
                                              .norm_bias = norm.data(),
                                              .cos_sin = cos_sin.data(),
                                              .positions = positions.data(),
                                              .slots = slots.data(),
                                              .pages = {pages.data(), kIndexPageBytes},
                                              .rows = rows},
                                             stream);
                          }),
            static_cast<double>(rows) * (2 * kIndexDim + 132));
  table.add("make_index_queries", shape,
            time_in_graph(20,
                          [&](int, cudaStream_t stream) {
                            make_index_queries({.q = q.data(),
                                                .head_weights = head_weights.data(),
                                                .cos_sin = cos_sin.data(),
                                                .positions = positions.data(),
                                                .values = values.data(),
                                                .weights = weights.data(),
                                                .rows = rows,
                                                .heads = kHeads},
                                               stream);
                          }),
            static_cast<double>(rows) * kHeads * (3 * kIndexDim + 8));
}

void run(int argc, char** argv) {
  BenchTable table(argc, argv);
  const int sms = DeviceContext::current().budget().sms;
  constexpr int64_t kK = 1024;
  for (const int64_t rows : {1, 16, 128}) bench_sides(table, rows);
  bench_sides(table, 4096);
  for (const int64_t keys : {16 * kK, 64 * kK, 128 * kK}) {
    for (const int64_t rows : {1, 4, 16}) bench_scores(table, rows, rows, keys, keys, sms);
    bench_scores(table, 4, 1, keys, keys, sms);  // a window of four rows
  }
  bench_scores(table, 128, 128, 8 * kK, 8 * kK, sms);
  bench_scores(table, 1, 1, 16 * kK, 160 * kK, sms);  // a graph of longer contexts
  bench_scores(table, 128, 128, kK, 160 * kK, sms);   // all rows leave
  bench_scores(table, 2048, 1, 8 * kK, 8 * kK, sms);  // prompts, as DeepGEMM's table has them
  bench_scores(table, 4096, 1, 32 * kK, 32 * kK, sms);
  for (const int64_t rows : {1, 4, 32, 128}) {
    for (const int64_t keys : {4 * kK, 16 * kK, 32 * kK, 64 * kK, 128 * kK, 160 * kK}) {
      if (rows * keys > 4 * kK * kK) continue;
      bench_choice(table, rows, keys, keys);
    }
  }
  bench_choice(table, 4, 16 * kK, 160 * kK);
  bench_choice(table, 1, kK, 160 * kK);
  bench_choice(table, 128, kK, 160 * kK);
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::run(argc, argv);
  return 0;
}
