// GEMMs with packed weights: out[m, n] = sum over k of x[m, k] * W[n, k].
//
// The type of x decides the arithmetic: bf16 x means bf16 products summed in fp32 (FP8 weights
// dequantize exactly to bf16; their scales multiply the fp32 sums, block by block), f32 x means
// fp32 throughout. x's rows may be strided (stride(0)), its columns are contiguous. out is f32, or
// bf16 when not accumulating. No alignment is required of x and out. A row's result does not depend
// on the number of rows in the call, nor on the number of threads (batch-invariant).
#pragma once

#include <span>

#include "device/stream.h"
#include "ops/linear/packed_matrix.h"
#include "tensor/tensor_view.h"

namespace fathom {

enum class LinearMode { kOverwrite, kAccumulate };  // out = …, out += … (f32 only)

struct LinearTask {
  ConstTensorView x;                     // [m, k]
  const PackedMatrix* weight = nullptr;  // [n, k]
  TensorView out;                        // [m, n]
};

void linear(const Stream& stream, ConstTensorView x, const PackedMatrix& weight, TensorView out,
            LinearMode mode = LinearMode::kOverwrite);

// Runs several GEMMs in one parallel region, for small ones that would not fill the threads one by
// one (q_a with kv_a, the heads' absorption GEMMs). The outs must not overlap.
void linear_group(const Stream& stream, std::span<const LinearTask> tasks,
                  LinearMode mode = LinearMode::kOverwrite);

}  // namespace fathom
