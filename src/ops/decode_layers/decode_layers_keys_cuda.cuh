// Scores and weighted sums of one warp over keys of one head, for decode_layers_cuda.cu.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "ops/scaled_linear/row_products_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// Reduces up to 16 values over the warp, with fewer shuffles than a reduction of each: a lane gets
// the sum of value lane / (32 / kCount).
template <int kCount>
__device__ inline float sum_of_each(const float (&values)[kCount], int lane) {
  static_assert(kCount <= 16 && (kCount & (kCount - 1)) == 0);
  float x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = values[i];
  int distance = kWarp / 2;
#pragma unroll
  for (int count = kCount / 2; count > 0; count /= 2, distance /= 2) {
    const bool is_high = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      x[i] = (is_high ? x[i + count] : x[i]) +
             __shfl_xor_sync(~0u, is_high ? x[i] : x[i + count], distance);
    }
  }
  float sum = x[0];
#pragma unroll
  for (; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

// A lane's sixteen values of a key as pairs of 16 bits.
template <typename Row>
__device__ inline void load_pairs(const std::byte* row, int lane, uint32_t (&pairs)[8]) {
  if constexpr (Row::kIsBf16) {
    const uint4 a = reinterpret_cast<const uint4*>(row)[lane * 2],
                b = reinterpret_cast<const uint4*>(row)[lane * 2 + 1];
    const uint32_t all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) pairs[j] = all[j];
  } else {
    const uint4 a = reinterpret_cast<const uint4*>(row)[lane];
    const uint32_t all[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[2 * j] = fp8_to_f16<Row::kType>(static_cast<uint16_t>(all[j]));
      pairs[2 * j + 1] = fp8_to_f16<Row::kType>(static_cast<uint16_t>(all[j] >> 16));
    }
  }
}
template <typename Row>
__device__ inline float2 widen_pair(uint32_t pair) {
  if constexpr (Row::kIsBf16) return {low_bf16(pair), high_bf16(pair)};
  return widen_f16(pair);
}
template <typename Row>
__device__ inline float2 load_rope(const std::byte* row, int lane) {
  const std::byte* const from = row + Row::kRopeAt;
  if constexpr (Row::kRopeIsBf16) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(from)[lane];
    return {low_bf16(pair), high_bf16(pair)};
  }
  return widen_f16(fp8_to_f16<Row::kType>(reinterpret_cast<const uint16_t*>(from)[lane]));
}
template <typename Row>
__device__ inline float load_scale(const std::byte* row, int lane) {
  if constexpr (Row::kIsScaled) {
    return reinterpret_cast<const float*>(row + Row::kScalesAt)[lane / 8];
  }
  return 1;
}

// A warp's running softmax sums over keys; each lane has sixteen columns.
struct KeySum {
  float most = -INFINITY, total = 0, out[16] = {};
};

// `rows`: keys in shared memory; null means no key. `query`: a lane's sixteen values of the latent
// part, in the type that the keys multiply in, with their scale; `q_rope`: two values of the rotary
// part.
template <typename Row, int kBatch>
__device__ inline void add_keys(const std::byte* const (&rows)[kBatch], const Sixteen& query,
                                float query_scale, float2 q_rope, int lane, KeySum& sum) {
  const uint32_t x[8] = {query.low.x,  query.low.y,  query.low.z,  query.low.w,
                         query.high.x, query.high.y, query.high.z, query.high.w};
  uint32_t pairs[kBatch + 1][8];
  float scales[kBatch], scores[kBatch];
#pragma unroll
  for (int j = 0; j < 8; ++j) pairs[kBatch][j] = 0;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    scales[i] = 0;
    scores[i] = 0;
    if (rows[i] == nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) pairs[i][j] = 0;
      continue;
    }
    load_pairs<Row>(rows[i], lane, pairs[i]);
    scales[i] = load_scale<Row>(rows[i], lane);
    const float2 rope = load_rope<Row>(rows[i], lane);
    scores[i] = rope.x * q_rope.x + rope.y * q_rope.y;
  }
#pragma unroll
  for (int i = 0; i < kBatch; i += 2) {
    float d[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t two[4] = {pairs[i][2 * j], pairs[i + 1][2 * j], pairs[i][2 * j + 1],
                               pairs[i + 1][2 * j + 1]};
      if constexpr (Row::kIsBf16) {
        warp_mma_16x8x16(d[j % 2], two, {x[2 * j], x[2 * j + 1]});
      } else {
        warp_mma_16x8x16_f16(d[j % 2], two, {x[2 * j], x[2 * j + 1]});
      }
    }
    const bool odd = (lane & 4) != 0, diagonal = is_on_diagonal(lane);
#pragma unroll
    for (int j = 0; j < 2 && i + j < kBatch; ++j) {
      const float value = odd ? d[0][2 * j + 1] + d[1][2 * j + 1] : d[0][2 * j] + d[1][2 * j];
      if (diagonal) scores[i + j] += value * (scales[i + j] * query_scale);
    }
  }
  float most = sum.most;
  const float score = sum_of_each(scores, lane);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    scores[i] = __shfl_sync(~0u, score, i * (kWarp / kBatch));
    if (rows[i] == nullptr) scores[i] = -INFINITY;
    most = fmaxf(most, scores[i]);
  }
  const float before = sum.most == most ? 1 : exp2_fast(sum.most - most);
  sum.most = most;
  sum.total *= before;
#pragma unroll
  for (float& value : sum.out) value *= before;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const float probability = rows[i] == nullptr ? 0 : exp2_fast(scores[i] - most),
                factor = probability * scales[i];
    sum.total += probability;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 values = widen_pair<Row>(pairs[i][j]);
      sum.out[2 * j] = fmaf(factor, values.x, sum.out[2 * j]);
      sum.out[2 * j + 1] = fmaf(factor, values.y, sum.out[2 * j + 1]);
    }
  }
}

}  // namespace fathom::cuda::decode_layers_kernel
