// The MTP layers of DeepSeekModel: drafts of the tokens to come, and their rows of the tokens that
// are known. DeepSeek-V3 (2024), section 2.2.
//
// A layer's row of a token takes in the state before it of the layer before, as in training, so a
// token's rows are all computed when it is known, one layer after the other; the last layer's state
// is of no use to others, so it computes its cache rows alone. A sequence's first draft is the
// first layer's, from the newest token, the second the second's, from the first draft, and so on.
// With drafts left behind the last layer's, it goes on by recurrence: the draft is the next input
// and its own state the state. Beginning again with the first layer would leave a hole in its
// cache, since it has no row of the drafts between.
#include <algorithm>
#include <cstring>

#include "model/deepseek.h"
#include "model/kept_states.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"

namespace fathom {
namespace {

// The first token that a layer has a row of: there is no state before those that come earlier.
constexpr int32_t first_key(int64_t layer) { return static_cast<int32_t>(layer + 1); }

const std::byte* bytes_at(TensorView states) { return static_cast<const std::byte*>(states.raw()); }

}  // namespace

// Some rows of a batch, each with the state before its token.
struct DeepSeekModel::MtpRows {
  explicit MtpRows(int32_t max_pages) {
    batch.query_start.push_back(0);
    batch.max_pages = max_pages;
  }

  // Rows [first, end) of a sequence of `from`.
  void add(const ForwardBatch& from, int64_t sequence, int64_t first, int64_t end) {
    if (first >= end) return;
    batch.token_ids.insert(batch.token_ids.end(), from.token_ids.begin() + first,
                           from.token_ids.begin() + end);
    batch.positions.insert(batch.positions.end(), from.positions.begin() + first,
                           from.positions.begin() + end);
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(from.positions[static_cast<size_t>(first)]);
    const auto pages = from.block_tables.begin() + sequence * from.max_pages;
    batch.block_tables.insert(batch.block_tables.end(), pages, pages + from.max_pages);
  }

  ForwardBatch batch;                    // logit_rows: of the layer that gives logits
  std::vector<const std::byte*> states;  // [rows]
  // Per drafting sequence: row of the state its next draft reads; -1: none.
  std::vector<int32_t> last_rows;
};

int64_t DeepSeekModel::state_bytes(const ModelConfig& config, DType compute, int64_t mtp_layers) {
  return mtp_layers * kKeptStates * config.hidden * size_of(compute);
}

int64_t DeepSeekModel::cache_layers(const ModelConfig& config, int64_t mtp_layers) {
  return config.num_layers + mtp_layers;
}

// Where the page has the state of the token at this position that the MTP layer takes in.
std::byte* DeepSeekModel::state_of(int64_t layer, const ForwardBatch& batch, int64_t sequence,
                                   int64_t position, const LatentCache& cache) const {
  const int32_t page =
      batch.block_tables[static_cast<size_t>(sequence * batch.max_pages + position / kPageSize)];
  return cache.state(page) + (layer * kKeptStates + position % kKeptStates) * hidden_bytes();
}

// The layer's own states, [rows, hidden].
TensorView DeepSeekModel::mtp_states(int64_t layer, int64_t rows) const {
  const int64_t first = layer * options_.max_rows * hidden_bytes();
  return {workspace_.mtp_state.data() + first, options_.compute, {rows, config_.hidden}};
}

// The normed states of all rows. `residual` holds only the rank's own rows.
void DeepSeekModel::make_states(const Step& step, ConstTensorView residual, const Buffer& norm,
                                TensorView states) {
  const Slice own = step.rows.own();
  rms_norm(stream_, residual.rows(own.first, own.count), norm_weight(norm), eps_,
           states.rows(own.first, own.count));
  if (!step.rows.are_divided()) return;
  step.rows.gather(
      [&](int rank, std::vector<Piece>& pieces) {
        LaneRows::add_piece(states, step.rows.of(rank), pieces);
      },
      stream_.pool());
}

// Keeps in the pages those of `states` [rows], the MTP layer's inputs, that later steps may need.
void DeepSeekModel::keep_states(int64_t layer, const ForwardBatch& batch, const std::byte* states,
                                const LatentCache& cache) const {
  const auto bytes = static_cast<size_t>(hidden_bytes());
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t end = batch.context_lens[s] + batch.query_start[s + 1] - batch.query_start[s];
    for (int64_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      const int64_t position = batch.positions[row];
      if (!keeps_state(position, end)) continue;
      std::memcpy(state_of(layer, batch, s, position, cache), states + row * hidden_bytes(), bytes);
    }
  }
}

// Writes the MTP rows of the step's tokens that are no drafts and have none yet. The state before a
// token is the row's before it in workspace_.hidden, or the page's where the token is its
// sequence's first of this step. The page's are overwritten only then.
void DeepSeekModel::write_mtp_rows(const ForwardBatch& batch, const LatentCache& cache) {
  MtpRows rows(batch.max_pages);
  const std::byte* const hidden = workspace_.hidden.data();
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[s];
    const int64_t context = batch.context_lens[s], first_row = batch.query_start[s];
    const int64_t begin =
        std::max<int64_t>(first_key(0), batch.mtp_lens.empty() ? context : batch.mtp_lens[s]);
    const int64_t end = context + batch.query_start[s + 1] - first_row - drafts;
    if (begin >= end) continue;
    FATHOM_CHECK(begin >= context, "sequence {}: MTP rows from {} on, its step begins at {}", s,
                 begin, context);
    rows.add(batch, s, first_row + begin - context, first_row + end - context);
    for (int64_t position = begin; position < end; ++position) {
      const int64_t row = first_row + position - context;
      rows.states.push_back(position == context ? state_of(0, batch, s, position - 1, cache)
                                                : hidden + (row - 1) * hidden_bytes());
    }
  }
  write_rows(0, rows, cache);
  keep_states(0, batch, hidden, cache);
}

void DeepSeekModel::draft(const ForwardBatch& batch, std::span<const int32_t> states,
                          const LatentCache& cache, TensorView logits_out,
                          std::span<int32_t> tokens) {
  FATHOM_CHECK(has_mtp() && batch.num_rows() <= options_.max_rows &&
                   (states.empty() || std::ssize(states) == batch.num_rows()),
               "{} rows, {} states", batch.num_rows(), states.size());
  draft_number_ = states.empty() ? 0 : draft_number_ + 1;
  if (states.empty()) return draft_known(batch, cache, logits_out, tokens);
  draft_next(batch, states, cache, logits_out, tokens);
}

// With one layer alone only the cache needs its rows before a sequence's first one with logits.
void DeepSeekModel::draft_known(const ForwardBatch& batch, const LatentCache& cache,
                                TensorView logits_out, std::span<int32_t> tokens) {
  const bool is_alone = weights_.mtp.size() == 1;
  MtpRows known(batch.max_pages), drafting(batch.max_pages);
  auto wanted = batch.logit_rows.begin();
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    FATHOM_CHECK(batch.context_lens[s] >= first_key(0), "a draft of a sequence's first token");
    const int64_t begin = batch.query_start[s], end = batch.query_start[s + 1];
    int64_t first = wanted == batch.logit_rows.end() ? end : std::min<int64_t>(*wanted, end);
    if (!is_alone) first = begin;
    for (; wanted != batch.logit_rows.end() && *wanted < end; ++wanted) {
      drafting.last_rows.push_back(
          static_cast<int32_t>(drafting.batch.num_rows() + *wanted - first));
    }
    known.add(batch, s, begin, first);
    drafting.add(batch, s, first, end);
    for (int64_t row = begin; row < end; ++row) {
      (row < first ? known : drafting)
          .states.push_back(state_of(0, batch, s, batch.positions[row] - 1, cache));
    }
  }
  drafting.batch.logit_rows = drafting.last_rows;
  drafting.batch.largest_only = batch.largest_only;
  write_cache_rows(0, known, cache);
  draft_logits(0, drafting, {}, cache, logits_out, tokens);
  if (!is_alone) write_rows_behind(0, drafting, cache);
}

// A draft's row in the layer of its number, and in the one behind that, which drafts from the next
// number on: at most three layers draft, so there is no other.
void DeepSeekModel::draft_next(const ForwardBatch& batch, std::span<const int32_t> states,
                               const LatentCache& cache, TensorView logits_out,
                               std::span<int32_t> tokens) {
  static_assert(kMaxDrafts == 3);
  const auto num_layers = std::ssize(weights_.mtp);
  const int64_t layer = std::min(draft_number_, num_layers - 1);
  const auto rows_with = [&](int64_t states_of) {
    MtpRows rows(batch.max_pages);
    for (int64_t s = 0; s < batch.num_sequences(); ++s) {
      for (int64_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
        const std::byte* const state =
            draft_states_[static_cast<size_t>(states_of)]
                         [static_cast<size_t>(states[static_cast<size_t>(row)])];
        if (state == nullptr) continue;
        rows.add(batch, s, row, row + 1);
        rows.states.push_back(state);
      }
    }
    return rows;
  };
  if (layer + 1 < num_layers) write_cache_rows(layer + 1, rows_with(layer), cache);
  MtpRows rows = rows_with(draft_number_ < num_layers ? layer - 1 : layer);
  FATHOM_CHECK(rows.batch.num_rows() == batch.num_rows(), "{} drafts, {} states", batch.num_rows(),
               rows.batch.num_rows());
  rows.batch.logit_rows = rows.last_rows = batch.logit_rows;
  rows.batch.largest_only = batch.largest_only;
  draft_logits(layer, rows, {states.begin(), states.end()}, cache, logits_out, tokens);
}

// `key_sources`: [rows] of draft_keys_, of a draft's later steps.
void DeepSeekModel::draft_logits(int64_t layer, const MtpRows& rows,
                                 std::vector<int32_t> key_sources, const LatentCache& cache,
                                 TensorView logits_out, std::span<int32_t> tokens) {
  const int64_t count = rows.batch.num_rows();
  if (count == 0) return;
  Step step = make_step(rows.batch, first_key(layer));
  // Each of several layers chooses its keys itself.
  const bool shares_keys =
      config_.indexer && config_.indexer->shares_drafts && weights_.mtp.size() == 1;
  if (shares_keys) step.key_sources = std::move(key_sources);
  const TensorView residual = workspace_.residual.view(DType::kF32, {count, config_.hidden});
  run_mtp_layer(layer, step, rows, cache, residual);
  logits(step, residual, weights_.mtp[static_cast<size_t>(layer)].head_norm, weights_.draft_head,
         logits_out, tokens);
  if (shares_keys) keep_draft_keys(step, rows.batch.logit_rows);
}

// The rows of known tokens in a layer, and then in all behind it.
void DeepSeekModel::write_rows(int64_t layer, const MtpRows& rows, const LatentCache& cache) {
  if (rows.batch.num_rows() == 0) return;
  if (layer + 1 == std::ssize(weights_.mtp)) return write_cache_rows(layer, rows, cache);
  const Step step = make_step(rows.batch, first_key(layer));
  run_mtp_layer(layer, step, rows, cache,
                workspace_.residual.view(DType::kF32, {rows.batch.num_rows(), config_.hidden}));
  write_rows_behind(layer, rows, cache);
}

// The layer has computed its states of these rows. The first row of a sequence in the next layer
// takes in the page's, which is overwritten only then.
void DeepSeekModel::write_rows_behind(int64_t layer, const MtpRows& rows,
                                      const LatentCache& cache) {
  const ForwardBatch& batch = rows.batch;
  const std::byte* const own = bytes_at(mtp_states(layer, batch.num_rows()));
  MtpRows next(batch.max_pages);
  std::vector<int32_t> places(static_cast<size_t>(batch.num_rows()), -1);  // in `next`
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    int64_t first = batch.query_start[s];
    const int64_t end = batch.query_start[s + 1];
    if (batch.positions[first] < first_key(layer + 1)) ++first;
    for (int64_t row = first; row < end; ++row) {
      places[static_cast<size_t>(row)] = static_cast<int32_t>(next.batch.num_rows() + row - first);
      next.states.push_back(row == batch.query_start[s]
                                ? state_of(layer + 1, batch, s, batch.positions[row] - 1, cache)
                                : own + (row - 1) * hidden_bytes());
    }
    next.add(batch, s, first, end);
  }
  for (const int32_t row : rows.last_rows) {
    next.last_rows.push_back(row < 0 ? -1 : places[static_cast<size_t>(row)]);
  }
  draft_states_[static_cast<size_t>(layer + 1)].assign(next.last_rows.size(), nullptr);
  write_rows(layer + 1, next, cache);
  keep_states(layer + 1, batch, own, cache);
}

// Runs a layer over rows. Its states of them go to mtp_states(), those of the last rows to
// draft_states_, too.
void DeepSeekModel::run_mtp_layer(int64_t layer, const Step& step, const MtpRows& rows,
                                  const LatentCache& cache, TensorView residual) {
  const MtpWeights& weights = weights_.mtp[static_cast<size_t>(layer)];
  combine_inputs(layer, step, rows.states, residual);
  run_layer(weights.layer, {}, step, layer_cache(cache, config_.num_layers + layer), residual);
  const TensorView own = mtp_states(layer, rows.batch.num_rows());
  make_states(step, residual, weights.head_norm, own);
  auto& last = draft_states_[static_cast<size_t>(layer)];
  last.clear();
  for (const int32_t row : rows.last_rows) {
    last.push_back(row < 0 ? nullptr : bytes_at(own) + row * hidden_bytes());
  }
}

// The layer's cache rows of these tokens, and nothing else of the layer.
void DeepSeekModel::write_cache_rows(int64_t layer, const MtpRows& rows, const LatentCache& cache) {
  const int64_t count = rows.batch.num_rows();
  if (count == 0) return;
  const LayerWeights& weights = weights_.mtp[static_cast<size_t>(layer)].layer;
  const Step step = make_step(rows.batch, first_key(layer));
  const Slice own = step.rows.own();
  const TensorView residual = workspace_.residual.view(DType::kF32, {count, config_.hidden});
  const TensorView normed = workspace_.normed.view(options_.compute, {count, config_.hidden});
  combine_inputs(layer, step, rows.states, residual);
  rms_norm(stream_, residual.rows(own.first, own.count), norm_weight(weights.input_norm), eps_,
           normed.rows(own.first, own.count));
  project_cache_rows(weights.attention, step, layer_cache(cache, config_.num_layers + layer),
                     normed);
}

// residual = W_e norm(embedding) + W_h norm(state), the layer's input; `states` [rows] point at the
// state before each token.
void DeepSeekModel::combine_inputs(int64_t layer, const Step& step,
                                   std::span<const std::byte* const> states, TensorView residual) {
  const MtpWeights& weights = weights_.mtp[static_cast<size_t>(layer)];
  const int64_t rows = step.batch.num_rows();
  const Slice own = step.rows.own();
  const auto own_rows = [&](TensorView array) { return array.rows(own.first, own.count); };
  const TensorView hidden = workspace_.mtp_hidden.view(options_.compute, {rows, config_.hidden});
  for (int64_t row = own.first; row < own.end(); ++row) {
    std::memcpy(workspace_.mtp_hidden.data() + row * hidden_bytes(),
                states[static_cast<size_t>(row)], static_cast<size_t>(hidden_bytes()));
  }
  embed(step, residual);
  const TensorView x = own_rows(residual);
  const TensorView normed =
      own_rows(workspace_.normed.view(options_.compute, {rows, config_.hidden}));
  rms_norm(stream_, x, norm_weight(weights.embedding_norm), eps_, normed);
  linear(stream_, normed, weights.from_embedding, x);
  rms_norm(stream_, own_rows(hidden), norm_weight(weights.hidden_norm), eps_, normed);
  linear(stream_, normed, weights.from_hidden, x, LinearMode::kAccumulate);
}

}  // namespace fathom
