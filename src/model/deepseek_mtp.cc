// The MTP layer of DeepSeekModel: drafts of the tokens to come, and its rows of the tokens that are
// known. DeepSeek-V3 (2024), section 2.2.
#include <algorithm>
#include <cstring>

#include "model/deepseek.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"

namespace fathom {
namespace {

constexpr int64_t kKeptStates = kMaxDrafts + 1;  // of each page
// A sequence's first token has no row: there is no state before it.
constexpr int64_t kFirstKey = 1;

// Whether later steps may need a token's state: it is among its chunk's last ones, or among its
// page's, which a sequence continues that has this page from the prefix cache.
bool is_kept(int64_t position, int64_t chunk_end) {
  return position >= chunk_end - kKeptStates || position % kPageSize >= kPageSize - kKeptStates;
}

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
      if (!is_kept(position, end)) continue;
      std::memcpy(state_of(batch, s, position, cache), hidden + row * hidden_bytes(), bytes);
    }
  }
}

// Writes the MTP rows of the step's tokens that are no drafts and have none yet. The state before a
// token is the row's before it in workspace_.hidden, or the page's where the token is its
// sequence's first of this step.
void DeepSeekModel::write_mtp_rows(const ForwardBatch& batch, const LatentCache& cache) {
  ForwardBatch rows;
  rows.max_pages = batch.max_pages;
  rows.query_start.push_back(0);
  std::vector<const std::byte*> states;
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
    for (int64_t position = begin; position < end; ++position) {
      const int64_t row = first_row + position - context;
      rows.token_ids.push_back(batch.token_ids[row]);
      rows.positions.push_back(batch.positions[row]);
      states.push_back(position == context ? state_of(batch, s, position - 1, cache)
                                           : hidden + (row - 1) * hidden_bytes());
    }
    rows.query_start.push_back(static_cast<int32_t>(rows.token_ids.size()));
    rows.context_lens.push_back(static_cast<int32_t>(begin));
    const auto pages = batch.block_tables.begin() + s * batch.max_pages;
    rows.block_tables.insert(rows.block_tables.end(), pages, pages + batch.max_pages);
  }
  if (rows.num_rows() == 0) return;
  const Step step = make_step(rows, kFirstKey);
  const TensorView residual =
      workspace_.residual.view(DType::kF32, {rows.num_rows(), config_.hidden});
  mtp_layer(step, states, cache, residual);
  logits(step, residual, weights_.mtp->head_norm, {}, {});
}

void DeepSeekModel::draft(const ForwardBatch& batch, std::span<const int32_t> states,
                          const LatentCache& cache, TensorView logits_out,
                          std::span<int32_t> tokens) {
  FATHOM_CHECK(weights_.mtp.has_value() && batch.num_rows() <= options_.max_rows &&
                   (states.empty() || std::ssize(states) == batch.num_rows()),
               "{} rows, {} states", batch.num_rows(), states.size());
  if (batch.num_rows() == 0) return;
  std::vector<const std::byte*> before;
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    FATHOM_CHECK(batch.context_lens[s] >= kFirstKey, "a draft of a sequence's first token");
    for (int64_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      before.push_back(states.empty() ? state_of(batch, s, batch.positions[row] - 1, cache)
                                      : workspace_.mtp_state.data() + states[row] * hidden_bytes());
    }
  }
  const Step step = make_step(batch, kFirstKey);
  const TensorView residual =
      workspace_.residual.view(DType::kF32, {batch.num_rows(), config_.hidden});
  mtp_layer(step, before, cache, residual);
  const ConstTensorView normed =
      logits(step, residual, weights_.mtp->head_norm, logits_out, tokens);
  if (normed.rank() == 0) return;
  std::memcpy(workspace_.mtp_state.data(), normed.raw(),
              static_cast<size_t>(normed.size(0) * hidden_bytes()));
}

// residual = layer(W_e norm(embedding) + W_h norm(state)); `states` [rows] point at the state
// before each token.
void DeepSeekModel::mtp_layer(const Step& step, std::span<const std::byte* const> states,
                              const LatentCache& cache, TensorView residual) {
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
  run_layer(weights.layer, 0, step, layer_cache(cache, config_.num_layers), residual);
}

}  // namespace fathom
