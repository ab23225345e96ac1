// Which of the main model's states pages keep for the MTP layer, on every backend.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "model/forward_batch.h"

namespace fathom {

inline constexpr int64_t kKeptStates = kMaxDrafts + 1;  // of each page and MTP layer

// Whether later steps may need a token's state: it is among its chunk's last ones, or among its
// page's, which a sequence continues that has this page from the prefix cache.
constexpr bool keeps_state(int64_t position, int64_t chunk_end) {
  return position >= chunk_end - kKeptStates || position % kPageSize >= kPageSize - kKeptStates;
}

// Parts of a page of a GPU's cache, as large as a layer's, before its index keys: the layers', and
// with an MTP layer its own and as many as the kept states take in bf16. Whole parts, because
// kernels count pages in them.
constexpr int64_t gpu_page_parts(int64_t num_layers, int64_t hidden, int64_t layer_bytes,
                                 bool with_mtp) {
  constexpr int64_t kBytes = 2;  // of a value
  return num_layers + (with_mtp ? 1 + ceil_div(kKeptStates * hidden * kBytes, layer_bytes) : 0);
}

}  // namespace fathom
