// What a block of latent_decode_8_bit_rows_cuda.cu has in shared memory.
#pragma once

#include "ops/attention/latent_decode_8_bit_memory_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

constexpr int kBlockRows = 64;

// A page's scales in f16, times a power of two, as a thread multiplies values with them: slab by
// slab, of the keys 16 step + 8 half + 2 (lane % 4) and the next those of a lane in one run.
using ValueScales = uint16_t[kSlabs][kKeys];
__device__ inline int value_scale_at(int key) { return key % 8 / 2 * 16 + key / 8 * 2 + key % 2; }

template <typename Row>
struct RowsSharedMemory {
  using Page = PageLayout<Row>;
  static constexpr int kBoxBytes = kBlockRows * kBoxRowBytes;
  static constexpr int kQueryBoxes = (kLatent + kRope) / 64, kRopeBox = kQueryBoxes - 1;
  static constexpr int kStages = 3;
  static_assert(Page::kBytes % 1024 == 0);

  alignas(1024) uint8_t pages[kStages][Page::kBytes];
  alignas(1024) uint8_t queries[kQueryBoxes][kBoxBytes];  // [rows, 64 columns]
  // Of even and odd pages: [rows, keys].
  alignas(1024) uint8_t probabilities[kGroups][kBoxBytes];
  alignas(16) ValueScales value_scales[kStages];
  alignas(16) float factors[kGroups][kBlockRows];  // of what has been summed before this page
  int32_t rescales[kGroups];                       // whether they are to be applied
  // What rows' sums are relative to: base 2 logarithms. Who computes a page's probabilities reads
  // and writes them, the pages in their order.
  alignas(16) float references[kBlockRows];
  alignas(16) float maxima[kGroupThreads / 32][kBlockRows];
  alignas(16) float sums[kWarps][kBlockRows], inverses[kBlockRows], weights[kBlockRows];
  uint32_t largest_queries[kWarps];
  uint64_t arrived[kStages], read[kStages];
  uint64_t published[kGroups];  // probabilities of an even and an odd page
};

}  // namespace fathom::cuda::latent_8_bit
