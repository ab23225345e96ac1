#include "tensor/widen_row.h"

namespace fathom {
namespace {

template <typename T>
void widen(const T* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(values[i]);
}

}  // namespace

void widen_row(const ConstTensorView& weights, int64_t row, float* out) {
  const int64_t cols = weights.size(1);
  switch (weights.dtype()) {
    case DType::kF32:
      return widen(weights.row<float>(row), cols, out);
    case DType::kBF16:
      return widen(weights.row<bf16>(row), cols, out);
    case DType::kF16:
      return widen(weights.row<f16>(row), cols, out);
    default:
      FATHOM_CHECK(false, "quantizing weights of type {}", name_of(weights.dtype()));
  }
}

}  // namespace fathom
