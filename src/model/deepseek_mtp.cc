// The MTP layer of DeepSeekModel: drafts of the tokens to come, and its rows of the tokens that are
// known. DeepSeek-V3 (2024), section 2.2.
#include <algorithm>
#include <cstring>

#include "model/deepseek.h"
#include "model/kept_states.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"

namespace fathom {
namespace {

// A sequence's first token has no row: there is no state before it.
constexpr int64_t kFirstKey = 1;

// Some rows of a batch, each with the state before its token.
struct MtpRows {
  explicit MtpRows(int32_t max_pages) {
    batch.query_start.push_back(0);
    batch.max_pages = max_pages;
  }

  // Rows [first, end) of a sequence of `from`.
  void add(const ForwardBatch& from, int64_t sequence, int64_t first, int64_t end) {
    if (first == end) return;
    batch.token_ids.insert(batch.token_ids.end(), from.token_ids.begin() + first,
                           from.token_ids.begin() + end);
    batch.positions.insert(batch.positions.end(), from.positions.begin() + first,
                           from.positions.begin() + end);
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(from.positions[static_cast<size_t>(first)]);
    const auto pages = from.block_tables.begin() + sequence * from.max_pages;
    batch.block_tables.insert(batch.block_tables.end(), pages, pages + from.max_pages);
  }

  ForwardBatch batch;
  std::vector<const std::byte*> states;  // [rows]
};

}  // namespace

int64_t DeepSeekModel::state_bytes(const ModelConfig& config, DType compute, bool with_mtp) {
  return with_mtp ? kKeptStates * config.hidden * size_of(compute) : 0;
}

int64_t DeepSeekModel::cache_layers(const ModelConfig& config, bool with_mtp) {
  return config.num_layers + (with_mtp ? 1 : 0);
}

// Where the page has the state of the token at this position.
std::byte* DeepSeekModel::state_of(const ForwardBatch& batch, int64_t sequence, int64_t position,
                                   const LatentCache& cache) const {
  const int32_t page =
      batch.block_tables[static_cast<size_t>(sequence * batch.max_pages + position / kPageSize)];
  return cache.state(page) + position % kKeptStates * hidden_bytes();
}

// The main model's states of all rows, to workspace_.hidden. Of `residual` only the rank's own rows
// are there.
void DeepSeekModel::make_states(const Step& step, ConstTensorView residual) {
  const TensorView hidden =
      workspace_.hidden.view(options_.compute, {step.batch.num_rows(), config_.hidden});
  const Slice own = step.rows.own();
  rms_norm(stream_, residual.rows(own.first, own.count), norm_weight(weights_.final_norm), eps_,
           hidden.rows(own.first, own.count));
  if (!step.rows.are_divided()) return;
  step.rows.gather(
      [&](int rank, std::vector<Piece>& pieces) {
        LaneRows::add_piece(hidden, step.rows.of(rank), pieces);
      },
      stream_.pool());
}

// Of the states in workspace_.hidden, those that later steps may need go to their pages.
void DeepSeekModel::keep_states(const ForwardBatch& batch, const LatentCache& cache) {
  const std::byte* const hidden = workspace_.hidden.data();
  const auto bytes = static_cast<size_t>(hidden_bytes());
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t end = batch.context_lens[s] + batch.query_start[s + 1] - batch.query_start[s];
    for (int64_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      const int64_t position = batch.positions[row];
      if (!keeps_state(position, end)) continue;
      std::memcpy(state_of(batch, s, position, cache), hidden + row * hidden_bytes(), bytes);
    }
  }
}

// Writes the MTP rows of the step's tokens that are no drafts and have none yet. The state before a
// token is the row's before it in workspace_.hidden, or the page's where the token is its
// sequence's first of this step.
void DeepSeekModel::write_mtp_rows(const ForwardBatch& batch, const LatentCache& cache) {
  MtpRows rows(batch.max_pages);
  const std::byte* const hidden = workspace_.hidden.data();
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[s];
    const int64_t context = batch.context_lens[s], first_row = batch.query_start[s];
    const int64_t begin =
        std::max<int64_t>(kFirstKey, batch.mtp_lens.empty() ? context : batch.mtp_lens[s]);
    const int64_t end = context + batch.query_start[s + 1] - first_row - drafts;
    if (begin >= end) continue;
    FATHOM_CHECK(begin >= context, "sequence {}: MTP rows from {} on, its step begins at {}", s,
                 begin, context);
    rows.add(batch, s, first_row + begin - context, first_row + end - context);
    for (int64_t position = begin; position < end; ++position) {
      const int64_t row = first_row + position - context;
      rows.states.push_back(position == context ? state_of(batch, s, position - 1, cache)
                                                : hidden + (row - 1) * hidden_bytes());
    }
  }
  write_cache_rows(rows.batch, rows.states, cache);
}

void DeepSeekModel::draft(const ForwardBatch& batch, std::span<const int32_t> states,
                          const LatentCache& cache, TensorView logits_out,
                          std::span<int32_t> tokens) {
  FATHOM_CHECK(weights_.mtp.has_value() && batch.num_rows() <= options_.max_rows &&
                   (states.empty() || std::ssize(states) == batch.num_rows()),
               "{} rows, {} states", batch.num_rows(), states.size());
  // Before a sequence's first row with logits only the cache needs its rows.
  MtpRows known(batch.max_pages), drafting(batch.max_pages);
  std::vector<int32_t> key_sources;  // [drafting rows], in a draft's later steps
  auto wanted = batch.logit_rows.begin();
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    FATHOM_CHECK(batch.context_lens[s] >= kFirstKey, "a draft of a sequence's first token");
    const int64_t begin = batch.query_start[s], end = batch.query_start[s + 1];
    const int64_t first = wanted == batch.logit_rows.end() ? end : std::min<int64_t>(*wanted, end);
    for (; wanted != batch.logit_rows.end() && *wanted < end; ++wanted) {
      drafting.batch.logit_rows.push_back(
          static_cast<int32_t>(drafting.batch.num_rows() + *wanted - first));
    }
    known.add(batch, s, begin, first);
    drafting.add(batch, s, first, end);
    for (int64_t row = begin; row < end; ++row) {
      if (row >= first && !states.empty()) {
        key_sources.push_back(states[static_cast<size_t>(row)]);
      }
      (row < first ? known : drafting)
          .states.push_back(states.empty()
                                ? state_of(batch, s, batch.positions[row] - 1, cache)
                                : workspace_.mtp_state.data() + states[row] * hidden_bytes());
    }
  }
  drafting.batch.largest_only = batch.largest_only;
  write_cache_rows(known.batch, known.states, cache);
  const int64_t rows = drafting.batch.num_rows();
  if (rows == 0) return;
  Step step = make_step(drafting.batch, kFirstKey);
  const bool shares_keys = config_.indexer && config_.indexer->shares_drafts;
  if (shares_keys) step.key_sources = std::move(key_sources);
  const TensorView residual = workspace_.residual.view(DType::kF32, {rows, config_.hidden});
  combine_inputs(step, drafting.states, residual);
  run_layer(weights_.mtp->layer, 0, step, layer_cache(cache, config_.num_layers), residual);
  const ConstTensorView normed =
      logits(step, residual, weights_.mtp->head_norm, logits_out, tokens);
  std::memcpy(workspace_.mtp_state.data(), normed.raw(),
              static_cast<size_t>(normed.size(0) * hidden_bytes()));
  if (shares_keys) keep_draft_keys(step, drafting.batch.logit_rows);
}

// The MTP layer's cache rows of these tokens, and nothing else of the layer.
void DeepSeekModel::write_cache_rows(const ForwardBatch& batch,
                                     std::span<const std::byte* const> states,
                                     const LatentCache& cache) {
  if (batch.num_rows() == 0) return;
  const LayerWeights& layer = weights_.mtp->layer;
  const Step step = make_step(batch, kFirstKey);
  const Slice own = step.rows.own();
  const TensorView residual =
      workspace_.residual.view(DType::kF32, {batch.num_rows(), config_.hidden});
  const TensorView normed =
      workspace_.normed.view(options_.compute, {batch.num_rows(), config_.hidden});
  combine_inputs(step, states, residual);
  rms_norm(stream_, residual.rows(own.first, own.count), norm_weight(layer.input_norm), eps_,
           normed.rows(own.first, own.count));
  project_cache_rows(layer.attention, step, layer_cache(cache, config_.num_layers), normed);
}

// residual = W_e norm(embedding) + W_h norm(state), the layer's input; `states` [rows] point at the
// state before each token.
void DeepSeekModel::combine_inputs(const Step& step, std::span<const std::byte* const> states,
                                   TensorView residual) {
  const MtpWeights& weights = *weights_.mtp;
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
