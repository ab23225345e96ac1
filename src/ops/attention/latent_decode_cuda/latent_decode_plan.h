// Plan of latent decode attention on a GPU: which CTA computes which keys of which rows. Host code,
// made once a step and used by every layer.
//
// A row tile is up to `tile_rows` query rows (tokens x heads) of one sequence; its keys come in
// tiles of one page. A split (LatentDecodePart) is a run of a row tile's key tiles, computed by one
// CTA. The CTAs that computed the splits of a row tile also combine them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/attention/paged_batch.h"

namespace fathom::cuda {

// CTAs of a launch at most, one per SM: those of an H100 or H200.
inline constexpr int kMostLatentDecodeBlocks = 132;

// Read by the kernel.
struct alignas(16) LatentDecodePart {
  static constexpr int kPagesWithin = 4;

  int32_t first_page = 0;  // of its first tile, in the batch's block tables as one array
  int32_t first_row = 0;   // of the sequence's rows (token-major: token * heads + head)
  int32_t rows = 0;        // 0: no work
  int32_t out_row = 0;     // first_row in the batch's rows
  int32_t first_tile = 0;  // key tiles
  int32_t num_tiles = 0;
  int32_t kv_len = 0;       // keys of the sequence, the new tokens included
  int32_t num_queries = 0;  // new tokens of the sequence
  int32_t split = 0;        // index among the splits of its row tile
  int32_t num_splits = 1;
  int32_t first_slot = 0;    // partial results of its row tile: num_splits of them from here
  int32_t first_weight = 0;  // their weights: num_splits * num_splits from here
  int32_t more = 0;          // 1: the CTA has another split after this
  int32_t old_tiles = 0;     // tiles before the first that has a token of this step
  int32_t padding[2] = {};
  int32_t pages[kPagesWithin] = {};  // of its first tiles: known before the block table is read
};

struct LatentDecodePlan {
  int tile_rows = 16;  // 16, 32, 64 or 128
  // [SMs]: index of each CTA's first split (for tiles of 128 rows: of each pair of CTAs, so half of
  // the entries are used); idle CTAs share one split without rows. CTAs wait for one another: there
  // is one per SM, so that all of them are co-resident.
  std::vector<int32_t> first_part;
  std::vector<LatentDecodePart> parts;
  int64_t num_slots = 0, num_weights = 0;  // of scratch memory
};

// Scratch memory for any plan, in words of 4 bytes: sums first, then weights.
struct LatentDecodeScratch {
  int64_t sums = 0, weights = 0;

  int64_t words() const { return sums + weights; }
};
LatentDecodeScratch latent_decode_scratch(int num_multiprocessors);

// The tile rows for a batch of up to `most_rows` query rows a sequence (tokens x heads): the kernel
// does not depend on the lengths.
int latent_decode_tile_rows(int64_t most_rows);

// Plans the listed sequences (indices into the batch), each with at least one new token. Every CTA
// gets about as many key tiles, with the fewest splits that allow it. Depends on all lengths of the
// batch: the same batch has the same plan.
LatentDecodePlan plan_latent_decode(const PagedBatch& batch, std::span<const int32_t> sequences,
                                    int num_heads, int num_multiprocessors);

// A batch-invariant plan: a token's result depends on the keys that it sees alone. Each token has
// row tiles of its own, and its position determines their splits. Returns several plans for as many
// launches where the splits do not fit the scratch memory together. Takes hidden keys: hidden_key.h
std::vector<LatentDecodePlan> plan_batch_invariant_latent_decode(const PagedBatch& batch,
                                                                 std::span<const int32_t> sequences,
                                                                 int num_heads,
                                                                 int num_multiprocessors);

// Splits of such a row tile of `pages` pages; and the most entries that one of those plans has, for
// `row_tiles` row tiles of 16 rows.
int64_t batch_invariant_splits(int64_t pages);
int64_t most_batch_invariant_parts(int64_t row_tiles, int num_multiprocessors);

}  // namespace fathom::cuda
