// Limits of add_rms_norm() and rms_norm() on a GPU (add_rms_norm_cuda.h). Host code.
#pragma once

#include "base/named_size.h"

namespace fathom::cuda {

inline constexpr int64_t kMostNormColumns = 16384;

inline Result<> rms_norm_supports(const NamedSize& n) {
  FATHOM_RETURN_IF_ERROR(require_multiple(n, 8));
  return require_at_most(n, kMostNormColumns);
}

}  // namespace fathom::cuda
