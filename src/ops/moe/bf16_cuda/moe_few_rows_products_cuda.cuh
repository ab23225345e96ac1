// Shared by the wgmma code of the launches of moe_few_rows_work_cuda.cuh.
#pragma once

#include <cuda_bf16.h>

#include "base/math_constants.h"
#include "device/cuda/cluster.cuh"
#include "ops/moe/bf16_cuda/moe_few_rows_work_cuda.cuh"

namespace fathom::cuda::few_tokens {

__device__ inline float swiglu(float gate, float up) {
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

// Calls f with the N of the smallest wgmma that covers so many tokens.
template <typename F>
__device__ void with_columns(int tokens, F&& f) {
  if (tokens <= 8) {
    f.template operator()<8>();
  } else if (tokens <= 16) {
    f.template operator()<16>();
  } else if (tokens <= 32) {
    f.template operator()<32>();
  } else {
    f.template operator()<64>();
  }
}

// The token of a thread's i-th accumulator column.
__device__ inline int column_of(int lane, int i) { return i / 2 * 8 + 2 * (lane % 4) + i % 2; }

// Reduces this CTA's share of the cluster's rows and columns once all CTAs of the cluster have
// their sums: kTurns times [rows, kStride] each. Runs on the CTA's first kThreads threads.
template <int kThreads, int kStride, int kTurns, typename Arguments>
__device__ void write_out(const Arguments& a, const DownShare& share, const float* sums) {
  const int vectors = 2 * share.num_groups;  // vectors of four columns in a row
  const int all = a.rows * vectors, end = all * (share.rank + 1) / a.splits;
  for (int i = all * share.rank / a.splits + threadIdx.x; i < end; i += kThreads) {
    const int row = i / vectors, column = i % vectors * 4;
    const uint32_t address = shared_address(sums + row * kStride + column);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int block = 0; block < a.splits; ++block) {
      for (int turn = 0; turn < kTurns; ++turn) {
        const float4 part =
            load_from_block(address_in_block(address + turn * a.rows * (kStride * 4), block));
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
    }
    const int64_t at = static_cast<int64_t>(row) * a.hidden + share.first_group * 8 + column;
    if (a.f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.out) + at) = sum;
    } else {
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + at) =
          make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
  }
}

}  // namespace fathom::cuda::few_tokens
