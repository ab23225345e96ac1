// The MTP layer of DeepSeekModel (deepseek_cuda.h): drafts of the tokens to come, and its rows of
// the tokens that are known. DeepSeek-V3 (2024), section 2.2.
#include "base/check.h"
#include "base/math.h"
#include "model/deepseek_cuda.h"
#include "model/kept_states.h"
#include "model/layer_options.h"
#include "ops/rope/query_key_cuda.h"

namespace fathom::cuda {

KeptStates DeepSeekModel::kept_states(const CacheMemory& cache) const {
  return {cache.data + (config_.num_layers + 1) * cache.layer_bytes, cache.page_bytes(),
          kKeptStates};
}

// What forward() does after all layers, for all rows: logits, then the states, of which pages keep
// some and the MTP layer's rows are made.
void DeepSeekModel::logits_and_mtp_rows(const StepLayout& step, const std::byte* arrays,
                                        const int32_t* sampled, const CacheMemory& cache,
                                        GpuStream stream) {
  const bool is_one_row = step.rows == 1 && step.logit_rows == 1;
  if (step.logit_rows > 0 && !is_one_row) {
    head(narrow_and_norm(step, arrays, {NormKind::kFinal}, stream), step.logit_rows, stream);
  }
  const Activation states =
      add_and_norm(&DeepSeekModel::residual_, true, {NormKind::kFinal}, step.rows, stream);
  if (is_one_row) head(states, 1, stream);  // the norm that its logits are of
  // Reads kept states before others take their places.
  if (step.has_mtp_rows) combine_mtp_inputs(step, arrays, sampled, cache, stream);
  keep_states({.states = normed_,
               .slots = array_at<int64_t>(arrays, step.at.state_slots),
               .kept = kept_states(cache),
               .rows = step.rows,
               .n = config_.hidden},
              stream);
  if (!step.has_mtp_rows) return;
  write_mtp_keys(step, arrays, step.at.mtp_slots, project_mtp_inputs(step.rows, stream), cache,
                 stream);
}

void DeepSeekModel::draft(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
                          const CacheMemory& cache, GpuStream stream, const WorldRows& all) {
  FATHOM_CHECK(options_.with_mtp && step.page_stride == cache.page_stride && step.rows > 0 &&
                   step.rows <= options_.max_rows && step.logit_rows <= options_.max_logit_rows,
               "a draft step of {} rows, {} logit rows, pages {} apart", step.rows, step.logit_rows,
               step.page_stride);
  const auto layer = static_cast<size_t>(config_.num_layers);
  combine_mtp_inputs(step, arrays, sampled, cache, stream);
  const Activation x = project_mtp_inputs(step.rows, stream);
  if (step.logit_rows == 0) {
    write_mtp_keys(step, arrays, step.at.slots, x, cache, stream);
    if (exchanges()) serve_draft_experts(all, stream);
    return;
  }
  if (is_sparse()) list_all_keys(step, arrays, stream);
  attention(weights_.layers[layer], x, step, arrays, pages_of(cache, config_.num_layers), stream);
  const Activation narrow =
      narrow_and_norm(step, arrays, {NormKind::kPostAttention, layer}, stream);
  feed_forward(layer, narrow, step.logit_rows, array_at<int32_t>(arrays, step.at.num_valid_rows),
               all, stream);
  logits_of(&DeepSeekModel::logit_residual_, {NormKind::kMtpFinal}, step.logit_rows, stream);
}

// mtp_input_ = (norm(embedding), norm(state)) of each row; states that are no pages' lie in
// normed_.
void DeepSeekModel::combine_mtp_inputs(const StepLayout& step, const std::byte* arrays,
                                       const int32_t* sampled, const CacheMemory& cache,
                                       GpuStream stream) {
  MtpInputArguments rows = {.ids = array_at<int32_t>(arrays, step.at.token_ids),
                            .sampled = sampled,
                            .previous = array_at<int64_t>(arrays, step.at.previous_states),
                            .states = normed_,
                            .kept = kept_states(cache),
                            .embedding_norm = weights_.mtp.embedding_norm,
                            .state_norm = weights_.mtp.hidden_norm,
                            .eps = static_cast<float>(config_.rms_norm_eps),
                            .out = mtp_input_,
                            .rows = step.rows,
                            .n = config_.hidden};
  set_embedding(rows);
  mtp_input(rows, stream);
}

// residual_ = the layer's input; returns its norm.
DeepSeekModel::Activation DeepSeekModel::project_mtp_inputs(int64_t rows, GpuStream stream) {
  const int64_t hidden = config_.hidden;
  product({.data = mtp_input_, .stride = 2 * hidden}, weights_.mtp.projection, {hidden, 2 * hidden},
          {residual_, hidden, DType::kF32}, rows, stream);
  return add_and_norm(&DeepSeekModel::residual_, false,
                      {NormKind::kInput, static_cast<size_t>(config_.num_layers)}, rows, stream);
}

// An indexer's wk and kv_a of the layer: the last rows of q_kv_a, which begin a scale block.
WeightMatrix DeepSeekModel::mtp_keys() const {
  const int64_t hidden = config_.hidden, first = q_kv_a_columns() - cache_columns();
  WeightMatrix keys = weights_.layers.back().q_kv_a;
  keys.values = static_cast<std::byte*>(keys.values) + first * hidden * size_of(keys.type);
  if (keys.scales != nullptr) keys.scales += first / kScaleBlock * (hidden / kScaleBlock);
  if (keys.row_scales != nullptr) keys.row_scales += first;
  return keys;
}

// The layer's cache rows of x, and nothing else of it. `slots`: the offset of their array.
void DeepSeekModel::write_mtp_keys(const StepLayout& step, const std::byte* arrays, int64_t slots,
                                   const Activation& x, const CacheMemory& cache,
                                   GpuStream stream) {
  const int64_t columns = cache_columns();
  product(x, mtp_keys(), {columns, config_.hidden}, {q_kv_a_, columns}, step.rows, stream);
  const Pages pages = pages_of(cache, config_.num_layers);
  if (is_sparse()) {
    write_index_key_rows(weights_.layers.back().indexer, q_kv_a_, columns, step, arrays, slots,
                         pages, stream);
  }
  query_key({.kv_a = q_kv_a_ + columns - config_.latent_dim(),
             .kv_a_stride = columns,
             .norm_weight = weights_.layers.back().kv_a_norm,
             .eps = kInnerNormEps,
             .cos_sin = cos_sin_,
             .positions = array_at<int32_t>(arrays, step.at.positions),
             .slots = array_at<int64_t>(arrays, slots),
             .pages = pages.data,
             .format = pages.format,
             .rows = step.rows},
            stream);
}

}  // namespace fathom::cuda
