// Mapping of rows and pages to sequences, as the attention operations read it. Views only.
#pragma once

#include <cstdint>
#include <span>

namespace fathom {

struct PagedBatch {
  std::span<const int32_t> query_start;   // [sequences + 1]: sequence s owns rows [s], [s + 1)
  std::span<const int32_t> context_lens;  // [sequences]: tokens before the sequence's first row
  std::span<const int32_t> block_tables;  // [sequences, max_pages]
  int32_t max_pages = 0;
  // [sequences]: tokens in the cache before this step. Fewer than context_lens where rows of the
  // same step precede the sequence's first row; empty: equal to context_lens.
  std::span<const int32_t> cached_lens = {};
  // Keys before this one are hidden from all rows: an MTP layer has no row for a sequence's first
  // token. At most context_lens. On a GPU see latent_decode_cuda/hidden_key.h.
  int32_t first_key = 0;

  int64_t num_sequences() const { return static_cast<int64_t>(context_lens.size()); }
  int32_t num_queries(int64_t s) const { return query_start[s + 1] - query_start[s]; }
  // Tokens that the sequence's last row may see: its context and the new ones.
  int32_t total_len(int64_t s) const { return context_lens[s] + num_queries(s); }
  std::span<const int32_t> pages(int64_t s) const {
    return block_tables.subspan(static_cast<size_t>(s * max_pages), static_cast<size_t>(max_pages));
  }
};

}  // namespace fathom
