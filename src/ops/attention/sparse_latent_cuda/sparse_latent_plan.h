// Splits of the lists of sparse latent attention on a GPU, and its scratch memory. Host code; what
// is chosen here depends on no length, so that a captured graph serves any.
#pragma once

#include <cstdint>

namespace fathom::cuda {

// Entries of a list that the kernel takes together.
inline constexpr int32_t kSparseTileKeys = 64;
// Heads that one CTA computes.
inline constexpr int32_t kSparseTileHeads = 64;

// Words of 4 bytes of one CTA's partial result: 512 columns of its heads, two values a word.
inline constexpr int64_t kSparseSumWords = 512 * kSparseTileHeads / 2;

// split_keys with which a launch of up to `rows` rows is fastest: few rows need splits to occupy
// the SMs, many rows pay for them. Results with different split_keys differ in their last bits: a
// caller whose rows must have equal bits in batches of any size uses kInvariantSplitKeys for all.
int32_t sparse_latent_split_keys(int64_t rows, int32_t heads, int32_t top_k,
                                 int num_multiprocessors);

inline constexpr int32_t kInvariantSplitKeys = 512;

// Words of 4 bytes: partial results of all rows' splits and their weights; 0 with one split.
int64_t sparse_latent_scratch_words(int64_t rows, int32_t heads, int32_t top_k, int32_t split_keys);

}  // namespace fathom::cuda
