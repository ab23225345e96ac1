// Stored bytes of four-bit weights into codes, zero points and scales. Layouts: four_bit_layout.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/model_config.h"

namespace fathom {

// codes [rows, cols], one a byte, of any four-bit kind.
void decode_codes(QuantizationConfig::Kind kind, const std::byte* stored, int64_t rows,
                  int64_t cols, uint8_t* codes);

// zeros [rows, groups], each 0 to 15, of pack-quantized, AWQ and GPTQ. pack-quantized stores both
// codes and zero points 8 higher, so that the two offsets cancel.
void decode_zeros(const QuantizationConfig& quantization, const std::byte* stored, int64_t rows,
                  int64_t groups, uint8_t* zeros);

// Act-order: stored [cols] says the group of each column. Returns the columns with those of a group
// beside each other, groups and columns ascending; nothing if they lie so already. Refuses a group
// that is not there, and groups of other sizes than group_cols; errors begin with `where`.
Result<std::vector<int32_t>> decode_order(const std::byte* stored, int64_t cols, int64_t groups,
                                          int64_t group_cols, std::string_view where);

// Scale `index` of f32, bf16, f16, e4m3, or e8m0 (also stored as u8).
float decode_scale(DType dtype, const std::byte* stored, int64_t index);

}  // namespace fathom
