// Combine of the splits of sparse latent attention, by log-sum-exp, in order of their number: the
// launch after the one that computes them. Its CTAs divide rows, and each row's columns, so that
// one row occupies many SMs.
#pragma once

#include <cuda_bf16.h>

#include "base/math_constants.h"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "ops/attention/sparse_latent_cuda/sparse_latent_units_cuda.cuh"

namespace fathom::cuda::sparse_latent {

constexpr int kCombineThreads = 128;

struct CombineArguments {
  const float* sums;     // [rows, splits, blocks, 4 * kVectors]: pairs of bf16, in Layout's order
  const float* weights;  // [rows, splits, blocks, kRows]: log2 of sums of exponentials
  __nv_bfloat16* out;
  float weight_bias;  // of the weights
};

// A thread has one vector of a row's tile of heads: two heads, and two pairs of columns of each.
// Layout is described at JoinedShare (latent_decode_join_cuda.cuh).
template <typename Layout>
__global__ void __launch_bounds__(kCombineThreads)
    sparse_latent_combine_kernel(const __grid_constant__ Lists lists,
                                 const __grid_constant__ CombineArguments arguments) {
  constexpr int64_t kLatent = 512;
  let_next_launch_begin();
  wait_for_earlier_launches();
  const int row = blockIdx.x, block = blockIdx.y, blocks = gridDim.y;
  const int count = min(lists.lengths[row], lists.top_k);
  const int splits = (count + lists.split_keys - 1) / lists.split_keys;
  if (splits < 2) return;
  const int vector = static_cast<int>(blockIdx.z) * kCombineThreads + threadIdx.x;
  const int64_t first = int64_t{row} * lists.splits * blocks + block;
  const float* const weights =
      arguments.weights + first * Layout::kRows + Layout::weight_at(vector);
  const float* const sums = arguments.sums + (first * Layout::kVectors + vector) * 4;
  const auto weight_of = [&](int split) {
    return *reinterpret_cast<const float2*>(weights + int64_t{split} * blocks * Layout::kRows);
  };
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int split = 0; split < splits; ++split) {
    const float2 weight = weight_of(split);
    largest[0] = fmaxf(largest[0], weight.x);
    largest[1] = fmaxf(largest[1], weight.y);
  }
  float value[8] = {};
  const int last = FATHOM_PLANTED(lists, kLostSplit) ? splits - 1 : splits;
#pragma unroll 4
  for (int split = 0; split < last; ++split) {
    const float2 weight = weight_of(split);
    const float4 words =
        *reinterpret_cast<const float4*>(sums + int64_t{split} * blocks * (4 * Layout::kVectors));
    const float factor[2] = {exp2_fast(weight.x - largest[0]), exp2_fast(weight.y - largest[1])};
    const float word[4] = {words.x, words.y, words.z, words.w};
    total[0] += factor[0];
    total[1] += factor[1];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t bits = __float_as_uint(word[w]);
      value[2 * w] += factor[w % 2] * __uint_as_float(bits << 16);
      value[2 * w + 1] += factor[w % 2] * __uint_as_float(bits & 0xFFFF0000u);
    }
  }
  const int first_column = Layout::column_of(vector);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int head = block * Layout::kRows + Layout::row_of(vector) + w % 2 * Layout::kSecondRow;
    if (head >= lists.heads) continue;
    static_assert(Layout::kPairColumn == 1);
    const float inverse = reciprocal_fast(total[w % 2]);
    *reinterpret_cast<uint32_t*>(arguments.out + (int64_t{row} * lists.heads + head) * kLatent +
                                 first_column + w / 2 * Layout::kSecondColumn) =
        pack_bf16(value[2 * w] * inverse, value[2 * w + 1] * inverse);
    if (lists.lse != nullptr && w < 2 && first_column == 0) {
      constexpr float kLn2 = 0.6931471805599453f;
      lists.lse[int64_t{row} * lists.heads + head] =
          (largest[w] + log2_fast(total[w]) - arguments.weight_bias) * kLn2;
    }
  }
}

template <typename Layout>
void combine_splits(const Lists& lists, const CombineArguments& arguments, int blocks,
                    GpuStream stream) {
  static_assert(Layout::kVectors % kCombineThreads == 0);
  launch(sparse_latent_combine_kernel<Layout>,
         {.blocks = dim3(static_cast<unsigned>(lists.rows), static_cast<unsigned>(blocks),
                         Layout::kVectors / kCombineThreads),
          .threads = kCombineThreads},
         stream, lists, arguments);
}

}  // namespace fathom::cuda::sparse_latent
