// Sparse attention of one layer; part of DeepSeekModel (deepseek_cuda.h).
//
// Absorbed rows attend to lists of keys, except in steps without index passes that read whole pages
// (StepLayout::decodes). The lists of rows that see no more than the dense
// threshold hold all of their keys, and are written once a step; those of the rows of an index pass
// are chosen in each layer. Kernels read the rows' lengths on the device and leave by row, so that
// a captured step serves rows of any length, and a row that has a list has the same bits in a step
// with and without passes.
#include <algorithm>

#include "base/check.h"
#include "model/deepseek_cuda.h"
#include "model/layer_options.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_attention_cuda.h"
#include "ops/indexer/index_keys_cuda.h"
#include "ops/indexer/index_scores_cuda.h"
#include "ops/indexer/top_keys_cuda.h"

namespace fathom::cuda {
namespace {

// Batch-invariant splits take memory for each row's partial results.
constexpr int64_t kInvariantRows = 128;

}  // namespace

DeepSeekModel::Activation DeepSeekModel::rows_from(const Activation& x, int64_t first) {
  Activation rows = x;
  if (x.data != nullptr) rows.data += first * x.stride;
  if (x.quantized.values != nullptr) {
    rows.quantized.values =
        static_cast<std::byte*>(x.quantized.values) + first * x.quantized.values_row_stride;
    rows.quantized.scales += first;
  }
  return rows;
}

void DeepSeekModel::list_all_keys(const StepLayout& step, const std::byte* arrays,
                                  GpuStream stream) {
  // The passes write all lists, or nobody reads any.
  if (step.any_length || !step.decodes.empty()) return;
  const int64_t rows = step.passes.empty() ? step.rows : step.absorbed_rows;
  select_all_keys({.lengths = array_at<int32_t>(arrays, step.at.lengths),
                   .keys = key_lists_,
                   .rows = static_cast<int32_t>(rows),
                   .k = top_keys(),
                   .first_key = step.first_key},
                  stream);
}

// The index keys of all rows, from wk's output. `slots`: the offset of their array.
void DeepSeekModel::write_index_key_rows(const IndexerMatrices& weights, const bf16* keys,
                                         int64_t stride, const StepLayout& step,
                                         const std::byte* arrays, int64_t slots, const Pages& pages,
                                         GpuStream stream) {
  write_index_keys({.k = keys,
                    .k_stride = stride,
                    .norm_weight = weights.k_norm,
                    .norm_bias = weights.k_norm_bias,
                    .cos_sin = cos_sin_,
                    .interleaved = config_.indexer->interleaved,
                    .positions = array_at<int32_t>(arrays, step.at.positions),
                    .slots = array_at<int64_t>(arrays, slots),
                    .pages = pages.index_keys,
                    .rows = step.rows},
                   stream);
}

// x: the attention's input. latent: the query latent that query_latent() has made.
void DeepSeekModel::choose_keys(const IndexerMatrices& weights, const Activation& x,
                                const Activation& latent, const IndexPass& pass,
                                const StepLayout& step, const std::byte* arrays, const Pages& pages,
                                GpuStream stream) {
  const StepArrays& at = step.at;
  const int64_t index_heads = config_.indexer->num_heads, first = pass.first_row;
  const auto rows = static_cast<int32_t>(pass.rows);
  // Positions below this see no more keys than the dense threshold.
  const auto dense_keys = static_cast<int32_t>(options_.sparse->dense_keys) + step.first_key;
  FATHOM_CHECK(rows <= IndexPass::kMostRows, "{} rows of an index pass", rows);
  Activation q_input = rows_from(latent, first);
  // Rows in bf16 are there for an indexer that reads another form than q_b.
  if (q_input.data != nullptr) q_input.quantized = {};
  product(q_input, weights.q, {index_query_columns(), config_.q_lora_rank},
          {index_q_, index_query_columns()}, rows, stream);
  product({.data = x.data + first * x.stride, .stride = x.stride}, weights.weights,
          {index_heads, config_.hidden}, {index_head_weights_, index_heads, DType::kF32}, rows,
          stream);
  make_index_queries({.q = index_q_,
                      .head_weights = index_head_weights_,
                      .cos_sin = cos_sin_,
                      .interleaved = config_.indexer->interleaved,
                      .positions = array_at<int32_t>(arrays, at.positions) + first,
                      .values = index_values_,
                      .weights = index_weights_,
                      .rows = rows,
                      .heads = static_cast<int32_t>(index_heads),
                      .dense_keys = dense_keys},
                     stream);
  index_scores({.values = index_values_,
                .weights = index_weights_,
                .lengths = array_at<int32_t>(arrays, at.lengths) + first,
                .table_starts = array_at<int32_t>(arrays, at.table_starts) + first,
                .block_tables = array_at<int32_t>(arrays, at.block_tables),
                .pages = pages.index_keys,
                .scores = index_scores_,
                .columns = pass.columns,
                .rows = rows,
                .heads = static_cast<int32_t>(index_heads),
                .dense_keys = dense_keys},
               plan_.budget.sms, stream);
  select_top_keys({.scores = index_scores_,
                   .columns = pass.columns,
                   .lengths = array_at<int32_t>(arrays, at.lengths) + first,
                   .keys = key_lists_ + first * top_keys(),
                   .rows = rows,
                   .k = top_keys(),
                   .first_key = step.first_key},
                  stream);
}

int64_t DeepSeekModel::sparse_rows() const {
  return options_.batch_invariant ? std::min(options_.max_rows, kInvariantRows) : options_.max_rows;
}

int32_t DeepSeekModel::sparse_split(int64_t rows) const {
  if (options_.batch_invariant) return kInvariantSplitKeys;
  return sparse_latent_split_keys(rows, static_cast<int32_t>(heads_), top_keys(), plan_.budget.sms);
}

int64_t DeepSeekModel::sparse_scratch_words() const {
  int64_t most = 0;
  for (int64_t rows = 1; rows <= sparse_rows(); ++rows) {
    most = std::max(most, sparse_latent_scratch_words(rows, static_cast<int32_t>(heads_),
                                                      top_keys(), sparse_split(rows)));
  }
  return most;
}

void DeepSeekModel::sparse_attention(const StepLayout& step, const std::byte* arrays,
                                     const Pages& pages, int64_t rows, GpuStream stream) {
  const int64_t latent = config_.kv_lora_rank, rope = config_.qk_rope_dim;
  for (int64_t first = 0; first < rows; first += sparse_rows()) {
    const int64_t count = std::min(rows - first, sparse_rows());
    sparse_latent_attention(plan_.budget.sms,
                            {.rows = count,
                             .q_latent = q_latent_ + first * heads_ * latent,
                             .q_rope = q_rope_ + first * heads_ * rope,
                             .pages = pages.data,
                             .page_stride = latent_layout(config_, pages.format).page_bytes(),
                             .block_tables = array_at<int32_t>(arrays, step.at.block_tables),
                             .max_pages = 1,  // a row's table is named by its first entry
                             .sequences = array_at<int32_t>(arrays, step.at.table_starts) + first,
                             .lengths = array_at<int32_t>(arrays, step.at.num_keys) + first,
                             .keys = key_lists_ + first * top_keys(),
                             .top_k = top_keys(),
                             .out = o_latent_ + first * heads_ * latent,
                             .heads = static_cast<int32_t>(heads_),
                             .softmax_scale = static_cast<float>(config_.softmax_scale()),
                             .split_keys = sparse_split(rows),
                             .scratch = sparse_scratch_,
                             .format = pages.format},
                            stream);
  }
}

}  // namespace fathom::cuda
