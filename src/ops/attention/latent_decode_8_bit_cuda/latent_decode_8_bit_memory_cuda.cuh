// Shared memory of a CTA of latent_decode_8_bit_cuda.cu, and its kernel arguments.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/cuda/planted_fault.h"
#include "device/cuda/ptx.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"

namespace fathom::cuda::latent_8_bit {

constexpr int kLatent = 512, kRope = 64;
constexpr int kKeys = 64;          // keys of a page
constexpr int kSlabColumns = 128;  // columns that share a scale and are accumulated together
constexpr int kSlabs = kLatent / kSlabColumns;
constexpr int kBoxRowBytes = 128;                // the swizzle's width
constexpr int kGroups = 2, kGroupThreads = 128;  // consumer warpgroups
constexpr int kComputing = kGroups * kGroupThreads, kThreads = kComputing + kGroupThreads;
constexpr int kWarps = kComputing / 32;
constexpr int kOutBlocks = kLatent / kGroups / 64;  // blocks of 64 columns a warpgroup
constexpr int kMostShared = 227 * 1024;
constexpr int kBarrier = 1;  // of the consumer threads

// A query or probability is the sum of this many e4m3 values: as precise as bf16. The smaller one
// is multiplied first, because the tensor cores truncate it against a large sum.
constexpr int kTerms = 2;

// Powers of two scale queries below 2^8 and probabilities to 2^8 at most, which e4m3 holds.
constexpr int kQueryExponent = 7;
constexpr float kProbabilityExponent = 8;

struct Arguments {
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* q_rope;
  const std::byte* pages;
  const int32_t* block_tables;
  const LatentDecodePart* parts;
  const int32_t* first_part;
  __nv_bfloat16* out;
  float* sums;     // [slots, 512 * rows of the tile / 2]: pairs of bf16 as in the registers
  float* weights;  // [weights, rows of the tile]: a split's, once for each CTA that reads it
  int32_t heads;
  int32_t tile_blocks;  // CTAs that compute a row tile together
  float scale_log2;
  FATHOM_PLANTED_FAULT
};

// A page in shared memory.
template <typename Row>
struct PageLayout {
  static constexpr bool kIsLinear = Row::kBytes / 16 % 2 == 1;
  static constexpr int kBoxRow = 128, kBoxBytes = kKeys * kBoxRow;
  static constexpr int kNumBoxes = kIsLinear ? 1 : (Row::kBytes + kBoxRow - 1) / kBoxRow;
  static constexpr int kRowStride = kIsLinear ? Row::kBytes : kBoxRow;
  static constexpr int kBytes = kIsLinear ? kKeys * Row::kBytes : kNumBoxes * kBoxBytes;

  // Offset of 16 bytes of a row in a page.
  __device__ static int at(int row, int byte) {
    if constexpr (kIsLinear) return row * kRowStride + byte;
    return byte / kBoxRow * kBoxBytes + row * kBoxRow + (byte % kBoxRow ^ row % 8 * 16);
  }
  // Address `bytes` further in the row; the two must have no set bits in common.
  __device__ static uint32_t further(uint32_t address, int bytes) {
    if constexpr (kIsLinear) return address + bytes;
    return (address ^ bytes % kBoxRow) + bytes / kBoxRow * kBoxBytes;
  }
};

template <typename Row, int kRows>
struct SharedMemory {
  using Page = PageLayout<Row>;
  static constexpr int kBoxBytes = kRows * kBoxRowBytes;
  // One box for each term of the latent columns, and one for the rotary ones (all terms in e4m3, or
  // one in bf16).
  static constexpr int kQueryBoxes = kTerms * kSlabs + 1, kRopeBox = kTerms * kSlabs;
  static constexpr int kScales = Row::kIsScaled ? kSlabs : 1;
  static constexpr int kOther = (kQueryBoxes + kScales * kTerms) * kBoxBytes + 4096;
  static constexpr int kStages = std::min(5, (kMostShared - kOther) / Page::kBytes);
  static_assert(Page::kBytes % 1024 == 0 && kStages >= kGroups);

  alignas(1024) uint8_t pages[kStages][Page::kBytes];
  alignas(1024) uint8_t queries[kQueryBoxes][kBoxBytes];
  // [rows, keys of two pages] for each scale and term.
  alignas(1024) uint8_t probabilities[kScales][kTerms][kBoxBytes];
  // Maxima over all warps, double-buffered by pairs of pages: the rows' largest scores, as
  // order-preserving integers, and the keys' largest scales.
  alignas(16) int32_t maxima[2][kRows];
  alignas(16) float scale_maxima[2][kSlabs];
  // For each row: the factor of a pair's sums before they are added to earlier ones, and the factor
  // of the earlier ones.
  alignas(16) float factors[kRows], rescales[kRows];
  int32_t any_rescales;
  alignas(16) float sums[kWarps][kRows], references[kRows], inverses[kRows], weights[kRows];
  uint32_t largest_queries[kWarps];
  uint64_t arrived[kStages], read[kStages];
};

// A consumer thread's position and its query rows: row_of(i) is the i-th.
struct Place {
  int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  int thread = threadIdx.x % kGroupThreads, warp = thread / 32, lane = threadIdx.x % 32;

  __device__ int row_of(int i) const { return i / 2 * 8 + 2 * (lane % 4) + (i & 1); }
};

// Barrier of the consumer threads.
__device__ inline void meet() { named_barrier(kBarrier, kComputing); }

// Offset of a 16-byte chunk in the 128-byte swizzle.
__device__ inline int chunk_at(int row, int chunk) {
  return row * 128 + ((chunk ^ (row % 8)) * 16);
}

}  // namespace fathom::cuda::latent_8_bit
