#include "model/deepseek_cuda.h"

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "model/kept_states.h"
#include "model/layer_options.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/embedding/embedding_cuda.h"
#include "ops/gate/gate_cuda.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/linear_cuda.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"
#include "ops/peer_sum/peer_rows_cuda.h"
#include "ops/peer_sum/peer_sum_cuda.h"
#include "ops/scaled_linear/quantize_rows_cuda.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"

namespace fathom::cuda {

void DeepSeekModel::forward(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
                            const CacheMemory& cache, GpuStream stream, const WorldRows& all) {
  FATHOM_CHECK(step.page_stride == cache.page_stride,
               "a step over pages {} apart, the cache's are {}", step.page_stride,
               cache.page_stride);
  FATHOM_CHECK(step.rows > 0 && step.rows <= options_.max_rows, "{} rows, at most {}", step.rows,
               options_.max_rows);
  FATHOM_CHECK(step.logit_rows <= options_.max_logit_rows, "{} logit rows, at most {}",
               step.logit_rows, options_.max_logit_rows);
  EmbeddingArguments rows = {.ids = array_at<int32_t>(arrays, step.at.token_ids),
                             .sampled = sampled,
                             .out = residual_,
                             .rows = step.rows,
                             .n = config_.hidden};
  set_embedding(rows);
  embedding(rows, stream);
  if (is_sparse() && step.absorbed_rows > 0) list_all_keys(step, arrays, stream);
  const auto* valid_rows = array_at<int32_t>(arrays, step.at.num_valid_rows);
  const auto num_layers = static_cast<size_t>(config_.num_layers);
  for (size_t layer = 0; layer < num_layers; ++layer) {
    const auto number = static_cast<int64_t>(layer);
    if (number == plan_.first_decode_layer && takes_decode_layers(step, cache.format)) {
      last_layers(step, arrays, cache, stream);
      if (options_.with_mtp) return logits_and_mtp_rows(step, arrays, sampled, cache, stream);
      if (step.logit_rows == 0) return;
      if (step.rows == 1)
        return logits_of(&DeepSeekModel::residual_, {NormKind::kFinal}, 1, stream);
      return head(narrow_and_norm(step, arrays, {NormKind::kFinal}, stream), step.logit_rows,
                  stream);
    }
    Activation x = add_and_norm(&DeepSeekModel::residual_, layer > 0, {NormKind::kInput, layer},
                                step.rows, stream);
    attention(weights_.layers[layer], x, step, arrays, pages_of(cache, number), stream);
    if (layer + 1 == num_layers && !options_.with_mtp) break;
    x = add_and_norm(&DeepSeekModel::residual_, true, {NormKind::kPostAttention, layer}, step.rows,
                     stream);
    feed_forward(layer, x, step.rows, valid_rows, all, stream);
  }
  if (options_.with_mtp) return logits_and_mtp_rows(step, arrays, sampled, cache, stream);
  if (step.logit_rows == 0) {
    if (exchanges()) experts_of_ranks(num_layers - 1, {}, 0, nullptr, all, stream);
    return;
  }
  // After the last attention layer, rows without logits are dropped. Padding stays after the valid
  // rows.
  const Activation narrow =
      narrow_and_norm(step, arrays, {NormKind::kPostAttention, num_layers - 1}, stream);
  feed_forward(num_layers - 1, narrow, step.logit_rows, valid_rows, all, stream);
  logits_of(&DeepSeekModel::logit_residual_, {NormKind::kFinal}, step.logit_rows, stream);
}

DeepSeekModel::Pages DeepSeekModel::pages_of(const CacheMemory& cache, int64_t layer) const {
  Pages pages = {cache.format, cache.data + layer * cache.layer_bytes, cache.num_device_pages()};
  if (is_sparse()) {
    const int64_t before = cache.layer_bytes * gpu_page_parts(config_.num_layers, config_.hidden,
                                                              cache.layer_bytes, options_.with_mtp);
    pages.index_keys = {cache.data + before + layer * kIndexPageBytes, cache.layer_bytes};
  }
  return pages;
}

// Collects the weights of the last layers for decode_layers().
void DeepSeekModel::describe_decode_layers() {
  if (plan_.decode_layers == DecodeLayersKind::kNone) return;
  const auto matrix = [](const WeightMatrix& weight) {
    return ScaledMatrix{weight.values, weight.scales};
  };
  std::vector<DecodeLayer> layers;
  for (int64_t i = plan_.first_decode_layer; i < config_.num_layers; ++i) {
    const LayerWeights& weights = weights_.layers[static_cast<size_t>(i)];
    layers.push_back({.input_norm = weights.input_norm,
                      .q_a_norm = weights.q_a_norm,
                      .kv_a_norm = weights.kv_a_norm,
                      .post_attention_norm = weights.post_attention_norm,
                      .q_kv_a = matrix(weights.q_kv_a),
                      .q_b = matrix(weights.q_b),
                      .uk = matrix(weights.uk),
                      .uv = matrix(weights.uv),
                      .o = matrix(weights.o),
                      .router = weights.gate,
                      .router_bias = weights.gate_bias,
                      .gate_up = matrix(weights.experts.gate_up),
                      .down = matrix(weights.experts.down),
                      .shared_gate_up = matrix(weights.shared.gate_up),
                      .shared_down = matrix(weights.shared.down)});
  }
  decode_layers_ = DeviceArray<DecodeLayer>(layers);
}

bool DeepSeekModel::takes_decode_layers(const StepLayout& step, CacheFormat format) const {
  // Launches of a lane's ranks that wait for one another do not fit on one GPU.
  const auto shares = [](const DeepSeekModel* rank) { return rank->peers_.shares_device; };
  return step.rows <= most_rows_of_one_launch() && step.rows == step.valid_rows &&
         step.passes.empty() && step.all_keys <= most_keys_of_one_launch(step.rows, format) &&
         std::ranges::none_of(lane_, shares);
}

// A few tokens through the layers from the plan's first on. A lane's launches begin with the whole
// residual and end, as a layer does, with each rank's part of the last sum.
void DeepSeekModel::last_layers(const StepLayout& step, const std::byte* arrays,
                                const CacheMemory& cache, GpuStream stream) {
  const bool has_delta = plan_.first_decode_layer > 0;
  if (has_delta && !lane_.empty()) {
    peer_sum({.norm = {.residual = residual_,
                       .delta = delta_,
                       .delta_stride = config_.hidden,
                       .rows = step.rows,
                       .n = config_.hidden},
              .peers = peers_,
              .sms = peer_sms()},
             stream);
  }
  decode_layers({.kind = plan_.decode_layers,
                 .layers = decode_layers_.data(),
                 .num_layers = static_cast<int32_t>(decode_layers_.size()),
                 .rows = static_cast<int32_t>(step.rows),
                 .residual = residual_,
                 .delta_in = has_delta && lane_.empty() ? delta_ : nullptr,
                 .delta_out = delta_,
                 .eps = static_cast<float>(config_.rms_norm_eps),
                 .inner_eps = kInnerNormEps,
                 .cos_sin = cos_sin_,
                 .positions = array_at<int32_t>(arrays, step.at.positions),
                 .slots = array_at<int64_t>(arrays, step.at.slots),
                 .block_tables = array_at<int32_t>(arrays, step.at.block_tables),
                 .table_starts = array_at<int32_t>(arrays, step.at.table_starts),
                 .pages = cache.data + plan_.first_decode_layer * cache.layer_bytes,
                 .layer_bytes = cache.layer_bytes,
                 .format = cache.format,
                 .softmax_scale = static_cast<float>(config_.softmax_scale()),
                 .gate = gate_options(config_),
                 .exchange = exchange_,
                 .peers = peers_},
                stream);
}

// Logits of residual + delta_, whose norm stays in normed_.
void DeepSeekModel::logits_of(ResidualField residual, Norm norm, int64_t rows, GpuStream stream) {
  head(add_and_norm(residual, true, norm, rows, stream), rows, stream);
}

// Logits of normed rows, on the lane's first rank.
void DeepSeekModel::head(const Activation& x, int64_t rows, GpuStream stream) {
  product(x, {.values = weights_.head}, {gpu_logit_columns(spec_), config_.hidden},
          {logits_, logits_stride(), DType::kF32}, rows, stream);
  if (lane_.empty()) return;
  const DeepSeekModel& first = *lane_.front();
  gather_columns({.from = logits_,
                  .from_stride = logits_stride(),
                  .to = first.logits_ + spec_.vocabulary().first,
                  .to_stride = first.logits_stride(),
                  .rows = rows,
                  .columns = gpu_logit_columns(spec_),
                  .peers = peers_,
                  .sms = peer_sms()},
                 stream);
}

// delta = mlp(x), dense or MoE.
void DeepSeekModel::feed_forward(size_t layer, const Activation& x, int64_t rows,
                                 const int32_t* num_valid_rows, const WorldRows& all,
                                 GpuStream stream) {
  const LayerWeights& weights = weights_.layers[layer];
  const bool routed = weights.gate != nullptr;
  const MlpWeights& blocks = routed ? weights.experts : weights.dense;
  if (blocks.width == 0) {  // no columns of this block: nothing to add to the sum
    check(cudaMemsetAsync(delta_, 0, static_cast<size_t>(rows * config_.hidden) * sizeof(bf16),
                          stream),
          "clearing a rank's part of a sum");
    return;
  }
  if (routed) {
    gate({.x = x.data,
          .weight = weights.gate,
          .weight_type = weights.gate_type,
          .bias = weights.gate_bias,
          .options = gate_options(config_),
          .num_valid_rows = num_valid_rows,
          .expert_ids = expert_ids_,
          .expert_weights = expert_weights_,
          .rows = rows,
          .hidden = config_.hidden,
          .experts = config_.num_experts,
          .scratch = gate_scratch_,
          .batch_invariant = options_.batch_invariant,
          .library = library_.get(),
          .sms = plan_.budget.sms},
         stream);
  }
  if (routed && exchanges()) {
    experts_of_ranks(layer, x, rows, num_valid_rows, all, stream);
  } else {
    experts(blocks, weights.shared, x, rows, routed, stream);
  }
}

// The same without the router: of the routed experts, or of a dense block as the only one.
void DeepSeekModel::experts(const MlpWeights& experts, const MlpWeights& shared,
                            const Activation& x, int64_t rows, bool routed, GpuStream stream) {
  if (experts.gate_up.type == DType::kU8) return four_bit_experts(experts, shared, x, rows, stream);
  const int32_t* const ids = routed ? expert_ids_ : dense_ids_;
  const float* const expert_weights = routed ? expert_weights_ : dense_weights_;
  if (is_e4m3(experts.gate_up)) {
    scaled_moe({.shape = routed ? moe_shape(kScaleBlock) : dense_shape(kScaleBlock),
                .rows = static_cast<int32_t>(rows),
                .x = x.quantized.values,
                .x_scales = x.quantized.scales,
                .x_scales_stride = x.quantized.scales_block_stride,
                .expert_ids = ids,
                .expert_weights = expert_weights,
                .gate_up = experts.gate_up.values,
                .gate_up_scales = experts.gate_up.scales,
                .down = experts.down.values,
                .down_scales = experts.down.scales,
                .shared_gate_up = shared.gate_up.values,
                .shared_gate_up_scales = shared.gate_up.scales,
                .shared_down = shared.down.values,
                .shared_down_scales = shared.down.scales,
                .out = delta_,
                .out_type = DType::kBF16,
                .workspace = mlp_,
                .progress = scaled_progress_,
                .form = x.quantized.form,
                .batch_invariant = options_.batch_invariant,
                .budget = plan_.budget},
               stream);
  } else {
    moe({.shape = routed ? moe_shape(kBf16WidthUnit) : dense_shape(kBf16WidthUnit),
         .rows = static_cast<int32_t>(rows),
         .x = x.data,
         .expert_ids = ids,
         .expert_weights = expert_weights,
         .gate_up = experts.gate_up.values,
         .down = experts.down.values,
         .shared_gate_up = shared.gate_up.values,
         .shared_down = shared.down.values,
         .out = delta_,
         .out_type = DType::kBF16,
         .workspace = mlp_,
         .progress = progress_,
         .batch_invariant = options_.batch_invariant,
         .budget = plan_.budget},
        stream);
  }
}

// Routed experts in four bits, added to the shared one in bf16.
void DeepSeekModel::four_bit_experts(const MlpWeights& experts, const MlpWeights& shared,
                                     const Activation& x, int64_t rows, GpuStream stream) {
  const bool has_shared = shared.width > 0;
  if (has_shared) {
    moe({.shape = shared_shape(),
         .rows = static_cast<int32_t>(rows),
         .x = x.data,
         .expert_ids = dense_ids_,
         .expert_weights = dense_weights_,
         .gate_up = shared.gate_up.values,
         .down = shared.down.values,
         .out = shared_out_,
         .out_type = DType::kBF16,
         .workspace = mlp_,
         .progress = progress_,
         .batch_invariant = options_.batch_invariant,
         .budget = plan_.budget},
        stream);
  }
  four_bit_moe({.shape = moe_shape(kBf16WidthUnit),
                .code = experts.code,
                .rows = static_cast<int32_t>(rows),
                .x = x.data,
                .expert_ids = expert_ids_,
                .expert_weights = expert_weights_,
                .gate_up = experts.gate_up.values,
                .down = experts.down.values,
                .addend = has_shared ? shared_out_ : nullptr,
                .out = delta_,
                .out_type = DType::kBF16,
                .workspace = mlp_,
                .batch_invariant = options_.batch_invariant},
               stream);
}

// out [rows, n] = x [rows, k] W^T
void DeepSeekModel::product(const Activation& x, const WeightMatrix& weight, MatrixSize size,
                            const Output& out, int64_t rows, GpuStream stream) {
  if (!is_e4m3(weight)) {
    linear({.x = x.data,
            .x_row_stride = x.stride,
            .weight = weight.values,
            .out = out.data,
            .out_row_stride = out.stride,
            .out_type = out.type,
            .rows = static_cast<int32_t>(rows),
            .n = static_cast<int32_t>(size.n),
            .k = static_cast<int32_t>(size.k),
            .batch_invariant = options_.batch_invariant,
            .library = library_.get()},
           stream);
    return;
  }
  QuantizedRows quantized_x = x.quantized;
  if (quantized_x.values == nullptr) {
    quantized_x = quantized(rows, size.k, weight.input_scale);
    quantize_rows({.x = x.data,
                   .x_row_stride = x.stride,
                   .values = quantized_x.values,
                   .values_row_stride = quantized_x.values_row_stride,
                   .scales = quantized_x.scales,
                   .scales_block_stride = quantized_x.scales_block_stride,
                   .rows = static_cast<int32_t>(rows),
                   .k = static_cast<int32_t>(size.k),
                   .form = quantized_x.form,
                   .fixed_scale = quantized_x.fixed_scale},
                  stream);
  }
  scaled_linear({.x = quantized_x.values,
                 .x_row_stride = quantized_x.values_row_stride,
                 .x_scales = quantized_x.scales,
                 .x_scales_stride = quantized_x.scales_block_stride,
                 .weight = weight.values,
                 .weight_scales = weight.scales,
                 .weight_row_scales = weight.row_scales,
                 .out = out.data,
                 .out_row_stride = out.stride,
                 .out_type = out.type,
                 .rows = static_cast<int32_t>(rows),
                 .n = static_cast<int32_t>(size.n),
                 .k = static_cast<int32_t>(size.k),
                 .batch_invariant = options_.batch_invariant},
                stream);
}

}  // namespace fathom::cuda
