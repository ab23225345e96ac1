// Attention on this CPU: us a call, GFLOP/s of the multiply-adds that are needed (causal halves are
// not counted), GB/s of the cache rows read. Arguments: absorbed: heads, context, sequences; mha:
// heads, queries, keys (the queries are the last of the keys). d_qk 192, d_v 128, latent 512.
#include <benchmark/benchmark.h>

#include <cstring>

#include "base/random.h"
#include "cache/latent_row.h"
#include "ops/attention/attention.h"

namespace fathom {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kNope = 128, kV = 128;

ThreadPool& pool() {
  static ThreadPool threads(0);
  return threads;
}

// Random values in [-1, 1).
Buffer random_buffer(DType dtype, int64_t count, uint64_t seed) {
  Buffer buffer = *Buffer::allocate(count * size_of(dtype), "a benchmark");
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(2 * random_uniform(seed, 0, i) - 1);
    if (dtype == DType::kBF16) {
      reinterpret_cast<bf16*>(buffer.data())[i] = to_bf16(value);
    } else {
      reinterpret_cast<float*>(buffer.data())[i] = value;
    }
  }
  return buffer;
}

void absorbed(benchmark::State& state, CacheFormat format, DType dtype) {
  const int64_t heads = state.range(0), context = state.range(1), sequences = state.range(2);
  // As many layers as the bundled model has: each call finds its pages as cold as a step does.
  constexpr int64_t kLayers = 8;
  const auto max_pages = static_cast<int32_t>((context + kPageSize) / kPageSize);
  const LatentLayout layout{format, kLatent, kRope};
  const LatentCache cache = *LatentCache::allocate(layout, kLayers, max_pages * sequences);
  std::vector<float> row(kLatent + kRope);
  for (size_t i = 0; i < row.size(); ++i)
    row[i] = static_cast<float>(random_uniform(1, 2, i)) - 0.5f;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const LatentPages pages = cache.layer(layer);
    for (int64_t token = 0; token < pages.num_pages * kPageSize; ++token) {
      row[token % kLatent] = static_cast<float>(random_uniform(3, layer, token)) - 0.5f;
      encode_row(layout, row.data(), row.data() + kLatent,
                 pages.row(token / kPageSize, token % kPageSize));
    }
  }
  std::vector<int32_t> query_start = {0}, contexts, tables, all;
  for (int32_t s = 0; s < sequences; ++s) {
    query_start.push_back(s + 1);
    contexts.push_back(static_cast<int32_t>(context - 1));
    all.push_back(s);
    for (int32_t page = 0; page < max_pages; ++page) tables.push_back(s * max_pages + page);
  }
  const Buffer q_latent = random_buffer(dtype, sequences * heads * kLatent, 1);
  const Buffer q_rope = random_buffer(dtype, sequences * heads * kRope, 2);
  const Buffer out = random_buffer(dtype, sequences * heads * kLatent, 3);
  std::vector<std::byte> workspace(
      absorbed_attention_workspace_bytes(sequences, heads, kLatent, pool().num_threads(), kRope));
  int64_t layer = 0;
  for (auto _ : state) {
    absorbed_attention(Stream(pool()), q_latent.view(dtype, {sequences, heads, kLatent}),
                       q_rope.view(dtype, {sequences, heads, kRope}),
                       {query_start, contexts, tables, max_pages}, all, cache.layer(layer), 0.1f,
                       out.view(dtype, {sequences, heads, kLatent}), workspace);
    layer = (layer + 1) % kLayers;
  }
  const auto pairs = static_cast<double>(sequences * context);
  using benchmark::Counter;
  state.counters["GFLOP/s"] =
      Counter(pairs * static_cast<double>(heads * 2 * (2 * kLatent + kRope)) * 1e-9,
              Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] = Counter(pairs * static_cast<double>(layout.row_bytes()) * 1e-9,
                                   Counter::kIsIterationInvariantRate);
}

void mha(benchmark::State& state, DType dtype) {
  const int64_t heads = state.range(0), queries = state.range(1), keys = state.range(2);
  const Buffer q_nope = random_buffer(dtype, queries * heads * kNope, 1);
  const Buffer q_rope = random_buffer(dtype, queries * heads * kRope, 2);
  const Buffer kv = random_buffer(dtype, keys * heads * (kNope + kV), 3);
  const Buffer k_rope = random_buffer(dtype, keys * kRope, 4);
  const Buffer out = random_buffer(DType::kF32, queries * heads * kV, 5);
  const Buffer lse = random_buffer(DType::kF32, queries * heads, 6);
  std::vector<std::byte> workspace(
      mha_attention_workspace_bytes(heads, kNope + kRope, kV, pool().num_threads()));
  for (auto _ : state) {
    mha_attention(Stream(pool()), q_nope.view(dtype, {queries, heads, kNope}),
                  q_rope.view(dtype, {queries, heads, kRope}),
                  kv.view(dtype, {keys, heads, kNope + kV}), k_rope.view(dtype, {keys, kRope}),
                  keys - queries, 0.07f, out.view(DType::kF32, {queries, heads, kV}),
                  lse.view(DType::kF32, {queries, heads}), workspace);
  }
  const double pairs = static_cast<double>(queries) * static_cast<double>(keys - queries) +
                       static_cast<double>(queries) * static_cast<double>(queries + 1) / 2;
  using benchmark::Counter;
  state.counters["GFLOP/s"] =
      Counter(pairs * static_cast<double>(heads * 2 * (kNope + kRope + kV)) * 1e-9,
              Counter::kIsIterationInvariantRate);
}

void decode_shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t context : {16, 64, 128, 300, 600, 4096}) bench->Args({4, context, 1});
  bench->Args({4, 300, 16})->Args({16, 1024, 1})->Args({16, 1024, 16})->Args({128, 1024, 1});
  bench->Unit(benchmark::kMicrosecond)->UseRealTime();
}

void prefill_shapes(benchmark::internal::Benchmark* bench) {
  bench->Args({4, 64, 64})->Args({4, 512, 512})->Args({4, 2048, 2048})->Args({4, 4096, 4096});
  bench->Args({4, 512, 1536})->Args({16, 512, 512});
  bench->Unit(benchmark::kMicrosecond)->UseRealTime();
}

BENCHMARK_CAPTURE(absorbed, bf16, CacheFormat::kBF16, DType::kBF16)->Apply(decode_shapes);
BENCHMARK_CAPTURE(absorbed, fp8, CacheFormat::kFp8Scaled, DType::kBF16)->Apply(decode_shapes);
BENCHMARK_CAPTURE(absorbed, f32, CacheFormat::kF32, DType::kF32)->Apply(decode_shapes);
BENCHMARK_CAPTURE(mha, bf16, DType::kBF16)->Apply(prefill_shapes);
BENCHMARK_CAPTURE(mha, f32, DType::kF32)->Apply(prefill_shapes);

}  // namespace
}  // namespace fathom
