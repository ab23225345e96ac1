// Stored bytes of four-bit weights into codes, zero points and scales. Layouts: four_bit_layout.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checkpoint/model_config.h"

namespace fathom {

// codes [rows, cols], one a byte, of any four-bit kind.
void decode_codes(QuantizationConfig::Kind kind, const std::byte* stored, int64_t rows,
                  int64_t cols, uint8_t* codes);

// zeros [rows, groups], each 0 to 15, of pack-quantized, AWQ and GPTQ. pack-quantized stores both
// codes and zero points 8 higher, so that the two offsets cancel.
void decode_zeros(const QuantizationConfig& quantization, const std::byte* stored, int64_t rows,
                  int64_t groups, uint8_t* zeros);

// Scale `index` of f32, bf16, f16, e4m3, or e8m0 (also stored as u8).
float decode_scale(DType dtype, const std::byte* stored, int64_t index);

}  // namespace fathom
