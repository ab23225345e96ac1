// A row of weights as fp32, for those who quantize it.
#pragma once

#include "tensor/tensor_view.h"

namespace fathom {

// weights: [rows, cols] of fp32, bf16 or fp16. out: cols values.
void widen_row(const ConstTensorView& weights, int64_t row, float* out);

}  // namespace fathom
