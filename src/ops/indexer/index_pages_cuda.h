// Index keys in a GPU's memory: the bytes of IndexKeyFormat::kE4M3, with the scales of a page
// behind its values, so that values are aligned as copies to shared memory and tensor cores want
// them.
//
//   page   [64 tokens][128 e4m3], then [64] fp32 scales: 8,448 B, as many as on the CPU
//
// Whoever moves a page moves all of it, and need not know this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/cache_format.h"

namespace fathom::cuda {

inline constexpr int kIndexDim = 128;  // index_head_dim of every published model
inline constexpr int kIndexRope = 64;  // of it rotated
inline constexpr int64_t kIndexValueBytes = kPageSize * kIndexDim;
inline constexpr int64_t kIndexPageBytes =
    kIndexValueBytes + kPageSize * static_cast<int64_t>(sizeof(float));

// One layer's index keys. Page p begins `stride` * p bytes behind `data`; both are multiples of 16.
struct IndexPages {
  std::byte* data = nullptr;
  int64_t stride = 0;
};

}  // namespace fathom::cuda
