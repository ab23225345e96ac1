// Quantizes weights to four bits with a scale for each row and group of columns.
//
//   INT4    scale = bf16(largest magnitude of the group / 7)
//           code  = 8 + w / scale rounded to nearest even, -7 to 7
//   MXFP4   scale = 2^e, e = floor(log2(largest magnitude)) - 2, or e + 1 where clipping at 6 would
//           cost more squared error; code = E2M1 of w / scale, to nearest even
//
// A group of zeros has the scale 1. Divisions are IEEE fp32, so the result is bitwise identical on
// every device.
//
// Sources: Kimi K2-Thinking's published experts are a fixed point of the INT4 rule; OCP
// Microscaling Formats (MX) v1.0, section 6.3.
#pragma once

#include <span>

#include "base/status.h"
#include "tensor/four_bit.h"
#include "tensor/tensor_view.h"

namespace fathom {

// Quantizes [rows, cols] (f32, bf16 or f16) with groups of group_cols, which divides cols. `codes`
// takes cols / 2 bytes a row, the even column in the low half; `scales` rows * cols / group_cols
// numbers. A weight that is not finite is an error that names its row, counted from first_row.
Result<> quantize_four_bit(const ConstTensorView& weights, FourBitCode code, int64_t group_cols,
                           std::span<uint8_t> codes, std::span<float> scales,
                           int64_t first_row = 0);

}  // namespace fathom
