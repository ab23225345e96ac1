// Limits of linear() and scaled_linear() on a GPU (linear_cuda.h, scaled_linear_cuda.h). Host code.
#pragma once

#include "base/named_size.h"

namespace fathom::cuda {

// One row of x must fit a CTA's shared memory beside its ring buffer.
inline constexpr int64_t kMostLinearColumns = 32768;

// out [rows, n] = x [rows, k] W^T. e4m3 weights require k to be a multiple of 128; others are held
// in bf16 (model/weight_forms.h).
inline Result<> linear_supports(const NamedSize& n, const NamedSize& k) {
  FATHOM_RETURN_IF_ERROR(require_multiple(n, 8));
  FATHOM_RETURN_IF_ERROR(require_multiple(k, 64));
  return require_at_most(k, kMostLinearColumns);
}

}  // namespace fathom::cuda
