// Epilogue of latent_decode_8_bit_cuda.cu: writes results to the output or, for a row tile with
// several splits, to scratch memory.
#pragma once

#include "device/cuda/ptx.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_memory_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

// A thread's results and their columns and rows; see latent_decode_8_bit_cuda.cu.
template <int kRows>
using Out = float[kOutBlocks][kRows / 2];

// Writes the first `rows` rows to `to`, staged in the queries' shared memory, which is free: rows
// leave in runs of 512 bytes.
template <int kRows, typename Shared>
__device__ inline void write_out(Shared& shared, __nv_bfloat16* to, const Place& place, int rows,
                                 const Out<kRows>& out) {
  // 16 bytes of padding a row avoid bank conflicts.
  constexpr int kRowBytes = kLatent * 2 + 16, kChunks = kLatent / 8;
  static_assert(kRows * kRowBytes <= sizeof(shared.queries));
  uint8_t* const memory = reinterpret_cast<uint8_t*>(shared.queries);
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const float inverse = shared.inverses[place.row_of(i)];
    const int j = i / 2 * 4 + (i & 1);
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
      const int column =
          (place.group * kOutBlocks + block) * 64 + 16 * place.warp + place.lane / 4 * 2;
      *reinterpret_cast<uint32_t*>(memory + place.row_of(i) * kRowBytes + column * 2) =
          pack_bf16(out[block][j] * inverse, out[block][j + 2] * inverse);
    }
  }
  meet();
#pragma unroll
  for (int u = 0; u < kRows * kChunks / kComputing; ++u) {
    const int i = threadIdx.x + u * kComputing, row = i / kChunks;
    if (row >= rows) continue;
    reinterpret_cast<uint4*>(to + int64_t{row} * kLatent)[i % kChunks] =
        *reinterpret_cast<const uint4*>(memory + row * kRowBytes + i % kChunks * 16);
  }
}

// A split: its slot, and its weights for the first of `readers`; each further one's are
// `reader_stride` words further on.
template <int kRows, typename Shared>
__device__ inline void write_partial(Shared& shared, float* slot, float* weights, int reader_stride,
                                     const Place& place, int readers, const Out<kRows>& out) {
  // Each reader's weights are contiguous over all splits.
  for (int x = threadIdx.x; x < readers * (kRows / 4); x += kComputing) {
    const int row = x % (kRows / 4) * 4;
    store_shared_words(weights + int64_t{x / (kRows / 4)} * reader_stride + row,
                       *reinterpret_cast<const float4*>(shared.weights + row));
  }
  float* sums = slot + place.group * (kLatent * kRows / 2 / kGroups) + place.thread * 4;
#pragma unroll
  for (int j = 0; j < (kRows / 2); j += 4) {
    const float2 inverse = *reinterpret_cast<const float2*>(shared.inverses + place.row_of(j / 2));
#pragma unroll
    for (int block = 0; block < kOutBlocks; block += 2) {
      const auto pair = [&](int b, int next) {
        const float factor = next == 0 ? inverse.x : inverse.y;
        return present_pair(out[b][j + next] * factor, out[b][j + 2 + next] * factor);
      };
      store_shared_words(
          sums + (block / 2 * ((kRows / 2) / 4) + j / 4) * (4 * kGroupThreads),
          make_float4(pair(block, 0), pair(block, 1), pair(block + 1, 0), pair(block + 1, 1)));
    }
  }
}

// Scratch layout of write_partial(): a vector has two adjacent rows and two blocks of 64 columns.
template <int kTileRows>
struct SumsLayout {
  static constexpr int kRows = kTileRows, kThreads = kComputing;
  static constexpr int kBarrier = latent_8_bit::kBarrier;
  static constexpr int kVectors = kLatent * kRows / 8;
  static constexpr int kPairColumn = 1, kSecondRow = 1, kSecondColumn = 64;

  __device__ static int row_of(uint32_t vector) {
    return vector / kGroupThreads % (kRows / 8) * 8 + 2 * (vector % 4);
  }
  __device__ static int column_of(uint32_t vector) {
    const uint32_t thread = vector % kGroupThreads;
    return vector / (kGroupThreads * kRows / 8) * 128 + thread / 32 * 16 + thread % 32 / 4 * 2;
  }
  __device__ static int weight_at(uint32_t vector) { return row_of(vector); }
};

}  // namespace fathom::cuda::latent_8_bit
