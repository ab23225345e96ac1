// Quantizes weights to e4m3 with block-wise 128x128 scales, the form in which DeepSeek-V3 is
// published.
//
//   scale = max(largest magnitude of the block, 1e-30) / 448      448: the largest e4m3
//   value = e4m3(w / scale)                                       rounded to nearest even
//
// Both divisions are IEEE fp32, so the result is bitwise identical on every device. With
// kPowerOfTwo the scale is rounded up to a power of two. A zero keeps its sign. Blocks at the right
// and lower edges may have fewer rows or columns.
//
// Source: DeepSeek-V3's technical report (arXiv 2412.19437), section 3.3.2.
#pragma once

#include "base/status.h"
#include "tensor/scale_form.h"
#include "tensor/tensor_view.h"

namespace fathom {

// Quantizes one block of up to 128x128 weights (f32, bf16 or f16; rows may be strided) into e4m3
// `values` of the same shape. Returns the scale. If a weight is not finite, the returned scale is
// not finite and `values` are unchanged.
float quantize_weight_block(const ConstTensorView& weights, ScaleForm form,
                            const TensorView& values);

// Quantizes a matrix [rows, cols] into `values` of the same shape and f32 `scales` [ceil(rows /
// 128), ceil(cols / 128)]. The matrix may be a part of a larger one that begins at row first_row, a
// multiple of 128. A weight that is not finite is an error that names its row in the larger matrix.
Result<> quantize_weights(const ConstTensorView& weights, ScaleForm form, const TensorView& values,
                          const TensorView& scales, int64_t first_row = 0);

}  // namespace fathom
