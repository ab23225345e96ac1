#include "tensor/scaled_matrix.h"

namespace fathom {

ScaledMatrix ScaledMatrix::slice(Slice row_slice, Slice col_slice) const {
  ScaledMatrix part = *this;
  part.values =
      values.rows(row_slice.first, row_slice.count).columns(col_slice.first, col_slice.count);
  part.scale_row += row_slice.first;
  part.scale_col += col_slice.first;
  return part;
}

float ScaledMatrix::at(int64_t row, int64_t col) const {
  const float scale = scale_at(row, col);
  switch (values.dtype()) {
    case DType::kF32:
      return values.row<float>(row)[col] * scale;
    case DType::kBF16:
      return to_float(values.row<bf16>(row)[col]) * scale;
    case DType::kF16:
      return to_float(values.row<f16>(row)[col]) * scale;
    case DType::kF8E4M3:
      return to_float(values.row<e4m3>(row)[col]) * scale;
    case DType::kU8:
      return four_bit_value(code, values.row<uint8_t>(row)[col], zero_at(row, col)) * scale;
    default:
      FATHOM_CHECK(false, "a weight of type {}", name_of(values.dtype()));
  }
}

}  // namespace fathom
