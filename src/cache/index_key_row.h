// One token's index key, to and from fp32: the bitwise definition of each IndexKeyFormat.
//
//   e4m3   values / scale, rounded to nearest even, saturating | fp32 scale
//          scale = 2^ceil(log2(max(amax, 1e-4) / 448)), as DeepSeek-V3.2's kernels store it
//          ("ue8m0")
//   bf16   rounded to nearest even
//   f32    as they are
//
// A NaN among the values: every code of its row of e4m3 decodes to NaN, so that the damage shows.
#pragma once

#include <cstddef>

#include "cache/index_key_layout.h"

namespace fathom {

// The scale of a row or of a query's head: the power of two that takes `amax` (>= 0, or NaN) within
// e4m3's range, 448. NaN and infinity give NaN. At least 2^-22, for an amax up to 1e-4.
float index_scale(float amax);

// key [dim] -> row [row_bytes].
void encode_index_key(const IndexKeyLayout& layout, const float* key, std::byte* row);

// row [row_bytes] -> key [dim].
void decode_index_key(const IndexKeyLayout& layout, const std::byte* row, float* key);

}  // namespace fathom
