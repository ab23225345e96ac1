// x += bias: a projection's bias, after its GEMM.
#pragma once

#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

// x [rows, n] f32, rows may be strided; bias [n] f32 is added to each of them.
void add_bias(const Stream& stream, ConstTensorView bias, TensorView x);

}  // namespace fathom
