// The indexer and sparse attention on this CPU, at DeepSeek-V3.2's shape: 64 index heads of 128,
// 2,048 chosen keys, 128 heads of 512 + 64. Arguments: keys that a row sees, rows.
//
// Index scores state the bytes of keys read and the multiply-adds done, and their shares of what
// the probe reads and multiplies in the same process. "layer" is what a layer of a decode step
// computes of these: queries, scores, choice, sparse attention; "dense" is absorbed attention over
// all keys, to compare it with.
#include <benchmark/benchmark.h>

#include <cstring>
#include <numeric>

#include "base/random.h"
#include "bench/probe/probe.h"
#include "cache/index_key_row.h"
#include "cache/latent_row.h"
#include "ops/attention/attention.h"
#include "ops/attention/sparse_attention.h"
#include "ops/indexer/index_keys.h"
#include "ops/indexer/index_scores.h"
#include "ops/indexer/top_keys.h"

namespace fathom {
namespace {

constexpr int64_t kIndexHeads = 64, kIndexDim = 128, kTopKeys = 2048;
constexpr int64_t kHeads = 128, kLatent = 512, kRope = 64;

ThreadPool& pool() {
  static ThreadPool threads(0);
  return threads;
}

struct Limits {
  double read = probe_read(pool(), uncached_bytes());
  double bf16 = probe_math(pool(), ProbeMath::kBF16);
};

const Limits& limits() {
  static const Limits measured;
  return measured;
}

std::vector<float> random_floats(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(2 * random_uniform(seed, 0, i) - 1);
  }
  return values;
}

// One sequence with `rows` new tokens at the end of `length`, pages in order. As many layers as
// make every call find its keys in memory rather than in a cache.
struct Sequence {
  int64_t length, rows;
  int64_t layers = 4;
  std::vector<int32_t> query_start, contexts, table, all = {0};
  std::vector<SparseRow> sparse_rows;

  Sequence(int64_t keys, int64_t new_rows) : length(keys), rows(new_rows) {
    query_start = {0, static_cast<int32_t>(rows)};
    contexts = {static_cast<int32_t>(length - rows)};
    table.resize(static_cast<size_t>((length + kPageSize - 1) / kPageSize));
    std::iota(table.begin(), table.end(), 0);
    for (int32_t i = 0; i < rows; ++i) sparse_rows.push_back({i, 0, contexts[0] + i + 1});
  }
  PagedBatch batch() const {
    return {query_start, contexts, table, static_cast<int32_t>(table.size())};
  }
};

struct IndexData {
  IndexKeyLayout layout{IndexKeyFormat::kE4M3, kIndexDim};
  std::vector<std::byte> memory;
  std::vector<e4m3> values;
  std::vector<float> weights, scores;
  std::vector<int32_t> keys;
  std::vector<std::byte> score_workspace, top_workspace;
  int64_t rows, columns;

  explicit IndexData(const Sequence& sequence, IndexKeyFormat format = IndexKeyFormat::kE4M3)
      : layout{format, kIndexDim}, rows(sequence.rows), columns(sequence.length) {
    const auto pages = std::ssize(sequence.table);
    memory.resize(static_cast<size_t>(sequence.layers * pages * layout.page_bytes()));
    std::vector<float> key = random_floats(kIndexDim, 1);
    for (int64_t token = 0; token < sequence.layers * pages * kPageSize; ++token) {
      key[token % kIndexDim] = static_cast<float>(random_uniform(2, 0, token)) - 0.5f;
      encode_index_key(layout, key.data(), memory.data() + token * layout.row_bytes());
    }
    for (const float value : random_floats(rows * kIndexHeads * kIndexDim, 3)) {
      values.push_back(to_e4m3(value * 400));
    }
    weights = random_floats(rows * kIndexHeads, 4);
    scores.resize(static_cast<size_t>(rows * columns));
    keys.resize(static_cast<size_t>(rows * kTopKeys));
    score_workspace.resize(static_cast<size_t>(
        index_scores_workspace_bytes(rows, kIndexHeads, kIndexDim, pool().num_threads())));
    top_workspace.resize(
        static_cast<size_t>(top_keys_workspace_bytes(columns, pool().num_threads())));
  }

  void score(const Sequence& sequence, int64_t layer) {
    const auto pages = std::ssize(sequence.table);
    index_scores(
        Stream(pool()), ConstTensorView(values.data(), {rows, kIndexHeads, kIndexDim}),
        ConstTensorView(weights.data(), {rows, kIndexHeads}), sequence.batch(),
        sequence.sparse_rows,
        {layout, memory.data() + layer * pages * layout.page_bytes(), pages, layout.page_bytes()},
        TensorView(scores.data(), {rows, columns}), score_workspace);
  }

  void choose(const Sequence& sequence) {
    select_top_keys(Stream(pool()), ConstTensorView(scores.data(), {rows, columns}),
                    sequence.sparse_rows, 0, TensorView(keys.data(), {rows, kTopKeys}),
                    top_workspace);
  }
};

void index_scores_bench(benchmark::State& state) {
  const Sequence sequence(state.range(0), state.range(1));
  IndexData data(sequence);
  limits();
  int64_t layer = 0;
  for (auto _ : state) {
    data.score(sequence, layer);
    layer = (layer + 1) % sequence.layers;
  }
  using benchmark::Counter;
  const double keys = static_cast<double>(sequence.rows) * static_cast<double>(sequence.length);
  const double bytes = static_cast<double>(sequence.length * data.layout.row_bytes());
  const double flops = keys * 2 * kIndexHeads * kIndexDim;
  state.counters["GB/s"] = Counter(bytes * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["of_read"] = Counter(bytes / limits().read, Counter::kIsIterationInvariantRate);
  state.counters["GFLOP/s"] = Counter(flops * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["of_bf16"] = Counter(flops / limits().bf16, Counter::kIsIterationInvariantRate);
}

void top_keys_bench(benchmark::State& state) {
  const Sequence sequence(state.range(0), state.range(1));
  IndexData data(sequence);
  data.score(sequence, 0);
  for (auto _ : state) data.choose(sequence);
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(sequence.rows * sequence.length) * 4e-9,
                         benchmark::Counter::kIsIterationInvariantRate);
}

void index_queries_bench(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const RopeTable table = make_rope_table(64, 10000, {});
  const std::vector<float> q = random_floats(rows * kIndexHeads * kIndexDim, 1);
  const std::vector<float> head_weights = random_floats(rows * kIndexHeads, 2);
  std::vector<int32_t> positions(static_cast<size_t>(rows));
  std::iota(positions.begin(), positions.end(), 3000);
  std::vector<e4m3> values(q.size());
  std::vector<float> weights(head_weights.size());
  for (auto _ : state) {
    make_index_queries(Stream(pool()), ConstTensorView(q.data(), {rows, kIndexHeads, kIndexDim}),
                       ConstTensorView(head_weights.data(), {rows, kIndexHeads}), positions,
                       {&table}, TensorView(values.data(), {rows, kIndexHeads, kIndexDim}),
                       TensorView(weights.data(), {rows, kIndexHeads}));
  }
}

struct AttentionData {
  LatentCache cache;
  std::vector<bf16> q_latent, q_rope;
  std::vector<float> out;
  std::vector<std::byte> workspace;
  int64_t rows;

  AttentionData(const Sequence& sequence, CacheFormat format)
      : cache(*LatentCache::allocate({format, kLatent, kRope}, sequence.layers,
                                     std::ssize(sequence.table))),
        rows(sequence.rows) {
    std::vector<float> row = random_floats(kLatent + kRope, 5);
    for (int64_t layer = 0; layer < sequence.layers; ++layer) {
      const LatentPages pages = cache.layer(layer);
      for (int64_t token = 0; token < pages.num_pages * kPageSize; ++token) {
        row[token % kLatent] = static_cast<float>(random_uniform(6, layer, token)) - 0.5f;
        encode_row(pages.layout, row.data(), row.data() + kLatent,
                   pages.row(token / kPageSize, token % kPageSize));
      }
    }
    for (const float value : random_floats(rows * kHeads * kLatent, 7)) {
      q_latent.push_back(to_bf16(value));
    }
    for (const float value : random_floats(rows * kHeads * kRope, 8)) {
      q_rope.push_back(to_bf16(value));
    }
    out.resize(static_cast<size_t>(rows * kHeads * kLatent));
    workspace.resize(static_cast<size_t>(std::max(
        sparse_attention_workspace_bytes(rows, kHeads, kLatent, pool().num_threads(), kRope),
        absorbed_attention_workspace_bytes(rows, kHeads, kLatent, pool().num_threads(), kRope))));
  }

  ConstTensorView latent() const { return {q_latent.data(), {rows, kHeads, kLatent}}; }
  ConstTensorView rope() const { return {q_rope.data(), {rows, kHeads, kRope}}; }
  TensorView result() { return {out.data(), {rows, kHeads, kLatent}}; }
};

void dense_bench(benchmark::State& state, CacheFormat format) {
  const Sequence sequence(state.range(0), state.range(1));
  AttentionData data(sequence, format);
  int64_t layer = 0;
  for (auto _ : state) {
    absorbed_attention(Stream(pool()), data.latent(), data.rope(), sequence.batch(), sequence.all,
                       data.cache.layer(layer), 0.1f, data.result(), data.workspace);
    layer = (layer + 1) % sequence.layers;
  }
}

void layer_bench(benchmark::State& state, CacheFormat format) {
  const Sequence sequence(state.range(0), state.range(1));
  AttentionData data(sequence, format);
  IndexData index(sequence);
  const RopeTable table = make_rope_table(64, 10000, {});
  const std::vector<float> q = random_floats(sequence.rows * kIndexHeads * kIndexDim, 1);
  const std::vector<float> head_weights = random_floats(sequence.rows * kIndexHeads, 2);
  std::vector<int32_t> positions(static_cast<size_t>(sequence.rows));
  std::iota(positions.begin(), positions.end(), sequence.contexts[0]);
  int64_t layer = 0;
  for (auto _ : state) {
    make_index_queries(
        Stream(pool()), ConstTensorView(q.data(), {sequence.rows, kIndexHeads, kIndexDim}),
        ConstTensorView(head_weights.data(), {sequence.rows, kIndexHeads}), positions, {&table},
        TensorView(index.values.data(), {sequence.rows, kIndexHeads, kIndexDim}),
        TensorView(index.weights.data(), {sequence.rows, kIndexHeads}));
    index.score(sequence, layer);
    index.choose(sequence);
    sparse_attention(Stream(pool()), data.latent(), data.rope(), sequence.batch(),
                     sequence.sparse_rows,
                     ConstTensorView(index.keys.data(), {sequence.rows, kTopKeys}),
                     data.cache.layer(layer), 0.1f, data.result(), {}, data.workspace);
    layer = (layer + 1) % sequence.layers;
  }
}

void shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t keys : {4096, 16'384, 65'536}) bench->Args({keys, 1});
  bench->Unit(benchmark::kMicrosecond)->UseRealTime();
}

BENCHMARK(index_scores_bench)
    ->Apply(shapes)
    ->Args({163'840, 1})
    ->Args({16'384, 4})
    ->Args({4096, 64});
BENCHMARK(top_keys_bench)->Apply(shapes)->Args({163'840, 1})->Args({4096, 64});
BENCHMARK(index_queries_bench)->Arg(1)->Arg(64)->Unit(benchmark::kMicrosecond)->UseRealTime();
BENCHMARK_CAPTURE(dense_bench, bf16, CacheFormat::kBF16)->Apply(shapes);
BENCHMARK_CAPTURE(layer_bench, bf16, CacheFormat::kBF16)->Apply(shapes);
BENCHMARK_CAPTURE(dense_bench, fp8, CacheFormat::kFp8Scaled)
    ->Args({16'384, 1})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(layer_bench, fp8, CacheFormat::kFp8Scaled)
    ->Args({16'384, 1})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

}  // namespace
}  // namespace fathom
