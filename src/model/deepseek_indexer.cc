// Sparse attention of DeepSeekModel: the indexer, which writes a key for every token and chooses
// the keys of the rows that see more than they may attend to (DeepSeek-V3.2, 2025).
//
// Weights and keys are whole on every rank. Where rows are divided over the lane a rank makes the
// keys and the lists of its own rows, and the ranks exchange them; elsewhere all compute all. The
// lists enter the hash that ranks compare: one that chose otherwise ends the step.
#include <algorithm>

#include "model/deepseek.h"
#include "model/layer_options.h"
#include "model/step_hash.h"
#include "ops/convert/convert.h"
#include "ops/indexer/index_scores.h"
#include "ops/indexer/top_keys.h"
#include "ops/linear/linear.h"

namespace fathom {
namespace {

// Which of `scored` are among these rows of the batch.
Slice scored_among(std::span<const SparseRow> scored, Slice rows) {
  const auto before = [&](int64_t row) {
    return std::lower_bound(scored.begin(), scored.end(), row,
                            [](const SparseRow& some, int64_t limit) { return some.row < limit; }) -
           scored.begin();
  };
  const int64_t first = before(rows.first);
  return {first, before(rows.end()) - first};
}

}  // namespace

// own_x [own rows, hidden]: the attention's input.
void DeepSeekModel::write_keys(const IndexerWeights& weights, const Step& step,
                               const IndexKeyPages& pages, ConstTensorView own_x) {
  const Slice own = step.rows.own();
  const TensorView k = workspace_.index_k.view(DType::kF32, {own.count, config_.indexer->head_dim});
  linear(stream_, own_x, weights.k, k);
  const auto first = static_cast<size_t>(own.first), count = static_cast<size_t>(own.count);
  write_index_keys(stream_, k, std::span(step.batch.positions).subspan(first, count),
                   std::span(step.slots).subspan(first, count),
                   {norm_weight(weights.k_norm), norm_weight(weights.k_norm_bias)},
                   index_rotation(), pages);
}

TensorView DeepSeekModel::key_lists(const Step& step) const {
  return workspace_.key_lists.view(DType::kI32,
                                   {std::ssize(step.plan.scored), config_.indexer->topk});
}

// x [rows, hidden]: of it this rank's own rows are read. The query latents are in the workspace.
void DeepSeekModel::choose_keys(const IndexerWeights& weights, const Step& step,
                                const IndexKeyPages& pages, TensorView x) {
  const std::span<const SparseRow> scored = step.plan.scored;
  const Slice own = scored_among(scored, step.rows.own());
  if (own.count > 0) {
    make_queries(weights, step,
                 scored.subspan(static_cast<size_t>(own.first), static_cast<size_t>(own.count)),
                 pages.layout.format, x);
    score_keys(step, own, pages);
  }
  if (lane_ == nullptr) return;
  const TensorView lists = key_lists(step);
  if (step.rows.are_divided()) {
    step.rows.gather(
        [&](int rank, std::vector<Piece>& pieces) {
          LaneRows::add_piece(lists, scored_among(scored, step.rows.of(rank)), pieces);
        },
        stream_.pool());
  }
  compare_lists(lists);
}

void DeepSeekModel::compare_lists(ConstTensorView lists) {
  if (lane_ == nullptr) return;
  lane_plan_ = hash_key_lists(lists, lane_plan_);
  lane_->set_plan(lane_plan_);
}

// A row that sees no more than topk keys attends to all of them. So does one whose draft's first
// row saw no more, up to topk.
void DeepSeekModel::reuse_keys(const Step& step) {
  const TensorView lists = key_lists(step);
  const auto topk = static_cast<int32_t>(config_.indexer->topk);
  for (size_t i = 0; i < step.plan.scored.size(); ++i) {
    const SparseRow& row = step.plan.scored[i];
    const auto source = static_cast<size_t>(step.key_sources[static_cast<size_t>(row.row)]);
    auto* const list = lists.row<int32_t>(static_cast<int64_t>(i));
    const int32_t count = count_keys(row, step.first_key, topk);
    if (count == topk && draft_keys_.visible[source] > topk) {
      const auto kept = draft_keys_.lists.begin() + static_cast<std::ptrdiff_t>(source) * topk;
      std::copy_n(kept, topk, list);
      continue;
    }
    for (int32_t k = 0; k < topk; ++k) list[k] = k < count ? step.first_key + k : -1;
  }
  compare_lists(lists);
}

void DeepSeekModel::keep_draft_keys(const Step& step, std::span<const int32_t> logit_rows) {
  const auto topk = config_.indexer->topk;
  DraftKeys kept;
  kept.lists.resize(logit_rows.size() * static_cast<size_t>(topk));
  auto list = kept.lists.begin();
  for (const int32_t row : logit_rows) {
    if (!step.key_sources.empty()) {
      const auto source = static_cast<size_t>(step.key_sources[static_cast<size_t>(row)]);
      kept.visible.push_back(draft_keys_.visible[source]);
      const auto from = draft_keys_.lists.begin() + static_cast<std::ptrdiff_t>(source) * topk;
      list = std::copy_n(from, topk, list);
      continue;
    }
    kept.visible.push_back(step.batch.positions[static_cast<size_t>(row)] + 1 - step.first_key);
    const Slice scored = scored_among(step.plan.scored, {row, 1});
    if (scored.count > 0) {
      std::copy_n(key_lists(step).row<int32_t>(scored.first), topk, list);
    }
    list += topk;
  }
  draft_keys_ = std::move(kept);
}

// Queries and weights of the heads for these rows, and for the few rows between them.
void DeepSeekModel::make_queries(const IndexerWeights& weights, const Step& step,
                                 std::span<const SparseRow> scored, IndexKeyFormat format,
                                 TensorView x) {
  const int64_t rows = x.size(0), heads = config_.indexer->num_heads;
  const int64_t dim = config_.indexer->head_dim;
  const TensorView q_input =
      workspace_.q_a_normed.view(options_.compute, {rows, config_.q_lora_rank});
  const TensorView q = workspace_.index_q.view(DType::kF32, {rows, heads * dim});
  const TensorView head_weights = workspace_.index_head_weights.view(DType::kF32, {rows, heads});
  const TensorView values =
      workspace_.index_queries.view(index_query_type(format), {rows, heads, dim});
  const TensorView scaled = workspace_.index_weights.view(DType::kF32, {rows, heads});
  for (const Slice run : query_runs(scored)) {
    const auto of_run = [&](TensorView array) { return array.rows(run.first, run.count); };
    linear(stream_, of_run(q_input), weights.q, of_run(q));
    ConstTensorView exact_x = of_run(x);
    if (x.dtype() != DType::kF32) {
      const TensorView widened =
          workspace_.normed_f32.view(DType::kF32, {run.count, config_.hidden});
      convert(stream_, exact_x, widened);
      exact_x = widened;
    }
    linear(stream_, exact_x, weights.weights, of_run(head_weights));
    make_index_queries(stream_, of_run(q).reshape({run.count, heads, dim}), of_run(head_weights),
                       std::span(step.batch.positions)
                           .subspan(static_cast<size_t>(run.first), static_cast<size_t>(run.count)),
                       index_rotation(), of_run(values), of_run(scaled));
  }
}

// The lists of plan.scored[scored], a pass of scores at a time.
void DeepSeekModel::score_keys(const Step& step, Slice scored, const IndexKeyPages& pages) {
  const int64_t rows = step.batch.num_rows(), heads = config_.indexer->num_heads;
  const ConstTensorView values = workspace_.index_queries.view(
      index_query_type(pages.layout.format), {rows, heads, config_.indexer->head_dim});
  const ConstTensorView weights = workspace_.index_weights.view(DType::kF32, {rows, heads});
  const PagedBatch paged = paged_view(step.batch, step.first_key);
  for (const ScorePass& pass : step.plan.passes) {
    const int64_t first = std::max(pass.first, scored.first);
    const int64_t count = std::min(pass.first + pass.count, scored.end()) - first;
    if (count <= 0) continue;
    const auto some =
        std::span(step.plan.scored).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    const TensorView scores = workspace_.index_scores.view(DType::kF32, {count, pass.columns});
    index_scores(stream_, values, weights, paged, some, pages, scores,
                 bytes_of(workspace_.indexer));
    select_top_keys(stream_, scores, some, step.first_key, key_lists(step).rows(first, count),
                    bytes_of(workspace_.indexer));
  }
}

}  // namespace fathom
