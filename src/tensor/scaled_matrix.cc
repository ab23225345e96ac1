#include "tensor/scaled_matrix.h"

namespace fathom {

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
    default:
      FATHOM_CHECK(false, "a weight of type {}", name_of(values.dtype()));
  }
}

}  // namespace fathom
