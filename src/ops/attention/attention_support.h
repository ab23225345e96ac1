// Shapes that the attention kernels support on a GPU: query_key(), latent_decode(),
// sparse_latent_attention(), and those of multi-head attention: mha_prefill(), gather_latent().
// Host code.
#pragma once

#include "base/named_size.h"

namespace fathom::cuda {

// Accepts any number of heads.
inline Result<> absorbed_attention_supports(const NamedSize& latent, const NamedSize& rope) {
  FATHOM_RETURN_IF_ERROR(require_equal(latent, 512));
  return require_equal(rope, 64);
}

// Besides: heads of other widths have absorbed attention alone.
inline Result<> multi_head_attention_supports(const NamedSize& nope, const NamedSize& v) {
  FATHOM_RETURN_IF_ERROR(require_equal(nope, 128));
  return require_equal(v, 128);
}

}  // namespace fathom::cuda
