// A weight matrix as a checkpoint stores it: values, and the scales that multiply them.
//
//   W[r, c] = values[r, c] * scales[r / scale_rows, c / scale_cols]
//
// covers every published form: no scales (bf16, f16, f32), one scale for the tensor (scale_rows =
// rows, scale_cols = cols), one a row (1, cols), and 128x128 blocks with ragged edges. Views only.
#pragma once

#include "tensor/tensor_view.h"

namespace fathom {

struct ScaledMatrix {
  ConstTensorView values;  // [rows, cols]; f32, bf16, f16 or e4m3
  ConstTensorView scales;  // f32 [ceil(rows / scale_rows), ceil(cols / scale_cols)], or empty
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;

  int64_t rows() const { return values.size(0); }
  int64_t cols() const { return values.size(1); }

  // The multiplier of element (row, col); 1 without scales.
  float scale_at(int64_t row, int64_t col) const {
    if (scales.empty()) return 1.0f;
    return scales.row<float>(row / scale_rows)[col / scale_cols];
  }

  // The value that the checkpoint means, in fp32.
  float at(int64_t row, int64_t col) const;
};

}  // namespace fathom
