// A weight matrix as stored in a checkpoint: values, and the scales that multiply them.
//
//   W[r, c] = values[r, c] * scales[(r + scale_row) / scale_rows, (c + scale_col) / scale_cols]
//
// This covers all published forms: no scales (bf16, f16, f32), per-tensor (scale_rows = rows,
// scale_cols = cols), per-row (1, cols), block-wise 128x128 with partial blocks at the edges, and
// four-bit codes with a scale a row and group of columns (1, group). Views only.
#pragma once

#include "tensor/four_bit.h"
#include "tensor/slice.h"
#include "tensor/tensor_view.h"

namespace fathom {

struct ScaledMatrix {
  // [rows, cols]; f32, bf16, f16, e4m3, or u8: four-bit codes, one a byte.
  ConstTensorView values;
  ConstTensorView scales;  // f32 [ceil(rows / scale_rows), ceil(cols / scale_cols)], or empty
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
  // Where the values begin in the matrix that the scales belong to: not 0 in a slice of it.
  int64_t scale_row = 0;
  int64_t scale_col = 0;
  // Meaning of four-bit codes, and zero points of the scales' shape, u8 below 16. Without zero
  // points each is kSymmetricZero.
  FourBitCode code = FourBitCode::kInteger;
  ConstTensorView zeros = {};
  // i32 [cols]: column c holds column columns[c] of the weight; empty: c. Columns of four-bit codes
  // whose groups are not contiguous stand in the order of the groups.
  ConstTensorView columns = {};

  bool is_four_bit() const { return values.dtype() == DType::kU8; }
  int64_t rows() const { return values.size(0); }
  int64_t cols() const { return values.size(1); }

  // The multiplier of element (row, col); 1 without scales.
  float scale_at(int64_t row, int64_t col) const {
    if (scales.empty()) return 1.0f;
    return scales.row<float>((row + scale_row) / scale_rows)[(col + scale_col) / scale_cols];
  }

  // The zero point of element (row, col) of four-bit integers.
  int zero_at(int64_t row, int64_t col) const {
    if (zeros.empty()) return kSymmetricZero;
    return zeros.row<uint8_t>((row + scale_row) / scale_rows)[(col + scale_col) / scale_cols];
  }

  // Some of its rows and columns, over the same scales.
  ScaledMatrix slice(Slice row_slice, Slice col_slice) const;

  // The dequantized value in fp32.
  float at(int64_t row, int64_t col) const;
};

}  // namespace fathom
