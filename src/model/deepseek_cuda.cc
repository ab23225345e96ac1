#include "model/deepseek_cuda.h"

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "model/layer_options.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/embedding/embedding_cuda.h"
#include "ops/gate/gate_cuda.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/library_plan.h"
#include "ops/linear/linear_cuda.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/scaled_linear/quantize_rows_cuda.h"
#include "ops/scaled_linear/scaled_linear_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 1024;
constexpr int64_t kScalesPadding = 4;  // of each row of scales, see QuantizedRows

}  // namespace

DeepSeekModel::DeepSeekModel(ModelSpec spec, KernelPlan plan, const ModelOptions& options)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      options_(options),
      device_(DeviceContext::current()) {}

// Widths are padded to multiples of `unit`, see MlpWeights.
MoeShape DeepSeekModel::moe_shape(int64_t unit) const {
  return {.hidden = static_cast<int32_t>(config_.hidden),
          .num_experts = static_cast<int32_t>(config_.num_experts),
          .experts_per_token = static_cast<int32_t>(config_.experts_per_token),
          .inter = static_cast<int32_t>(round_up(plan_.widths.routed, unit)),
          .shared_inter = static_cast<int32_t>(round_up(plan_.widths.shared, unit))};
}

// A dense layer's MLP as a MoE with one expert.
MoeShape DeepSeekModel::dense_shape(int64_t unit) const {
  return {.hidden = static_cast<int32_t>(config_.hidden),
          .num_experts = 1,
          .experts_per_token = 1,
          .inter = static_cast<int32_t>(round_up(plan_.widths.dense, unit)),
          .shared_inter = 0};
}

int64_t DeepSeekModel::mlp_bytes() const {
  const auto rows = static_cast<int32_t>(options_.max_rows);
  int64_t bytes = 0;
  const auto add = [&](int64_t width, MoeShape (DeepSeekModel::*shape)(int64_t) const) {
    if (width == 0) return;
    bytes = std::max(bytes, moe_workspace_bytes((this->*shape)(kBf16WidthUnit), rows));
    if (config_.hidden % kScaleBlock != 0) return;
    bytes = std::max(bytes, scaled_moe_workspace_bytes((this->*shape)(kScaleBlock), rows));
  };
  add(plan_.widths.dense, &DeepSeekModel::dense_shape);
  add(plan_.widths.routed, &DeepSeekModel::moe_shape);
  return bytes;
}

// Calls place(pointer, count) for each buffer.
template <typename Place>
void DeepSeekModel::for_each_piece(const Place& place) {
  const int64_t rows = options_.max_rows, heads = heads_, keys = options_.most_keys;
  const int64_t hidden = config_.hidden, latent = config_.kv_lora_rank;
  const int64_t rope = config_.qk_rope_dim, heads_out = heads * config_.v_dim,
                routed = std::max<int64_t>(1, config_.experts_per_token);
  const int64_t normed = std::max(rows, options_.max_logit_rows);
  const int64_t quantized =  // GEMM input rows, or keys
      std::max(
          round_up(normed, kScalesPadding) * std::max({hidden, config_.q_lora_rank, heads_out}),
          round_up(keys, kScalesPadding) * latent);
  place(residual_, rows * hidden);
  place(logit_residual_, options_.max_logit_rows * hidden);
  place(normed_, normed * hidden);
  place(delta_, rows * hidden);
  place(q_kv_a_, rows * q_kv_a_columns());
  if (config_.q_lora_rank > 0) {
    place(q_a_normed_, rows * config_.q_lora_rank);
    place(q_, rows * q_rows());
  }
  place(q_rope_, rows * heads * rope);
  place(q_latent_, rows * heads * latent);
  place(o_latent_, rows * heads * latent);
  place(heads_out_, rows * heads_out);
  place(quantized_, quantized);
  place(quantized_scales_, ceil_div(quantized, kScaleBlock));
  place(partial_lse_, rows * heads);
  place(key_latent_, keys * latent);
  place(key_rope_, keys * rope);
  place(kv_, keys * heads * (config_.qk_nope_dim + config_.v_dim));
  place(expert_ids_, rows * routed);
  place(expert_weights_, rows * routed);
  place(dense_ids_, rows);
  place(dense_weights_, rows);
  place(mlp_, mlp_bytes());
  place(progress_, kMoeProgressWords);
  place(scaled_progress_, kScaledMoeProgressWords);
  place(exchange_, plan_.takes_decode_layers ? decode_layers_exchange_bytes() : 0);
  place(gate_scratch_, gate_scratch_words(rows, hidden, config_.num_experts, plan_.budget.sms));
  place(decode_scratch_, latent_decode_scratch(plan_.budget.sms).words());
  place(cos_sin_, config_.max_position * rope);
  place(logits_, options_.max_logit_rows * logits_stride());
  place(library_workspace_, plan_.takes_library ? CublasLt::kWorkspaceBytes : 0);
}

int64_t DeepSeekModel::workspace_bytes() {
  int64_t bytes = 0;
  for_each_piece([&](auto* pointer, int64_t count) {
    bytes = round_up(bytes + count * static_cast<int64_t>(sizeof(*pointer)), kAlignment);
  });
  return bytes;
}

Result<KernelPlan> DeepSeekModel::plan(const Checkpoint& checkpoint, const ModelSpec& spec,
                                       const ModelOptions& options,
                                       const LoadOptions& load_options) {
  return plan_kernels(spec, WeightForms(checkpoint, options.stored_fp8, load_options),
                      {.cache_format = options.cache_format,
                       .batch_invariant = options.batch_invariant,
                       .has_library = !cublas_lt_version().empty()},
                      DeviceContext::current().budget());
}

Result<ModelMemory> DeepSeekModel::memory(const Checkpoint& checkpoint, const ModelOptions& options,
                                          const LoadOptions& load_options) {
  ModelSpec spec = make_spec(checkpoint.config());
  FATHOM_TRY(KernelPlan kernels, plan(checkpoint, spec, options, load_options));
  const int64_t weights = weight_bytes(spec, kernels.layers);
  return ModelMemory{weights,
                     DeepSeekModel(std::move(spec), std::move(kernels), options).workspace_bytes()};
}

Result<std::unique_ptr<DeepSeekModel>> DeepSeekModel::load(const Checkpoint& checkpoint,
                                                           const ModelOptions& options,
                                                           const LoadOptions& load_options) {
  ModelSpec spec = make_spec(checkpoint.config());
  FATHOM_TRY(KernelPlan kernels, plan(checkpoint, spec, options, load_options));
  std::unique_ptr<DeepSeekModel> model(
      new DeepSeekModel(std::move(spec), std::move(kernels), options));
  model->workspace_ = DeviceArray<std::byte>(model->workspace_bytes());
  int64_t bytes = 0;
  model->for_each_piece([&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(model->workspace_.data() + bytes);
    bytes = round_up(bytes + count * static_cast<int64_t>(sizeof(T)), kAlignment);
  });
  model->fill_constants();
  FATHOM_TRY(model->weights_,
             load_weights(checkpoint, model->spec_, model->plan_.layers, load_options));
  model->describe_decode_layers();
  if (model->plan_.takes_library) model->prepare_library();
  return model;
}

void DeepSeekModel::fill_constants() {
  const auto upload = [](const auto& values, auto* to) {
    check(cudaMemcpy(to, values.data(), values.size() * sizeof(values[0]), cudaMemcpyHostToDevice),
          "copying to the device");
  };
  const auto rows = static_cast<size_t>(options_.max_rows);
  upload(std::vector<int32_t>(rows, 0), dense_ids_);
  upload(std::vector<float>(rows, 1.0f), dense_weights_);
  upload(
      tabulate(make_rope_table(config_.qk_rope_dim, config_.rope_theta, yarn_parameters(config_)),
               config_.max_position),
      cos_sin_);
  upload(std::vector<uint64_t>(kMoeProgressWords, 0), progress_);
  upload(std::vector<uint64_t>(kScaledMoeProgressWords, 0), scaled_progress_);
  if (plan_.takes_decode_layers) {
    check(cudaMemset(exchange_, 0, static_cast<size_t>(decode_layers_exchange_bytes())),
          "preparing one token's exchange");
  }
  const int64_t gate_words =
      gate_scratch_words(options_.max_rows, config_.hidden, config_.num_experts, plan_.budget.sms);
  check(cudaMemset(gate_scratch_, 0xFF, static_cast<size_t>(gate_words) * sizeof(float)),
        "preparing the router's memory");
  prepare_latent_decode_scratch(decode_scratch_, plan_.budget.sms, {device_, nullptr});
  check(cudaStreamSynchronize(nullptr), "preparing the workspace");
}

void DeepSeekModel::forward(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
                            const CacheMemory& cache, GpuStream stream) {
  FATHOM_CHECK(step.page_stride == cache.page_stride,
               "a step over pages {} apart, the cache's are {}", step.page_stride,
               cache.page_stride);
  FATHOM_CHECK(step.rows > 0 && step.rows <= options_.max_rows, "{} rows, at most {}", step.rows,
               options_.max_rows);
  FATHOM_CHECK(step.logit_rows <= options_.max_logit_rows, "{} logit rows, at most {}",
               step.logit_rows, options_.max_logit_rows);
  embedding({.ids = array_at<int32_t>(arrays, step.at.token_ids),
             .sampled = sampled,
             .table = weights_.embedding,
             .out = residual_,
             .rows = step.rows,
             .n = config_.hidden,
             .vocab = config_.vocab_size},
            stream);
  const auto* valid_rows = array_at<int32_t>(arrays, step.at.num_valid_rows);
  const LayerWeights& last = weights_.layers.back();
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    if (layer == plan_.first_decode_layer && takes_decode_layers(step)) {
      return last_layers(step, arrays, cache, stream);
    }
    const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
    Activation x = add_and_norm(residual_, layer > 0 ? delta_ : nullptr, weights.input_norm,
                                forms_of(weights.q_kv_a), step.rows, stream);
    attention(weights, x, step, arrays,
              {cache.format, cache.data + layer * cache.layer_bytes, cache.num_device_pages()},
              stream);
    if (layer + 1 == config_.num_layers) break;
    x = add_and_norm(residual_, delta_, weights.post_attention_norm, feed_forward_forms(weights),
                     step.rows, stream);
    feed_forward(weights, x, step.rows, valid_rows, stream);
  }
  if (step.logit_rows == 0) return;
  // After the last attention layer, rows without logits are dropped. Padding stays after the valid
  // rows.
  const Activation narrow =
      narrow_and_norm(step, arrays, last.post_attention_norm, feed_forward_forms(last), stream);
  feed_forward(last, narrow, step.logit_rows, valid_rows, stream);
  logits_of(logit_residual_, step.logit_rows, stream);
}

// Collects the weights of the last layers for decode_layers().
void DeepSeekModel::describe_decode_layers() {
  if (!plan_.takes_decode_layers) return;
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

bool DeepSeekModel::takes_decode_layers(const StepLayout& step) const {
  return one_row_depends_on_keys() && step.rows == 1 && step.passes.empty() &&
         step.most_keys <= kMostDecodeLayersTokens;
}

// One token through the layers from the plan's first on, and its logits.
void DeepSeekModel::last_layers(const StepLayout& step, const std::byte* arrays,
                                const CacheMemory& cache, GpuStream stream) {
  decode_layers({.layers = decode_layers_.data(),
                 .num_layers = static_cast<int32_t>(decode_layers_.size()),
                 .residual = residual_,
                 .delta_in = plan_.first_decode_layer > 0 ? delta_ : nullptr,
                 .delta_out = delta_,
                 .eps = static_cast<float>(config_.rms_norm_eps),
                 .inner_eps = kInnerNormEps,
                 .cos_sin = cos_sin_,
                 .position = array_at<int32_t>(arrays, step.at.positions),
                 .slot = array_at<int64_t>(arrays, step.at.slots),
                 .block_table = array_at<int32_t>(arrays, step.at.block_tables),
                 .pages = cache.data + plan_.first_decode_layer * cache.layer_bytes,
                 .layer_bytes = cache.layer_bytes,
                 .format = cache.format,
                 .softmax_scale = static_cast<float>(config_.softmax_scale()),
                 .gate = gate_options(config_),
                 .exchange = exchange_},
                stream);
  if (step.logit_rows > 0) logits_of(residual_, step.logit_rows, stream);
}

// Logits of residual + delta_.
void DeepSeekModel::logits_of(float* residual, int64_t rows, GpuStream stream) {
  const Activation x =
      add_and_norm(residual, delta_, weights_.final_norm, {.bf16 = true}, rows, stream);
  product(x, {.values = weights_.head}, {logits_stride(), config_.hidden},
          {logits_, logits_stride(), DType::kF32}, rows, stream);
}

// Runs each GEMM that the library takes once for every class of row counts: steps then neither
// query algorithms nor load kernels.
void DeepSeekModel::prepare_library() {
  library_ = CublasLt::load(library_workspace_);
  const LayerWeights &first = weights_.layers.front(), &last = weights_.layers.back();
  const int64_t hidden = config_.hidden, lora = config_.q_lora_rank, latent = config_.kv_lora_rank,
                heads_out = heads_ * config_.v_dim,
                keys_columns = heads_ * (config_.qk_nope_dim + config_.v_dim);
  const int64_t most_rows = std::max(options_.max_rows, options_.most_keys);
  for (int64_t least = 65; least <= most_rows; least = rows_alike(least) + 1) {
    const auto run = [&](bf16* x, const WeightMatrix& weight, MatrixSize size, void* out,
                         DType type, int64_t most) {
      if (least > most || is_e4m3(weight)) return;
      const int64_t some_rows = std::min(rows_alike(least), most);
      check(cudaMemset(x, 0, static_cast<size_t>(some_rows * size.k) * sizeof(bf16)),
            "clearing a product's rows");
      product({.data = x, .stride = size.k}, weight, size, {out, size.n, type}, some_rows,
              {device_, nullptr});
    };
    const int64_t rows = options_.max_rows;
    run(normed_, first.q_kv_a, {q_kv_a_columns(), hidden}, q_kv_a_, DType::kBF16, rows);
    if (lora > 0) run(q_a_normed_, first.q_b, {q_rows(), lora}, q_, DType::kBF16, rows);
    run(key_latent_, first.kv_b, {keys_columns, latent}, kv_, DType::kBF16, options_.most_keys);
    run(heads_out_, first.o, {hidden, heads_out}, delta_, DType::kBF16, rows);
    run(normed_, {.values = weights_.head}, {logits_stride(), hidden}, logits_, DType::kF32,
        options_.max_logit_rows);
    if (last.gate_type == DType::kBF16 &&
        gate_scratch_words(1, hidden, config_.num_experts, plan_.budget.sms) > 0) {
      run(normed_, {.values = last.gate}, {config_.num_experts, hidden}, residual_, DType::kF32,
          std::min(rows, rows * hidden / config_.num_experts));
    }
  }
  // Not the whole device: that fails while another engine of this process captures a graph.
  check(cudaStreamSynchronize(nullptr), "preparing cuBLASLt");
}

// residual += delta; returns norm(residual)
DeepSeekModel::Activation DeepSeekModel::add_and_norm(float* residual, const bf16* delta,
                                                      const float* weight, Forms forms,
                                                      int64_t rows, GpuStream stream) {
  const Activation out = normed(forms, rows);
  add_rms_norm({.residual = residual,
                .delta = delta,
                .delta_stride = config_.hidden,
                .weight = weight,
                .eps = static_cast<float>(config_.rms_norm_eps),
                .out = forms.bf16 ? normed_ : nullptr,
                .quantized = out.quantized,
                .rows = rows,
                .n = config_.hidden},
               stream);
  return out;
}

// The same for the rows that need logits, written to logit_residual.
DeepSeekModel::Activation DeepSeekModel::narrow_and_norm(const StepLayout& step,
                                                         const std::byte* arrays,
                                                         const float* weight, Forms forms,
                                                         GpuStream stream) {
  const Activation out = normed(forms, step.logit_rows);
  add_rms_norm({.residual = residual_,
                .delta = delta_,
                .delta_stride = config_.hidden,
                .row_ids = array_at<int32_t>(arrays, step.at.logit_rows),
                .gathered = logit_residual_,
                .weight = weight,
                .eps = static_cast<float>(config_.rms_norm_eps),
                .out = forms.bf16 ? normed_ : nullptr,
                .quantized = out.quantized,
                .rows = step.logit_rows,
                .n = config_.hidden},
               stream);
  return out;
}

// delta = mlp(x), dense or MoE.
void DeepSeekModel::feed_forward(const LayerWeights& weights, const Activation& x, int64_t rows,
                                 const int32_t* num_valid_rows, GpuStream stream) {
  const bool routed = weights.gate != nullptr;
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
  const MlpWeights& experts = routed ? weights.experts : weights.dense;
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
                .shared_gate_up = weights.shared.gate_up.values,
                .shared_gate_up_scales = weights.shared.gate_up.scales,
                .shared_down = weights.shared.down.values,
                .shared_down_scales = weights.shared.down.scales,
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
         .shared_gate_up = weights.shared.gate_up.values,
         .shared_down = weights.shared.down.values,
         .out = delta_,
         .out_type = DType::kBF16,
         .workspace = mlp_,
         .progress = progress_,
         .batch_invariant = options_.batch_invariant,
         .budget = plan_.budget},
        stream);
  }
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

DeepSeekModel::Forms DeepSeekModel::forms_of(const WeightMatrix& weight) {
  const bool e4m3 = is_e4m3(weight);
  return {.bf16 = !e4m3, .e4m3 = e4m3, .input_scale = weight.input_scale};
}

DeepSeekModel::Forms DeepSeekModel::feed_forward_forms(const LayerWeights& weights) {
  if (weights.gate == nullptr) return forms_of(weights.dense.gate_up);
  Forms forms = forms_of(weights.experts.gate_up);
  forms.bf16 = true;  // the router reads it
  forms.input_scale = std::max(forms.input_scale, weights.shared.gate_up.input_scale);
  return forms;
}

// Buffers for the norms' output rows.
DeepSeekModel::Activation DeepSeekModel::normed(Forms forms, int64_t rows) const {
  Activation out;
  if (forms.bf16) {
    out.data = normed_;
    out.stride = config_.hidden;
  }
  if (forms.e4m3) out.quantized = quantized(rows, config_.hidden, forms.input_scale);
  return out;
}

// Buffer for one GEMM's rows at a time.
QuantizedRows DeepSeekModel::quantized(int64_t rows, int64_t k, float input_scale) const {
  return {.values = quantized_,
          .values_row_stride = k,
          .scales = quantized_scales_,
          .scales_block_stride = round_up(rows, kScalesPadding),
          .form = scale_form(),
          .fixed_scale = input_scale};
}

}  // namespace fathom::cuda
