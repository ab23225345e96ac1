// Attention over a layer whose sequences have no key 0, as the MTP layer: its row of a token is
// made from the state before the token, and a sequence's first token has none.
//
// Latent decode's kernels see the keys of a split from its first page's first slot up to a length.
// So the first page of a sequence is rotated: key p lies in slot p - 1, and slot 63 takes the place
// of the hidden key. plan_batch_invariant_latent_decode() with PagedBatch::first_key 1 makes that
// page a split of its own that ends before this slot, which is not read. A page depends on its own
// tokens alone, as without a hidden key.
#pragma once

#include <cstdint>

#include "cache/latent_layout.h"

namespace fathom::cuda {

// The slot of a position's key in its page.
constexpr int64_t slot_behind_hidden_key(int64_t position) {
  return position < kPageSize ? (position + kPageSize - 1) % kPageSize : position % kPageSize;
}

}  // namespace fathom::cuda
