// The up-projection kv_b_proj [H * (nope + v), latent], taken apart for absorbed attention:
// head h's rows are W_UK (nope rows) and then W_UV (v rows).
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/scaled_matrix.h"

namespace fathom {

// A matrix that owns what its view points to.
struct OwnedMatrix {
  std::vector<std::byte> values;
  std::vector<float> scales;
  ScaledMatrix view;
};

// Rows [first, first + count) of a matrix, exactly: where the rows do not start on a scale block's
// edge the scales are written out one a row.
OwnedMatrix slice_rows(const ScaledMatrix& matrix, int64_t first, int64_t count);

// The transpose of rows [first, first + count): [cols, count]. Scaled values stay as they are where
// the slice is whole scale blocks; otherwise the result is fp32 with the scales multiplied in.
OwnedMatrix transpose_rows(const ScaledMatrix& matrix, int64_t first, int64_t count);

}  // namespace fathom
