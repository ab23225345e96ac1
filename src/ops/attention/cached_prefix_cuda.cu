// What: rows of the paged latent cache copied to dense matrices in bf16.
//
// Inputs/outputs: cached_prefix_cuda.h.
//
// Layout: a warp copies a row (bf16: 72 times 16 bytes; 8 bits: 16 values a lane).
//
// Limits: rows of 512 + 64 values.
//
// Measured: docs/kernels/mha_prefill.md.
#include <cuda_bf16.h>

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "ops/attention/cached_prefix_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kPageKeys = 64;
constexpr int kLatentChunks = 512 * 2 / 16, kRopeChunks = 64 * 2 / 16;  // of 16 bytes, in bf16
constexpr int kThreads = 256, kWarps = kThreads / 32;

// The sequence that has this row: the last that starts at or before it.
__device__ int sequence_of(const GatherLatentArguments& arguments, int64_t row) {
  const int lane = threadIdx.x % 32;
  int sequence = -1;
  for (int s = 0; s < arguments.num_sequences; s += 32) {
    const bool before = s + lane < arguments.num_sequences && arguments.key_starts[s + lane] <= row;
    sequence += __popc(__ballot_sync(~0u, before));
  }
  return sequence;
}

// 16 values of 8 bits as two chunks of bf16.
template <Fp8 kType>
__device__ void widen_sixteen(uint4 bytes, float scale, uint4* to) {
  Eight x[2] = {widen_fp8<kType>(make_uint2(bytes.x, bytes.y)),
                widen_fp8<kType>(make_uint2(bytes.z, bytes.w))};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[e].v[i] *= scale;
    to[e] = narrow(x[e]);
  }
}

template <typename Row>
__device__ void copy_row(const std::byte* row, int lane, uint4* latent, uint4* k_rope) {
  const uint4* from = reinterpret_cast<const uint4*>(row);
  const uint4* rope = reinterpret_cast<const uint4*>(row + Row::kRopeAt);
  if constexpr (Row::kIsBf16) {
    const uint4 first = from[lane], second = from[lane + 32];
    static_assert(kLatentChunks == 64);
    if (lane < kRopeChunks) k_rope[lane] = rope[lane];
    latent[lane] = first;
    latent[lane + 32] = second;
  } else {
    const uint4 bytes = from[lane];
    float scale = 1;
    if constexpr (Row::kIsScaled) {
      scale = reinterpret_cast<const float*>(row + Row::kScalesAt)[lane / 8];
      if (lane < kRopeChunks) k_rope[lane] = rope[lane];
    } else {
      if (lane < kRopeChunks / 2) widen_sixteen<Row::kType>(rope[lane], 1, k_rope + lane * 2);
    }
    widen_sixteen<Row::kType>(bytes, scale, latent + lane * 2);
  }
}

template <typename Row>
__global__ void gather_kernel(const __grid_constant__ GatherLatentArguments arguments) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= arguments.keys || row >= arguments.key_starts[arguments.num_sequences]) return;
  const int s = sequence_of(arguments, row);
  const int64_t key = arguments.first_keys[s] + row - arguments.key_starts[s];
  const int64_t page =
      arguments
          .block_tables[int64_t{arguments.sequences[s]} * arguments.max_pages + key / kPageKeys];
  copy_row<Row>(static_cast<const std::byte*>(arguments.pages) +
                    (page * kPageKeys + key % kPageKeys) * Row::kBytes,
                lane, static_cast<uint4*>(arguments.latent) + row * kLatentChunks,
                static_cast<uint4*>(arguments.k_rope) + row * kRopeChunks);
}

}  // namespace

void gather_latent(const GatherLatentArguments& arguments, cudaStream_t stream) {
  if (arguments.keys == 0) return;
  const auto blocks = static_cast<unsigned>((arguments.keys + kWarps - 1) / kWarps);
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    launch(gather_kernel<Row>, {.blocks = blocks, .threads = kThreads}, stream, arguments);
  });
}

}  // namespace fathom::cuda
