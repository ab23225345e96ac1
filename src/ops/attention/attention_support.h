// Shapes that the attention kernels support on a GPU: query_key(), latent_decode(), mha_prefill(),
// gather_latent() and scaled_absorb(). Host code.
#pragma once

#include "base/named_size.h"

namespace fathom::cuda {

// Widths of the latent and of a head's dimensions; any number of heads.
struct AttentionSizes {
  NamedSize latent, rope, nope, v;
};

inline Result<> attention_supports(const AttentionSizes& sizes) {
  FATHOM_RETURN_IF_ERROR(require_equal(sizes.latent, 512));
  FATHOM_RETURN_IF_ERROR(require_equal(sizes.rope, 64));
  FATHOM_RETURN_IF_ERROR(require_equal(sizes.nope, 128));
  return require_equal(sizes.v, 128);
}

}  // namespace fathom::cuda
