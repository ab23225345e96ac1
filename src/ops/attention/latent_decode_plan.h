// How latent decode attention on a GPU is cut into parts: which block computes which keys of which
// rows. Host code, made once a step and used by every layer.
//
// A row tile is up to `tile_rows` query rows (tokens x heads) of one sequence; its keys come in
// tiles of one page. A part is a run of a row tile's key tiles, computed by one block. Row tiles
// that are cut into several parts are joined by the blocks that computed them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/attention/paged_batch.h"

namespace fathom::cuda {

// As the kernel reads it.
struct alignas(16) LatentDecodePart {
  static constexpr int kPagesWithin = 4;

  int32_t first_page = 0;  // of its first tile, in the batch's block tables as one array
  int32_t first_row = 0;   // of the sequence's rows (token-major: token * heads + head)
  int32_t rows = 0;        // 0: nothing to do
  int32_t out_row = 0;     // first_row in the batch's rows
  int32_t first_tile = 0;  // key tiles
  int32_t num_tiles = 0;
  int32_t kv_len = 0;       // of the sequence, the new tokens included
  int32_t num_queries = 0;  // of the sequence
  int32_t split = 0;        // among the parts of its row tile
  int32_t num_splits = 1;
  int32_t first_slot = 0;    // partial results of its row tile: num_splits of them from here
  int32_t first_weight = 0;  // their weights: num_splits * num_splits from here
  int32_t more = 0;          // 1: the block has another part after this
  int32_t old_tiles = 0;     // of its tiles: those before the first that has a token of this step
  int32_t padding[2] = {};
  int32_t pages[kPagesWithin] = {};  // of its first tiles: known before the block table is read
};

struct LatentDecodePlan {
  int tile_rows = 16;  // 16, 32, 64 or 128
  // [multiprocessors]: where each block's parts begin (of 128 rows: each pair of blocks', so that
  // half of them are used); blocks without work share one part without
  // rows. Blocks wait for one another: there is one for each multiprocessor, so that all of them
  // run.
  std::vector<int32_t> first_part;
  std::vector<LatentDecodePart> parts;
  int64_t num_slots = 0, num_weights = 0;  // of scratch memory
};

// Scratch memory for any plan, in words of 4 bytes: first that for sums, then that for weights.
struct LatentDecodeScratch {
  int64_t sums = 0, weights = 0;

  int64_t words() const { return sums + weights; }
};
LatentDecodeScratch latent_decode_scratch(int num_multiprocessors);

// The most rows that a tile has, so that a batch of up to `most_rows` query rows a sequence
// (tokens x heads) has the same kernel, whatever its lengths.
int latent_decode_tile_rows(int64_t most_rows);

// For the sequences listed (indices into the batch), each with at least one new token. Every block
// gets about as many key tiles; a row tile is cut no more than that needs. Depends on all lengths
// of the batch: the same batch has the same plan.
LatentDecodePlan plan_latent_decode(const PagedBatch& batch, std::span<const int32_t> sequences,
                                    int num_heads, int num_multiprocessors);

// The same, but so that a token's bits depend on the keys that it sees alone: each token has row
// tiles of its own, and how they are cut is said by its position. Several plans, to be launched one
// after the other, where their parts do not find room in the scratch memory together.
std::vector<LatentDecodePlan> plan_batch_invariant_latent_decode(const PagedBatch& batch,
                                                                 std::span<const int32_t> sequences,
                                                                 int num_heads,
                                                                 int num_multiprocessors);

// Parts of such a row tile of so many pages; and the most that one of those plans has, of so many
// row tiles of 16 rows.
int64_t batch_invariant_splits(int64_t pages);
int64_t most_batch_invariant_parts(int64_t row_tiles, int num_multiprocessors);

}  // namespace fathom::cuda
