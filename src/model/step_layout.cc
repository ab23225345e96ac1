#include "model/step_layout.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"
#include "model/kept_states.h"
#include "ops/attention/latent_decode_cuda/hidden_key.h"
#include "ops/mtp/kept_states.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = StepLayout::kAlignment;
// First rows of index passes are multiples of this, which keeps their GEMMs' rows aligned.
constexpr int64_t kRowUnit = 16;

int32_t page_of(const ForwardBatch& batch, int64_t sequence, int64_t position) {
  const int32_t page =
      batch.block_tables[static_cast<size_t>(sequence * batch.max_pages + position / kPageSize)];
  FATHOM_CHECK(page >= 0, "sequence {} has no page for position {}", sequence, position);
  return page;
}

// Where the page keeps the state of the token at a position.
int64_t state_number(const ForwardBatch& batch, int64_t sequence, int64_t position) {
  return page_of(batch, sequence, position) * kKeptStates + position % kKeptStates;
}
// As score_buffer_floats() counts them.
int64_t score_columns(int64_t length) { return round_up(length, int64_t{16}); }

int32_t num_queries(const ForwardBatch& batch, int64_t sequence) {
  return batch.query_start[static_cast<size_t>(sequence + 1)] -
         batch.query_start[static_cast<size_t>(sequence)];
}

}  // namespace

int32_t most_queries(const ForwardBatch& batch) {
  int32_t most = 0;
  for (int64_t s = 0; s < batch.num_sequences(); ++s) most = std::max(most, num_queries(batch, s));
  return most;
}

namespace {

// An array of T in the step's memory.
template <typename T>
T* array_at(StepLayout& layout, int64_t offset) {
  return reinterpret_cast<T*>(layout.memory.data() + offset);
}

}  // namespace

// Completions' rows, batch-invariant because such a plan takes hidden keys.
StepLimits draft_limits(StepLimits limits) {
  limits.policy.form = AttentionForm::kAbsorbed;
  limits.batch_invariant = true;
  limits.with_mtp = false;
  limits.first_key = 1;
  return limits;
}

int64_t StepLimits::mtp_slot(int64_t position) const {
  return shape.sparse ? position % kPageSize : slot_behind_hidden_key(position);
}

StepPlanner::StepPlanner(const StepLimits& limits) : limits_(limits) {
  FATHOM_CHECK(limits.most_keys % MhaPrefillTile::kKeys == 0, "{} keys at a time",
               limits.most_keys);
}

bool StepPlanner::is_decode(const ForwardBatch& batch) const {
  // Logit rows are distinct rows of the batch: as many as rows means all of them.
  if (std::ssize(batch.logit_rows) != batch.num_rows() ||
      most_queries(batch) > (limits_.with_mtp ? 1 + kMaxDrafts : 1)) {
    return false;
  }
  // A graph has no multi-head rows.
  for (int32_t s = 0; limits_.batch_invariant && s < batch.num_sequences(); ++s) {
    if (multi_head_rows(batch, s, false) > 0) return false;
  }
  return true;
}

void StepPlanner::plan(const ForwardBatch& batch, int64_t rows, StepLayout& out) {
  FATHOM_CHECK(rows >= batch.num_rows(), "{} rows for {}", rows, batch.num_rows());
  out.rows = rows;
  out.valid_rows = batch.num_rows();
  out.logit_rows = rows > out.valid_rows ? rows : std::ssize(batch.logit_rows);
  order_rows(batch);
  place_arrays(batch, out);
  write_rows(batch, out);
  write_tables(batch, out);
  if (limits_.with_mtp) write_mtp(batch, out);
  plan_absorbed(batch, out);
  write_multi_head(out);
}

void StepPlanner::plan_draft(const ForwardBatch& batch, std::span<const int32_t> states,
                             int64_t rows, StepLayout& out) {
  FATHOM_CHECK(limits_.first_key == 1 && (rows == 0 || rows >= batch.num_rows()) &&
                   (states.empty() || std::ssize(states) == batch.num_rows()),
               "{} rows for {} of a draft, {} states", rows, batch.num_rows(), states.size());
  out.rows = rows > 0 ? rows : batch.num_rows();
  out.valid_rows = std::ssize(batch.logit_rows);  // those that go through the experts
  out.logit_rows = rows > 0 ? rows : out.valid_rows;
  order_rows(batch);
  place_arrays(batch, out);
  write_rows(batch, out);
  auto* const previous = array_at<int64_t>(out, out.at.previous_states);
  std::fill_n(previous, out.rows, kNoState);
  for (const Run& run : runs_) {
    for (int32_t i = 0; i < run.num_rows; ++i) {
      const auto from = static_cast<size_t>(run.batch_row) + static_cast<size_t>(i);
      previous[run.first_row + i] =
          states.empty() ? -1 - state_number(batch, run.sequence, batch.positions[from] - 1)
                         : states[from];
    }
  }
  write_tables(batch, out);
  plan_absorbed(batch, out);
}

// With sparse attention who chooses keys; if nobody does, or without it, the splits of latent
// decode.
void StepPlanner::plan_absorbed(const ForwardBatch& batch, StepLayout& out) {
  out.decodes.clear();
  out.index_passes.clear();
  out.any_length = false;
  if (limits_.shape.sparse) plan_index_passes(out);
  if (has_splits() && out.index_passes.empty()) write_absorbed(batch, out);
}

bool StepPlanner::has_splits() const {
  return !limits_.shape.sparse || !(limits_.batch_invariant || limits_.lists_always);
}

int64_t StepPlanner::most_bytes(int64_t rows, int64_t sequences, int64_t max_pages) const {
  // At worst each run of keys has tiles of all later rows, in a pass of its own. A sequence's rows
  // may take both forms.
  const int64_t tables = limits_.batch_invariant ? 2 * sequences : sequences;
  const int64_t key_runs = ceil_div(max_pages * kPageSize, std::max<int64_t>(1, limits_.most_keys));
  const int64_t tiles =
      key_runs * (ceil_div(rows, MhaPrefillTile::kRows) + sequences) * limits_.heads;
  const int64_t passes = key_runs * sequences;
  const int64_t of_a_row = 28 + (limits_.with_mtp ? 24 : limits_.first_key > 0 ? 12 : 0);
  return rows * of_a_row + int64_t{limits_.num_multiprocessors} * 4 +
         most_parts(rows) * static_cast<int64_t>(sizeof(LatentDecodePart)) +
         most_further_bytes(rows, max_pages) + tables * max_pages * 4 +
         passes * (16 + limits_.num_multiprocessors *
                            (4 + static_cast<int64_t>(sizeof(MhaPrefillTile)))) +
         tiles * static_cast<int64_t>(sizeof(MhaPrefillTile)) + 21 * kAlignment;
}

int64_t StepPlanner::most_parts(int64_t rows) const {
  // At worst each token's rows begin a row tile; cuts between CTAs add one split each, and there is
  // one empty split.
  const int64_t tiles = rows * ceil_div(limits_.heads, 16);
  return limits_.batch_invariant ? most_batch_invariant_parts(tiles, limits_.num_multiprocessors)
                                 : tiles + limits_.num_multiprocessors + 1;
}

// Bytes of the launches after the first. Batch-invariant ones have at least as many splits as CTAs;
// otherwise there is one more at most.
int64_t StepPlanner::most_further_bytes(int64_t rows, int64_t max_pages) const {
  constexpr auto kPart = static_cast<int64_t>(sizeof(LatentDecodePart));
  if (!limits_.batch_invariant) {
    return most_parts(rows) * kPart + int64_t{limits_.num_multiprocessors} * 4 + 2 * kAlignment;
  }
  const int64_t splits = limits_.first_key + batch_invariant_splits(max_pages);
  const int64_t parts = rows * ceil_div(limits_.heads, 16) * splits;
  const int64_t launches = parts / limits_.num_multiprocessors;
  return parts * kPart +
         launches * (int64_t{limits_.num_multiprocessors} * 4 + kPart + 2 * kAlignment);
}

// Number of the sequence's first new rows that take the multi-head form.
int32_t StepPlanner::multi_head_rows(const ForwardBatch& batch, int32_t sequence,
                                     bool is_decode_step) const {
  const auto s = static_cast<size_t>(sequence);
  const int32_t context = batch.context_lens[s];
  int32_t rows = num_queries(batch, sequence);
  if (limits_.shape.sparse) {  // rows that see more keys choose them
    const int64_t dense = limits_.shape.sparse->dense_keys - context;
    rows = static_cast<int32_t>(std::clamp<int64_t>(dense, 0, rows));
  }
  if (limits_.batch_invariant && limits_.policy.form == AttentionForm::kAuto) {
    return std::clamp(batch.prompt_lens[s] - context, 0, rows);
  }
  return !is_decode_step && prefers_mha(rows, context, limits_.shape, limits_.policy) ? rows : 0;
}

void StepPlanner::order_rows(const ForwardBatch& batch) {
  enum Kind { kSingle, kAbsorbed, kMultiHead };
  is_decode_step_ = is_decode(batch);
  runs_.clear();
  for (const Kind kind : {kSingle, kAbsorbed, kMultiHead}) {
    for (int32_t s = 0; s < batch.num_sequences(); ++s) {
      const int32_t rows = num_queries(batch, s),
                    first = multi_head_rows(batch, s, is_decode_step_);
      const int32_t skipped = kind == kMultiHead ? 0 : first;
      const int32_t count = kind == kMultiHead ? first : rows - first;
      if (count == 0 || (kind != kMultiHead && (kind == kSingle) != (count == 1))) continue;
      const auto at = static_cast<size_t>(s);
      runs_.push_back({.sequence = s,
                       .context = batch.context_lens[at] + skipped,
                       .num_rows = count,
                       .batch_row = batch.query_start[at] + skipped});
    }
    if (kind == kSingle) num_single_ = std::ssize(runs_);
    if (kind == kAbsorbed) num_absorbed_ = std::ssize(runs_);
  }
  row_of_.resize(static_cast<size_t>(batch.num_rows()));
  int32_t row = 0;
  for (Run& run : runs_) {
    run.first_row = row;
    for (int32_t i = 0; i < run.num_rows; ++i) {
      row_of_[static_cast<size_t>(run.batch_row) + static_cast<size_t>(i)] = row++;
    }
  }
}

void StepPlanner::place_arrays(const ForwardBatch& batch, StepLayout& out) {
  int64_t bytes = 0;
  const auto place = [&](int64_t count, int64_t size) {
    const int64_t at = bytes;
    bytes = round_up(bytes + count * size, kAlignment);
    return at;
  };
  StepArrays& at = out.at;
  at.num_valid_rows = place(1, 4);
  at.token_ids = place(out.rows, 4);
  at.positions = place(out.rows, 4);
  at.slots = place(out.rows, 8);
  at.table_starts = place(out.rows, 4);
  at.logit_rows = place(out.logit_rows, 4);
  if (limits_.with_mtp || limits_.first_key > 0) at.previous_states = place(out.rows, 8);
  if (limits_.with_mtp) {
    at.mtp_slots = place(out.rows, 8);
    at.state_slots = place(out.rows, 8);
  }
  if (limits_.shape.sparse) {
    at.lengths = place(out.rows, 4);
    at.num_keys = limits_.first_key > 0 ? place(out.rows, 4) : at.lengths;
  }
  if (has_splits()) {
    at.first_part = place(limits_.num_multiprocessors, 4);
    at.parts = place(most_parts(out.rows), sizeof(LatentDecodePart));
  }
  at.block_tables = place(std::ssize(runs_) * batch.max_pages, 4);
  out.most_keys = 1 + *std::max_element(batch.positions.begin(), batch.positions.end());
  out.all_keys = 0;
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    out.all_keys += batch.context_lens[static_cast<size_t>(s)] + num_queries(batch, s);
  }
  out.passes.clear();
  out.max_pages = batch.max_pages;
  out.page_stride = limits_.page_stride;
  out.first_key = limits_.first_key;
  out.memory.resize(static_cast<size_t>(bytes));
}

void StepPlanner::write_rows(const ForwardBatch& batch, StepLayout& out) {
  *array_at<int32_t>(out, out.at.num_valid_rows) = static_cast<int32_t>(out.valid_rows);
  auto* const ids = array_at<int32_t>(out, out.at.token_ids);
  auto* const positions = array_at<int32_t>(out, out.at.positions);
  auto* const slots = array_at<int64_t>(out, out.at.slots);
  auto* const logit_rows = array_at<int32_t>(out, out.at.logit_rows);
  out.absorbed_rows = 0;
  for (const Run& run : runs_) {
    for (int32_t i = 0; i < run.num_rows; ++i) {
      const auto from = static_cast<size_t>(run.batch_row) + static_cast<size_t>(i);
      const int32_t to = run.first_row + i;
      ids[to] = batch.token_ids[from];
      positions[to] = batch.positions[from];
      const int64_t page = page_of(batch, run.sequence, positions[to]) * limits_.page_stride;
      slots[to] = page * kPageSize + (limits_.first_key > 0 ? limits_.mtp_slot(positions[to])
                                                            : positions[to] % kPageSize);
    }
  }
  for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
    logit_rows[i] = row_of_[static_cast<size_t>(batch.logit_rows[i])];
  }
  for (int64_t row = batch.num_rows(); row < out.rows; ++row) {
    ids[row] = positions[row] = 0;
    slots[row] = -1;
  }
  for (auto row = std::ssize(batch.logit_rows); row < out.logit_rows; ++row) {
    logit_rows[row] = static_cast<int32_t>(row);
  }
  for (int64_t i = 0; i < num_absorbed_; ++i) {
    out.absorbed_rows += runs_[static_cast<size_t>(i)].num_rows;
  }
}

// Rows of the MTP layer for the tokens that are no drafts and have none yet, and the states that
// pages keep. A sequence's first token has no state before it: its row is hidden (hidden_key.h), or
// in no list of keys.
void StepPlanner::write_mtp(const ForwardBatch& batch, StepLayout& out) const {
  auto* const previous = array_at<int64_t>(out, out.at.previous_states);
  auto* const slots = array_at<int64_t>(out, out.at.mtp_slots);
  auto* const kept = array_at<int64_t>(out, out.at.state_slots);
  std::fill_n(previous, out.rows, kNoState);
  std::fill_n(slots, out.rows, -1);
  std::fill_n(kept, out.rows, -1);
  out.has_mtp_rows = false;
  for (int32_t s = 0; s < batch.num_sequences(); ++s) {
    const auto at = static_cast<size_t>(s);
    const int32_t context = batch.context_lens[at], end = context + num_queries(batch, s);
    const int32_t first = batch.mtp_lens.empty() ? context : batch.mtp_lens[at],
                  last = end - (batch.num_drafts.empty() ? 0 : batch.num_drafts[at]);
    FATHOM_CHECK(first >= context, "sequence {}: MTP rows from {} on, its step begins at {}", s,
                 first, context);
    for (int32_t position = context; position < end; ++position) {
      const auto from = static_cast<size_t>(batch.query_start[at] + position - context);
      const int32_t row = row_of_[from];
      if (keeps_state(position, end)) kept[row] = state_number(batch, s, position);
      if (position < first || position >= last) continue;
      const int64_t page = page_of(batch, s, position) * limits_.page_stride;
      slots[row] = page * kPageSize + limits_.mtp_slot(position);
      out.has_mtp_rows = true;
      if (position > context) {
        previous[row] = row_of_[from - 1];
      } else if (position > 0) {
        previous[row] = -1 - state_number(batch, s, position - 1);
      }
    }
  }
}

// The runs' block tables, the place of each row's and, with sparse attention, each row's length.
void StepPlanner::write_tables(const ForwardBatch& batch, StepLayout& out) {
  auto* const tables = array_at<int32_t>(out, out.at.block_tables);
  for (int64_t i = 0; i < std::ssize(runs_); ++i) {
    const Run& run = runs_[static_cast<size_t>(i)];
    const auto pages = batch.block_tables.begin() + run.sequence * int64_t{batch.max_pages};
    std::transform(pages, pages + batch.max_pages, tables + i * batch.max_pages, [&](int64_t page) {
      return static_cast<int32_t>(page < 0 ? page : page * limits_.page_stride);
    });
  }
  auto* const starts = array_at<int32_t>(out, out.at.table_starts);
  std::fill_n(starts, out.rows, 0);
  for (int64_t i = 0; i < std::ssize(runs_); ++i) {
    const Run& run = runs_[static_cast<size_t>(i)];
    std::fill_n(starts + run.first_row, run.num_rows, static_cast<int32_t>(i * batch.max_pages));
  }
  if (!limits_.shape.sparse) return;
  auto* const lengths = array_at<int32_t>(out, out.at.lengths);
  auto* const num_keys = array_at<int32_t>(out, out.at.num_keys);
  std::fill_n(lengths, out.rows, 0);
  std::fill_n(num_keys, out.rows, 0);
  for (const Run& run : runs_) {
    for (int32_t row = 0; row < run.num_rows; ++row) {
      lengths[run.first_row + row] = run.context + row + 1;
      num_keys[run.first_row + row] = run.context + row + 1 - limits_.first_key;
    }
  }
}

// Each index pass starts at its first row that selects keys, rounded down to kRowUnit.
void StepPlanner::plan_index_passes(StepLayout& out) const {
  const SparseLimits& sparse = *limits_.shape.sparse;
  if (takes_short_graph(out.most_keys, limits_.first_key, sparse)) return;
  const auto* const lengths = array_at<const int32_t>(out, out.at.lengths);
  IndexPass pass;
  for (int64_t row = 0; row < out.absorbed_rows; ++row) {
    if (lengths[row] - limits_.first_key <= sparse.dense_keys) continue;
    const int64_t columns = score_columns(lengths[row]);
    const int64_t rows = row + 1 - pass.first_row, widest = std::max(pass.columns, columns);
    if (pass.rows > 0 && (rows > IndexPass::kMostRows || rows * widest * 4 > sparse.score_bytes)) {
      out.index_passes.push_back(pass);
      pass = {};
    }
    if (pass.rows == 0) pass.first_row = row / kRowUnit * kRowUnit;
    pass.rows = row + 1 - pass.first_row;
    pass.columns = std::max(pass.columns, columns);
  }
  if (pass.rows > 0) out.index_passes.push_back(pass);
}

void StepPlanner::plan_any_length(StepLayout& out) const {
  const int64_t columns = score_columns(limits_.max_length);
  int64_t most = std::clamp<int64_t>(limits_.shape.sparse->score_bytes / (columns * 4), 1,
                                     IndexPass::kMostRows);
  if (most > kRowUnit && most < out.rows) most = most / kRowUnit * kRowUnit;
  out.any_length = true;
  out.decodes.clear();
  out.index_passes.clear();
  for (int64_t row = 0; row < out.rows; row += most) {
    out.index_passes.push_back({row, std::min(most, out.rows - row), columns});
  }
}

void StepPlanner::write_absorbed(const ForwardBatch& batch, StepLayout& out) {
  query_start_.assign(1, 0);
  context_lens_.clear();
  cached_lens_.clear();
  sequences_.clear();
  const auto* const tables = array_at<int32_t>(out, out.at.block_tables);
  for (int64_t i = 0; i < num_absorbed_; ++i) {
    const Run& run = runs_[static_cast<size_t>(i)];
    query_start_.push_back(query_start_.back() + run.num_rows);
    context_lens_.push_back(run.context);
    cached_lens_.push_back(batch.context_lens[static_cast<size_t>(run.sequence)]);
    sequences_.push_back(static_cast<int32_t>(i));
  }
  const PagedBatch absorbed{query_start_,
                            context_lens_,
                            std::span(tables, static_cast<size_t>(num_absorbed_ * batch.max_pages)),
                            batch.max_pages,
                            cached_lens_,
                            limits_.first_key};
  const auto heads = static_cast<int>(limits_.heads);
  const auto plan = [&](std::span<const int32_t> sequences) {
    decodes_.push_back(plan_latent_decode(absorbed, sequences, heads, limits_.num_multiprocessors));
  };
  decodes_.clear();
  if (limits_.batch_invariant) {
    decodes_ = plan_batch_invariant_latent_decode(absorbed, sequences_, heads,
                                                  limits_.num_multiprocessors);
  } else if (is_decode_step_) {
    plan(sequences_);  // one launch, as graphs have
  } else {
    // A tile has as many rows as the launch's largest sequence: a sequence with many tokens would
    // leave the others' tiles mostly empty.
    const auto sequences = std::span<const int32_t>(sequences_);
    const auto singles = static_cast<size_t>(num_single_);
    if (singles > 0 || sequences.empty()) plan(sequences.first(singles));
    if (singles < sequences.size()) plan(sequences.subspan(singles));
  }
  write_decodes(out);
}

void StepPlanner::write_decodes(StepLayout& out) const {
  const LatentDecodePlan& first = decodes_.front();
  FATHOM_CHECK(std::ssize(first.parts) <= most_parts(out.rows), "{} parts of {} rows",
               first.parts.size(), out.rows);
  std::copy(first.first_part.begin(), first.first_part.end(),
            array_at<int32_t>(out, out.at.first_part));
  std::copy(first.parts.begin(), first.parts.end(), array_at<LatentDecodePart>(out, out.at.parts));
  out.decodes.assign(1, {first.tile_rows, out.at.first_part, out.at.parts});
  for (const LatentDecodePlan& plan : std::span(decodes_).subspan(1)) {
    const int64_t first_part = append<int32_t>(out, plan.first_part);
    out.decodes.push_back({plan.tile_rows, first_part, append<LatentDecodePart>(out, plan.parts)});
  }
}

void StepPlanner::write_multi_head(StepLayout& out) {
  gathered_.clear();
  first_keys_.clear();
  key_starts_.clear();
  first_tiles_.clear();
  tiles_.clear();
  parts_.clear();
  pass_ = {};
  for (int64_t i = num_absorbed_; i < std::ssize(runs_); ++i) add_keys(i, out);
  end_pass(out);
  if (out.passes.empty()) return;
  out.at.gathered = append<int32_t>(out, gathered_);
  out.at.first_keys = append<int32_t>(out, first_keys_);
  out.at.key_starts = append<int32_t>(out, key_starts_);
  out.at.mha_first_tile = append<int32_t>(out, first_tiles_);
  out.at.mha_tiles = append<MhaPrefillTile>(out, tiles_);
}

// A sequence that fits a pass is not cut.
void StepPlanner::add_keys(int64_t index, StepLayout& out) {
  const Run& run = runs_[static_cast<size_t>(index)];
  const int32_t keys = run.context + run.num_rows;
  if (pass_.num_keys + int64_t{keys} > limits_.most_keys) end_pass(out);
  for (int32_t first = 0; first < keys;) {
    const auto count =
        static_cast<int32_t>(std::min<int64_t>(keys - first, limits_.most_keys - pass_.num_keys));
    // Queries before the run's first key see none of it.
    const int32_t blind = std::max(0, first - run.context);
    parts_.push_back({.first_row = run.first_row + blind,
                      .rows = run.num_rows - blind,
                      .first_key = pass_.num_keys,
                      .num_keys = count,
                      .visible = run.context + blind - first + 1,
                      .joined = first > 0});
    gathered_.push_back(static_cast<int32_t>(index));
    first_keys_.push_back(first);
    key_starts_.push_back(pass_.num_keys);
    pass_.num_keys += count;
    ++pass_.num_parts;
    first += count;
    if (first < keys) end_pass(out);
  }
}

void StepPlanner::end_pass(StepLayout& out) {
  if (pass_.num_parts > 0) {
    const MhaPrefillPlan plan =
        plan_mha_prefill(parts_, static_cast<int>(limits_.heads), limits_.num_multiprocessors);
    key_starts_.push_back(pass_.num_keys);
    first_tiles_.insert(first_tiles_.end(), plan.first_tile.begin(), plan.first_tile.end());
    pass_.first_tile = std::ssize(tiles_);
    tiles_.insert(tiles_.end(), plan.tiles.begin(), plan.tiles.end());
    out.passes.push_back(pass_);
  }
  pass_ = {.first_part = static_cast<int32_t>(std::ssize(gathered_))};
  parts_.clear();
}

}  // namespace fathom::cuda
