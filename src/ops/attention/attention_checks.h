// Checks that the attention operations share.
#pragma once

#include "base/check.h"
#include "cache/latent_layout.h"
#include "tensor/tensor_view.h"

namespace fathom {

inline bool is_float(ConstTensorView view) {
  return view.dtype() == DType::kF32 || view.dtype() == DType::kBF16;
}

// q_latent and out [rows, heads, latent], q_rope [rows, heads, rope], of the cache's widths.
inline void check_absorbed_operands(ConstTensorView q_latent, ConstTensorView q_rope,
                                    ConstTensorView out, const LatentLayout& layout) {
  FATHOM_CHECK(q_latent.rank() == 3 && q_rope.rank() == 3 && out.rank() == 3 &&
                   q_latent.size(2) == layout.latent_dim && q_rope.size(2) == layout.rope_dim &&
                   q_rope.size(0) == q_latent.size(0) && q_rope.size(1) == q_latent.size(1) &&
                   out.size(0) == q_latent.size(0) && out.size(1) == q_latent.size(1) &&
                   out.size(2) == q_latent.size(2),
               "q_latent {}, q_rope {}, out {}, cache {} + {}", q_latent.shape_string(),
               q_rope.shape_string(), out.shape_string(), layout.latent_dim, layout.rope_dim);
  FATHOM_CHECK(is_float(q_latent) && q_rope.dtype() == q_latent.dtype() && is_float(out),
               "q_latent {}, q_rope {}, out {}", name_of(q_latent.dtype()), name_of(q_rope.dtype()),
               name_of(out.dtype()));
}

}  // namespace fathom
