// Weights in e4m3 with scales by blocks of 128x128, as DeepSeek-V3 is published.
//
//   scale = max(largest magnitude of the block, 1e-30) / 448      448: the largest e4m3
//   value = e4m3(w / scale)                                       rounded to nearest even
//
// Both divisions are fp32 as IEEE has them, so that any device's code gives the same bits. With
// kPowerOfTwo the scale is the next power of two from there. A zero keeps its sign; a block at the
// right or lower edge has fewer rows or columns.
//
// Source: DeepSeek-V3's technical report (arXiv 2412.19437), section 3.3.2.
#pragma once

#include "base/status.h"
#include "tensor/scale_form.h"
#include "tensor/tensor_view.h"

namespace fathom {

// One block of up to 128x128 weights (f32, bf16 or f16; rows may be strided) to e4m3 values of the
// same shape. Returns the scale. With a weight that is not finite it returns a scale that is not,
// and leaves the values as they were.
float quantize_weight_block(const ConstTensorView& weights, ScaleForm form,
                            const TensorView& values);

// A matrix [rows, cols], or some of its rows from a multiple of 128 on, to values of the same shape
// and f32 scales [ceil(rows / 128), ceil(cols / 128)]. A weight that is not finite is an error that
// says where it is, counting rows from first_row.
Result<> quantize_weights(const ConstTensorView& weights, ScaleForm form, const TensorView& values,
                          const TensorView& scales, int64_t first_row = 0);

}  // namespace fathom
