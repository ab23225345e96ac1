// What: copies rows of the paged latent cache to dense bf16 matrices; the latent also, or instead,
// to e4m3 with scales for 128 columns.
//
// Inputs/outputs: cached_prefix_cuda.h.
//
// Layout: one warp per row; a lane copies 16 of the latent's columns, eight of each half, so that
// sixteen lanes have a block of 128.
//
// Limits: rows of 512 + 64 values.
//
// Measured: docs/kernels/mha_prefill.md.
#include <cuda_bf16.h>

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "ops/attention/prefill_cuda/cached_prefix_cuda.h"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kPageKeys = 64;
constexpr int kLatentChunks = 512 * 2 / 16, kRopeChunks = 64 * 2 / 16;  // 16-byte chunks of bf16
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

// Eight values of a row's latent in bf16.
template <typename Row>
__device__ uint4 latent_chunk(const std::byte* row, int chunk) {
  if constexpr (Row::kIsBf16) {
    return reinterpret_cast<const uint4*>(row)[chunk];
  } else {
    Eight x = widen_fp8<Row::kType>(reinterpret_cast<const uint2*>(row)[chunk]);
    if constexpr (Row::kIsScaled) {
      const float scale = reinterpret_cast<const float*>(row + Row::kScalesAt)[chunk / kBlockLanes];
#pragma unroll
      for (float& value : x.v) value *= scale;
    }
    return narrow(x);
  }
}

template <typename Row>
__device__ uint4 rope_chunk(const std::byte* row, int chunk) {
  if constexpr (Row::kRopeIsBf16) {
    return reinterpret_cast<const uint4*>(row + Row::kRopeAt)[chunk];
  } else {
    return narrow(widen_fp8<Row::kType>(reinterpret_cast<const uint2*>(row + Row::kRopeAt)[chunk]));
  }
}

template <typename Row>
__device__ void copy_row(const std::byte* row, int lane, int64_t to,
                         const GatherLatentArguments& arguments) {
  constexpr int kHalf = kLatentChunks / 2;
  static_assert(kHalf == 32);
  const uint4 latent[2] = {latent_chunk<Row>(row, lane), latent_chunk<Row>(row, lane + kHalf)};
  if (lane < kRopeChunks) {
    static_cast<uint4*>(arguments.k_rope)[to * kRopeChunks + lane] = rope_chunk<Row>(row, lane);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int chunk = half * kHalf + lane;
    if (arguments.latent != nullptr) {
      static_cast<uint4*>(arguments.latent)[to * kLatentChunks + chunk] = latent[half];
    }
    if (arguments.quantized.values != nullptr) {
      store_quantized(latent[half], arguments.quantized, to, chunk * 8);
    }
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
                lane, row, arguments);
}

}  // namespace

void gather_latent(const GatherLatentArguments& arguments, GpuStream stream) {
  if (arguments.keys == 0) return;
  const auto blocks = static_cast<unsigned>((arguments.keys + kWarps - 1) / kWarps);
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    launch(gather_kernel<Row>, {.blocks = blocks, .threads = kThreads}, stream, arguments);
  });
}

}  // namespace fathom::cuda
