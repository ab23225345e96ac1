#include <algorithm>
#include <cmath>
#include <vector>

#include "cache/index_key_quantize.h"
#include "ops/indexer/hadamard.h"
#include "ops/indexer/indexer_cpu.h"
#include "ops/rope/rope_cpu.h"

namespace fathom::cpu {
namespace {

// Below this many values a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelValues = 8192;

constexpr int kSumLanes = 16;  // of a sum: the compiler vectorises it, in the same order everywhere

template <typename Value>
[[gnu::always_inline]] inline float sum_of(int64_t n, const Value& value) {
  float lanes[kSumLanes] = {};
  int64_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += value(i);
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias
[[gnu::always_inline]] inline void layer_norm(const float* x, int64_t n, const float* weight,
                                              const float* bias, float eps, float* out) {
  const auto count = static_cast<float>(n);
  const float mean = sum_of(n, [x](int64_t i) { return x[i]; }) / count;
  const float variance =
      sum_of(n, [x, mean](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / count;
  const float scale = 1.0f / __builtin_sqrtf(variance + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// x [dim] in place; cos_sin [rope / 2, 2].
[[gnu::always_inline]] inline void rotate(float* x, const float* cos_sin, int64_t rope,
                                          bool interleaved) {
  const int64_t half = rope / 2;
  const int64_t pair = interleaved ? 2 : 1;      // from a pair's first value to the next pair's
  const int64_t other = interleaved ? 1 : half;  // from a pair's first value to its second
  for (int64_t i = 0; i < half; ++i) {
    const float cos = cos_sin[2 * i], sin = cos_sin[2 * i + 1];
    const float a = x[i * pair], b = x[i * pair + other];
    x[i * pair] = a * cos - b * sin;
    x[i * pair + other] = a * sin + b * cos;
  }
}

// What is done to a row after its norm, in place.
[[gnu::always_inline]] inline void transform(float* x, int64_t dim, const float* cos_sin,
                                             const IndexRotation& rotation) {
  const int64_t rope = rotation.table->dim();
  if (rotation.interleaved) {
    rotate(x, cos_sin, rope, true);
  } else {
    rotate(x, cos_sin, rope, false);
  }
  if (rotation.hadamard) hadamard(x, dim);
}

struct KeyRow {
  const float* x;
  const float* weight;
  const float* bias;
  float eps;
  const float* cos_sin;
  float* out;  // [dim]
};

[[gnu::always_inline]] inline void make_key(const KeyRow& row, int64_t dim,
                                            const IndexRotation& rotation) {
  layer_norm(row.x, dim, row.weight, row.bias, row.eps, row.out);
  transform(row.out, dim, row.cos_sin, rotation);
}

void make_key_portable(const KeyRow& row, int64_t dim, const IndexRotation& rotation) {
  make_key(row, dim, rotation);
}

FATHOM_FOR_AVX512 void make_key_avx512(const KeyRow& row, int64_t dim,
                                       const IndexRotation& rotation) {
  make_key(row, dim, rotation);
}

// One head of one row: x [dim], changed in place, to `values`; returns the head's scale.
[[gnu::always_inline]] inline float make_query(float* x, int64_t dim, const float* cos_sin,
                                               const IndexRotation& rotation, DType dtype,
                                               void* values) {
  transform(x, dim, cos_sin, rotation);
  switch (dtype) {
    case DType::kF8E4M3:
      return quantize_index_row(x, dim, static_cast<uint8_t*>(values));
    case DType::kBF16:
      for (int64_t i = 0; i < dim; ++i) static_cast<bf16*>(values)[i] = to_bf16(x[i]);
      return 1;
    default:
      std::copy_n(x, dim, static_cast<float*>(values));
      return 1;
  }
}

float make_query_portable(float* x, int64_t dim, const float* cos_sin,
                          const IndexRotation& rotation, DType dtype, void* values) {
  return make_query(x, dim, cos_sin, rotation, dtype, values);
}

FATHOM_FOR_AVX512 float make_query_avx512(float* x, int64_t dim, const float* cos_sin,
                                          const IndexRotation& rotation, DType dtype,
                                          void* values) {
  return make_query(x, dim, cos_sin, rotation, dtype, values);
}

}  // namespace

void write_index_keys(ThreadPool& pool, CpuIsa isa, ConstTensorView k,
                      std::span<const int32_t> positions, std::span<const int64_t> slots,
                      const IndexNorm& norm, const IndexRotation& rotation,
                      const IndexKeyPages& pages) {
  const int64_t dim = pages.layout.dim;
  const auto key_kernel = isa >= CpuIsa::kAvx512 ? make_key_avx512 : make_key_portable;
  pool.parallel_for(
      k.size(0), std::max<int64_t>(1, kParallelValues / dim), [&](int64_t begin, int64_t end) {
        std::vector<float> scratch;
        std::vector<float> key(static_cast<size_t>(dim));
        for (int64_t row = begin; row < end; ++row) {
          const auto at = static_cast<size_t>(row);
          key_kernel({k.row<float>(row), norm.weight.data<float>(), norm.bias.data<float>(),
                      norm.eps, cos_sin_of(*rotation.table, positions[at], scratch), key.data()},
                     dim, rotation);
          encode_index_key(pages.layout, key.data(),
                           pages.row(slots[at] / kPageSize, slots[at] % kPageSize));
        }
      });
}

void make_index_queries(ThreadPool& pool, CpuIsa isa, ConstTensorView q,
                        ConstTensorView head_weights, std::span<const int32_t> positions,
                        const IndexRotation& rotation, TensorView values, TensorView weights) {
  const int64_t heads = q.size(1), dim = q.size(2);
  const auto query_kernel = isa >= CpuIsa::kAvx512 ? make_query_avx512 : make_query_portable;
  const auto constant = static_cast<float>(1 / std::sqrt(static_cast<double>(heads * dim)));
  // Items are (row, head): decode has one row.
  const int64_t grain = std::max<int64_t>(1, kParallelValues / dim);
  pool.parallel_for(q.size(0) * heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    std::vector<float> x(static_cast<size_t>(dim));
    const float* cos_sin = nullptr;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / heads, head = item % heads;
      if (cos_sin == nullptr || head == 0) {
        cos_sin = cos_sin_of(*rotation.table, positions[static_cast<size_t>(row)], scratch);
      }
      std::copy_n(q.row<float>(row) + head * q.stride(1), dim, x.data());
      auto* out = static_cast<std::byte*>(values.raw()) +
                  (row * values.stride(0) + head * values.stride(1)) * size_of(values.dtype());
      const float scale = query_kernel(x.data(), dim, cos_sin, rotation, values.dtype(), out);
      weights.row<float>(row)[head] = head_weights.row<float>(row)[head] * constant * scale;
    }
  });
}

}  // namespace fathom::cpu
