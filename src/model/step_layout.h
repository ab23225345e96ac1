// The arrays that a GPU step's kernels read, in one buffer that is copied at once. Host code, free
// of CUDA.
//
// Rows are ordered by the form of attention that they take: first the absorbed ones, those of
// sequences with one such row before the others, then the multi-head ones; a sequence may have rows
// of both. The keys of multi-head rows are expanded in passes of a bounded number of keys; a
// sequence with more keys than that has runs in several passes. Arrays whose length follows from
// the number of rows come first, so that their offsets are the same for every step of as many rows,
// as captured graphs require.
//
// With sparse attention (DeepSeek-V3.2) absorbed rows attend to lists of keys, those that see no
// more than the dense threshold to all of them; multi-head rows are among the latter. Which rows
// choose is decided here from their lengths, and again by the kernels on the device: a graph serves
// rows of any length. A step in which no row chooses takes the kernels of dense attention, which
// read whole pages, unless all rows have lists in every step: batch-invariant ones, or by
// StepLimits::lists_always. Lists name keys, so a step of the MTP layer leaves its sequences' key 0
// out of them, and pages are not rotated for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/math.h"
#include "model/attention_plan.h"
#include "model/forward_batch.h"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"
#include "ops/attention/prefill_cuda/mha_prefill_plan.h"
#include "ops/indexer/sparse_plan.h"

namespace fathom::cuda {

struct StepLimits {
  int64_t heads = 0;
  int num_multiprocessors = 0;
  AttentionShape shape = {};
  AttentionPolicy policy = {};
  // Keys expanded at a time for the multi-head form, a multiple of MhaPrefillTile::kKeys. Longer
  // sequences are cut at multiples of it, whatever else is in the step.
  int64_t most_keys = 0;
  // Makes a row's plan depend only on its position and on whether it belongs to a prompt: prompt
  // rows are multi-head, completion rows absorbed, unless the policy forces one form.
  bool batch_invariant = false;
  // With sparse attention (shape.sparse): the most keys of a row.
  int64_t max_length = 0;
  // With sparse attention: rows have lists also in steps in which none chooses, as batch-invariant
  // ones do.
  bool lists_always = false;
  // Distance between consecutive pool pages in pages of one layer. Kernels count pages of one
  // layer: a device page number is the pool's page number times this (CacheMemory).
  int64_t page_stride = 1;
  // Steps write the MTP layer's rows of their tokens too, and keep states.
  bool with_mtp = false;
  int32_t first_key = 0;  // of the MTP layer's own steps 1, see hidden_key.h

  // The slot of a position's row of the MTP layer in its page.
  int64_t mtp_slot(int64_t position) const;
};

// The limits of a step of the MTP layer (StepPlanner::plan_draft()) beside steps with these.
StepLimits draft_limits(StepLimits limits);

// Offsets of the arrays, in bytes from the start of the memory.
struct StepArrays {
  int64_t num_valid_rows = 0;  // [1] i32: rows beyond are padding
  int64_t token_ids = 0;       // [rows] i32, as in ForwardBatch
  int64_t positions = 0;       // [rows] i32
  int64_t slots = 0;           // [rows] i64: device page * kPageSize + slot; -1: padding
  int64_t table_starts = 0;    // [rows] i32: place in block_tables of the row's first page
  int64_t logit_rows = 0;      // [logit rows] i32
  // With an MTP layer.
  int64_t previous_states = 0;  // [rows] i64: see MtpInputArguments::previous
  int64_t mtp_slots = 0;        // [rows] i64: slots of the MTP layer's rows; -1: it is not written
  int64_t state_slots = 0;      // [rows] i64: number among the kept states; -1: it is not kept
  int64_t first_part = 0;       // of the first of decodes, with room for as many splits
  int64_t parts = 0;            // as a step of so many rows needs
  // With sparse attention; where rows always have lists, in place of the splits:
  int64_t lengths = 0;   // [rows] i32: the row's position and 1, keys end there; 0: padding
  int64_t num_keys = 0;  // [rows] i32: keys that the row sees; the same array without a first key
  int64_t block_tables = 0;  // [runs, max_pages] i32 device pages, -1: none; absorbed runs' first
  // Only for multi-head rows, which graphs do not have. Arrays of all passes together.
  int64_t gathered = 0;        // [parts] i32: indices of block tables
  int64_t first_keys = 0;      // [parts] i32: in the sequence
  int64_t key_starts = 0;      // [parts + passes] i32: first key of each run in the pass
  int64_t mha_first_tile = 0;  // [passes, SMs] i32, see MhaPrefillPlan
  int64_t mha_tiles = 0;       // MhaPrefillTile
};

// A launch of latent decode attention, and the offsets of its arrays.
struct DecodeLaunch {
  int tile_rows = 16;
  int64_t first_part = 0;  // [SMs] i32, see LatentDecodePlan
  int64_t parts = 0;       // LatentDecodePart
};

// Sequences' keys, or runs of them, that are expanded together.
struct MhaPass {
  int32_t num_keys = 0;
  int32_t first_part = 0, num_parts = 0;  // of different sequences
  int64_t first_tile = 0;                 // in mha_tiles
};

// Rows whose index scores are computed together; rows among them that see all of their keys leave.
struct IndexPass {
  // Most rows, for which the model has room.
  static constexpr int64_t kMostRows = 1024;

  int64_t first_row = 0, rows = 0;
  int64_t columns = 0;  // of the scores

  friend bool operator==(const IndexPass&, const IndexPass&) = default;
};

// One planned step. Its memory is reused for the next.
struct StepLayout {
  static constexpr int64_t kAlignment = 16;

  int64_t rows = 0, valid_rows = 0;  // rows: including padding
  bool has_mtp_rows = false;         // some of mtp_slots are slots
  int64_t absorbed_rows = 0;         // first in the order
  int64_t logit_rows = 0;
  int64_t most_keys = 0;  // most keys that a row sees, itself included
  int64_t all_keys = 0;   // keys of all sequences, each counted once
  int32_t max_pages = 0;
  int64_t page_stride = 1;
  StepArrays at;
  // In launch order; a graph has only the first, of its tile. None: absorbed rows have lists of
  // keys.
  std::vector<DecodeLaunch> decodes;
  // Passes over absorbed rows, in order. Empty: no row selects its keys, the step is short.
  std::vector<IndexPass> index_passes;
  bool any_length = false;  // the passes are of all rows, whatever their lengths
  int32_t first_key = 0;    // that rows see, StepLimits::first_key
  std::vector<MhaPass> passes;
  std::vector<std::byte> memory;
};

// Device address of the array that begins `offset` bytes after the step's start.
template <typename T>
const T* array_at(const std::byte* arrays, int64_t offset) {
  return reinterpret_cast<const T*>(arrays + offset);
}

// Appends the values at the next aligned offset of the memory; returns that offset.
template <typename T>
int64_t append(StepLayout& layout, std::span<const T> values) {
  const int64_t at = round_up(std::ssize(layout.memory), StepLayout::kAlignment);
  layout.memory.resize(static_cast<size_t>(at) + values.size_bytes());
  std::memcpy(layout.memory.data() + at, values.data(), values.size_bytes());
  return at;
}

// The most rows that one of the batch's sequences has.
int32_t most_queries(const ForwardBatch& batch);

// Plans steps. Reuses its memory between steps.
class StepPlanner {
 public:
  explicit StepPlanner(const StepLimits& limits);

  // Plans the batch as a step of `rows` rows, padded after the batch's rows; with padding every row
  // has a logit row. The logits are in the batch's order.
  void plan(const ForwardBatch& batch, int64_t rows, StepLayout& out);
  // A step of the MTP layer, by draft_limits(). `states`: of each of the batch's rows the index of
  // the state before it among the logit rows of the draft step before; empty: they are the main
  // model's, kept in pages. `rows`: 0, or those of a graph, which has as many logit rows: the
  // batch's, then others whose logits are of no use.
  void plan_draft(const ForwardBatch& batch, std::span<const int32_t> states, int64_t rows,
                  StepLayout& out);

  // Whether the batch has one row a sequence, with an MTP layer up to 1 + kMaxDrafts, each sampled,
  // as a graph requires.
  bool is_decode(const ForwardBatch& batch) const;

  // Lets the step's rows have any length: plans index passes over all of them. For a graph of a
  // model with sparse attention, in which the rows that see all of their keys leave early.
  void plan_any_length(StepLayout& out) const;

  // Upper bound of the bytes of a step with so many rows and sequences whose keys lie in so many
  // pages.
  int64_t most_bytes(int64_t rows, int64_t sequences, int64_t max_pages) const;

 private:
  // Rows of one sequence and one form.
  struct Run {
    int32_t sequence = 0;  // index in the batch
    int32_t context = 0;   // tokens before the first row
    int32_t num_rows = 0;
    int32_t batch_row = 0;  // first row
    int32_t first_row = 0;  // first row in the step's order
  };

  int32_t multi_head_rows(const ForwardBatch& batch, int32_t sequence, bool is_decode_step) const;
  void plan_absorbed(const ForwardBatch& batch, StepLayout& out);
  bool has_splits() const;
  void plan_index_passes(StepLayout& out) const;
  void write_tables(const ForwardBatch& batch, StepLayout& out);
  void order_rows(const ForwardBatch& batch);
  void place_arrays(const ForwardBatch& batch, StepLayout& out);
  void write_rows(const ForwardBatch& batch, StepLayout& out);
  void write_mtp(const ForwardBatch& batch, StepLayout& out) const;
  void write_absorbed(const ForwardBatch& batch, StepLayout& out);
  void write_multi_head(StepLayout& out);
  void add_keys(int64_t index, StepLayout& out);
  void end_pass(StepLayout& out);
  void write_decodes(StepLayout& out) const;
  int64_t most_parts(int64_t rows) const;
  int64_t most_further_bytes(int64_t rows, int64_t max_pages) const;

  const StepLimits limits_;
  bool is_decode_step_ = false;
  std::vector<Run> runs_;        // in the step's order
  int64_t num_single_ = 0;       // leading runs of one absorbed row each
  int64_t num_absorbed_ = 0;     // leading absorbed runs
  std::vector<int32_t> row_of_;  // [rows of the batch]: row in the step's order
  std::vector<int32_t> query_start_, context_lens_, cached_lens_, sequences_;  // of absorbed rows
  std::vector<LatentDecodePlan> decodes_;
  MhaPass pass_;                       // being filled
  std::vector<MhaPrefillPart> parts_;  // of pass_
  std::vector<int32_t> gathered_, first_keys_, key_starts_, first_tiles_;
  std::vector<MhaPrefillTile> tiles_;
};

}  // namespace fathom::cuda
