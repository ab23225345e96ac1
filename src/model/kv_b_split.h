// Splits the up-projection kv_b_proj [H * (nope + v), latent] for absorbed attention: head h's rows
// are W_UK (nope rows) and then W_UV (v rows).
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/scaled_matrix.h"

namespace fathom {

// A matrix that owns the memory of its view.
struct OwnedMatrix {
  std::vector<std::byte> values;
  std::vector<float> scales;
  ScaledMatrix view;
};

// Copies rows [first, first + count) of a matrix exactly: where the rows do not start on a scale
// block's edge the scales are expanded to one per row.
OwnedMatrix slice_rows(const ScaledMatrix& matrix, int64_t first, int64_t count);

// The values of four-bit weights in fp32, columns in the weight's order.
OwnedMatrix dequantize(const ScaledMatrix& matrix);

// The transpose of rows [first, first + count): [cols, count]. Quantized values are kept where the
// slice is whole scale blocks; otherwise the result is dequantized to fp32.
OwnedMatrix transpose_rows(const ScaledMatrix& matrix, int64_t first, int64_t count);

}  // namespace fathom
