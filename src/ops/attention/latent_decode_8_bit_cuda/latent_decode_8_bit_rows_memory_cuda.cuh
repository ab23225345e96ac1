// Shared memory of a CTA of latent_decode_8_bit_rows_cuda.cu.
#pragma once

#include <type_traits>

#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_memory_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_keys.h"

namespace fathom::cuda::latent_8_bit {

constexpr int kBlockRows = 64;

// A page's scales in f16, times a power of two, in the order in which a thread multiplies values
// with them: slab by slab; a lane's keys 16 step + 8 half + 2 (lane % 4) and the next are
// contiguous.
using ValueScales = uint16_t[kSlabs][kKeys];
__device__ inline int value_scale_at(int key) { return key % 8 / 2 * 16 + key / 8 * 2 + key % 2; }

// Listed keys in shared memory: each a piece of its own, at an odd stride of 16 bytes, so that the
// rows that ldmatrix reads together lie in different banks.
template <typename Row>
struct ListedLayout {
  static constexpr int kRowStride = Row::kBytes / 16 % 2 == 1 ? Row::kBytes : Row::kBytes + 16;
  static constexpr int kBytes = kKeys * kRowStride;

  __device__ static int at(int row, int byte) { return row * kRowStride + byte; }
  __device__ static uint32_t further(uint32_t address, int bytes) { return address + bytes; }
};

template <typename Row, LatentKeys kKeysFrom = LatentKeys::kPages>
struct RowsSharedMemory {
  using Page =
      std::conditional_t<kKeysFrom == LatentKeys::kPages, PageLayout<Row>, ListedLayout<Row>>;
  static constexpr int kBoxBytes = kBlockRows * kBoxRowBytes;
  static constexpr int kQueryBoxes = (kLatent + kRope) / 64, kRopeBox = kQueryBoxes - 1;
  static constexpr int kStages = 3;
  static_assert(Page::kBytes % 1024 == 0);

  alignas(1024) uint8_t pages[kStages][Page::kBytes];
  alignas(1024) uint8_t queries[kQueryBoxes][kBoxBytes];  // [rows, 64 columns]
  // Probabilities of even and odd pages: [rows, keys].
  alignas(1024) uint8_t probabilities[kGroups][kBoxBytes];
  alignas(16) ValueScales value_scales[kStages];
  alignas(16) float factors[kGroups][kBlockRows];  // factors of the sums before this page
  int32_t rescales[kGroups];                       // whether they are to be applied
  // Powers of two that divide scales above kMostScale. key_divisors: each warp's keys of its last
  // page. value_divisors: all keys' values up to the latest even and odd page; never falls within a
  // split. Sums of values are relative to it.
  float key_divisors[kWarps], value_divisors[kGroups];
  // Scores that rows' sums are relative to. The warpgroup that computes a page's probabilities
  // reads and writes them, in page order.
  alignas(16) float references[kBlockRows];
  alignas(16) float maxima[kGroupThreads / 32][kBlockRows];
  alignas(16) float sums[kWarps][kBlockRows], inverses[kBlockRows], weights[kBlockRows];
  uint32_t largest_queries[kWarps];
  uint64_t arrived[kStages], read[kStages];
  uint64_t published[kGroups];  // probabilities of an even and an odd page
};

}  // namespace fathom::cuda::latent_8_bit
