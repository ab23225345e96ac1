// out[i] = weight * x[i] / sqrt(mean(x[i]^2) + eps), in fp32, rounded once to out's type.
#pragma once

#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

// x [rows, n] f32 or bf16 (rows may be strided); weight [n] f32; out [rows, n] f32 or bf16.
void rms_norm(const Stream& stream, ConstTensorView x, ConstTensorView weight, float eps,
              TensorView out);

}  // namespace fathom
