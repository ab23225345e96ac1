// One token's row of the latent cache, to and from fp32: the bitwise definition of each
// CacheFormat.
//
//   f32, bf16    latent, then rope; rounded to nearest even
//   fp8 scaled   e4m3 latent / scale | fp32 scales, one for each 128 (the last may cover fewer) |
//                bf16 rope. scale = max(amax, 1e-4) / 448, as DeepSeek-V3.2's kernels store it
//   e4m3, e5m2   latent, then rope; rounded to nearest even, saturating
//
// Rows need no alignment. One definition for every operation: the writer, the readers' scalar form
// and the tests of the vector forms.
#pragma once

#include <cstddef>

#include "cache/latent_layout.h"

namespace fathom {

// latent [latent_dim], rope [rope_dim] -> row [row_bytes].
void encode_row(const LatentLayout& layout, const float* latent, const float* rope, std::byte* row);

// row [row_bytes] -> latent [latent_dim], rope [rope_dim].
void decode_row(const LatentLayout& layout, const std::byte* row, float* latent, float* rope);

}  // namespace fathom
