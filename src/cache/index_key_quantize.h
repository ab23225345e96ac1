// Quantizing an index row, a key or a query's head, to e4m3 with one scale (index_key_row.h).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cache/index_key_row.h"
#include "tensor/e4m3_round.h"

namespace fathom {

// x [dim] -> codes [dim]; returns their scale. A NaN or an infinity makes the scale and every code
// NaN. Inlined, to be compiled for the caller's instructions.
[[gnu::always_inline]] inline float quantize_index_row(const float* x, int64_t dim,
                                                       uint8_t* codes) {
  uint32_t amax = 0;  // magnitudes compare as integers, and NaN above all of them
  for (int64_t i = 0; i < dim; ++i) {
    amax = std::max(amax, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF);
  }
  const float scale = index_scale(std::bit_cast<float>(amax));
  const float inverse = 1.0f / scale;  // a power of two: exact
  for (int64_t i = 0; i < dim; ++i) codes[i] = round_to_e4m3(x[i] * inverse);
  return scale;
}

}  // namespace fathom
