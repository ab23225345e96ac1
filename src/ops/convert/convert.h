// out = x in another type (f32 <-> bf16), rounded to nearest even.
#pragma once

#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

// x and out of the same shape, rank 2 or 3; leading dimensions may be strided.
void convert(const Stream& stream, ConstTensorView x, TensorView out);

}  // namespace fathom
