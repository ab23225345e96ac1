#include "model/deepseek_cuda.h"

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "model/layer_options.h"
#include "ops/attention/cached_prefix_cuda.h"
#include "ops/attention/latent_decode_cuda.h"
#include "ops/attention/mha_prefill_cuda.h"
#include "ops/embedding/embedding_cuda.h"
#include "ops/gate/gate_cuda.h"
#include "ops/linear/linear_cuda.h"
#include "ops/moe/moe_cuda.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/rope/query_key_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 1024;

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "asking for the device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "asking for multiprocessors");
  return count;
}

MoeShape moe_shape(const ModelConfig& config) {
  return {
      .hidden = static_cast<int32_t>(config.hidden),
      .num_experts = static_cast<int32_t>(config.num_experts),
      .experts_per_token = static_cast<int32_t>(config.experts_per_token),
      .inter = static_cast<int32_t>(config.moe_intermediate),
      .shared_inter = static_cast<int32_t>(config.num_shared_experts * config.moe_intermediate)};
}

// A dense layer's block: the only expert that there is.
MoeShape dense_shape(const ModelConfig& config) {
  return {.hidden = static_cast<int32_t>(config.hidden),
          .num_experts = 1,
          .experts_per_token = 1,
          .inter = static_cast<int32_t>(config.intermediate),
          .shared_inter = 0};
}

int64_t q_rows(const ModelConfig& config) { return config.num_heads * config.qk_dim(); }

// Columns of q_kv_a's product.
int64_t q_kv_a_columns(const ModelConfig& config) {
  return (config.q_lora_rank > 0 ? config.q_lora_rank : q_rows(config)) + config.latent_dim();
}

template <typename T>
const T* array_at(const std::byte* arrays, int64_t offset) {
  return reinterpret_cast<const T*>(arrays + offset);
}

}  // namespace

DeepSeekModel::DeepSeekModel(const ModelConfig& config, const ModelOptions& options)
    : config_(config), options_(options), num_multiprocessors_(multiprocessors()) {}

// Calls place(pointer, count) for each piece.
template <typename Place>
void DeepSeekModel::for_each_piece(const Place& place) {
  const int64_t rows = options_.max_rows, heads = config_.num_heads, keys = options_.most_keys;
  const int64_t hidden = config_.hidden, latent = config_.kv_lora_rank;
  const int64_t rope = config_.qk_rope_dim,
                routed = std::max<int64_t>(1, config_.experts_per_token);
  const auto int_rows = static_cast<int32_t>(rows);
  int64_t mlp = moe_workspace_bytes(dense_shape(config_), int_rows);
  if (config_.num_experts > 0) {
    mlp = std::max(mlp, moe_workspace_bytes(moe_shape(config_), int_rows));
  }
  place(residual_, rows * hidden);
  place(logit_residual_, options_.max_logit_rows * hidden);
  place(normed_, std::max(rows, options_.max_logit_rows) * hidden);
  place(delta_, rows * hidden);
  place(q_kv_a_, rows * q_kv_a_columns(config_));
  if (config_.q_lora_rank > 0) {
    place(q_a_normed_, rows * config_.q_lora_rank);
    place(q_, rows * q_rows(config_));
  }
  place(q_rope_, rows * heads * rope);
  place(q_latent_, rows * heads * latent);
  place(o_latent_, rows * heads * latent);
  place(heads_out_, rows * heads * config_.v_dim);
  place(partial_lse_, rows * heads);
  place(key_latent_, keys * latent);
  place(key_rope_, keys * rope);
  place(kv_, keys * heads * (config_.qk_nope_dim + config_.v_dim));
  place(expert_ids_, rows * routed);
  place(expert_weights_, rows * routed);
  place(dense_ids_, rows);
  place(dense_weights_, rows);
  place(mlp_, mlp);
  place(progress_, kMoeProgressWords);
  place(decode_scratch_, latent_decode_scratch(num_multiprocessors_).words());
  place(cos_sin_, config_.max_position * rope);
  place(logits_, options_.max_logit_rows * config_.vocab_size);
}

int64_t DeepSeekModel::weight_bytes(const Checkpoint& checkpoint, const LoadOptions& load_options) {
  return cuda::weight_bytes(checkpoint, StoredFp8::kExpandedToBF16, load_options);
}

int64_t DeepSeekModel::workspace_bytes(const ModelConfig& config, const ModelOptions& options) {
  int64_t bytes = 0;
  DeepSeekModel(config, options).for_each_piece([&](auto* pointer, int64_t count) {
    bytes = round_up(bytes + count * static_cast<int64_t>(sizeof(*pointer)), kAlignment);
  });
  return bytes;
}

Result<std::unique_ptr<DeepSeekModel>> DeepSeekModel::load(const Checkpoint& checkpoint,
                                                           const ModelOptions& options,
                                                           const LoadOptions& load_options) {
  const ModelConfig& config = checkpoint.config();
  std::unique_ptr<DeepSeekModel> model(new DeepSeekModel(config, options));
  model->workspace_ = DeviceArray<std::byte>(workspace_bytes(config, options));
  int64_t bytes = 0;
  model->for_each_piece([&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(model->workspace_.data() + bytes);
    bytes = round_up(bytes + count * static_cast<int64_t>(sizeof(T)), kAlignment);
  });
  model->fill_constants();
  FATHOM_TRY(model->weights_, load_weights(checkpoint, StoredFp8::kExpandedToBF16, load_options));
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
  prepare_latent_decode_scratch(decode_scratch_, num_multiprocessors_, nullptr);
  check(cudaDeviceSynchronize(), "preparing the workspace");
}

void DeepSeekModel::forward(const StepLayout& step, const std::byte* arrays, const int32_t* sampled,
                            const CacheMemory& cache, cudaStream_t stream) {
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
    const LayerWeights& weights = weights_.layers[static_cast<size_t>(layer)];
    add_and_norm(residual_, layer > 0 ? delta_ : nullptr, weights.input_norm, step.rows, stream);
    attention(weights, step, arrays,
              {cache.format, cache.data + layer * cache.layer_bytes, cache.num_pages}, stream);
    if (layer + 1 == config_.num_layers) break;
    add_and_norm(residual_, delta_, weights.post_attention_norm, step.rows, stream);
    feed_forward(weights, step.rows, valid_rows, stream);
  }
  if (step.logit_rows == 0) return;
  // Behind the last attention the rows without logits are of no more use. Padding keeps its place
  // behind the valid rows.
  narrow_and_norm(step, arrays, last.post_attention_norm, stream);
  feed_forward(last, step.logit_rows, valid_rows, stream);
  add_and_norm(logit_residual_, delta_, weights_.final_norm, step.logit_rows, stream);
  product(normed_, config_.hidden, weights_.head, {config_.vocab_size, config_.hidden}, logits_,
          config_.vocab_size, step.logit_rows, stream);
}

// residual += delta; normed = norm(residual)
void DeepSeekModel::add_and_norm(float* residual, const bf16* delta, const float* weight,
                                 int64_t rows, cudaStream_t stream) {
  add_rms_norm({.residual = residual,
                .delta = delta,
                .delta_stride = config_.hidden,
                .weight = weight,
                .eps = static_cast<float>(config_.rms_norm_eps),
                .out = normed_,
                .rows = rows,
                .n = config_.hidden},
               stream);
}

// The same of the rows whose logits are wanted, to logit_residual.
void DeepSeekModel::narrow_and_norm(const StepLayout& step, const std::byte* arrays,
                                    const float* weight, cudaStream_t stream) {
  add_rms_norm({.residual = residual_,
                .delta = delta_,
                .delta_stride = config_.hidden,
                .row_ids = array_at<int32_t>(arrays, step.at.logit_rows),
                .gathered = logit_residual_,
                .weight = weight,
                .eps = static_cast<float>(config_.rms_norm_eps),
                .out = normed_,
                .rows = step.logit_rows,
                .n = config_.hidden},
               stream);
}

// delta = W_o · attention(normed)
void DeepSeekModel::attention(const LayerWeights& weights, const StepLayout& step,
                              const std::byte* arrays, const Pages& pages, cudaStream_t stream) {
  const int64_t hidden = config_.hidden, columns = q_kv_a_columns(config_);
  const int64_t first = columns - config_.latent_dim();  // where kv_a begins
  product(normed_, hidden, weights.q_kv_a.values, {columns, hidden}, q_kv_a_, columns, step.rows,
          stream);
  Query query = {q_kv_a_, columns};
  if (config_.q_lora_rank > 0) {
    const int64_t lora = config_.q_lora_rank;
    rms_norm({.x = q_kv_a_,
              .x_stride = columns,
              .weight = weights.q_a_norm,
              .eps = kInnerNormEps,
              .out = q_a_normed_,
              .out_stride = lora,
              .rows = step.rows,
              .n = lora},
             stream);
    query = {q_, q_rows(config_)};
    product(q_a_normed_, lora, weights.q_b.values, {query.stride, lora}, q_, query.stride,
            step.rows, stream);
  }
  query_key({.q = query.data,
             .q_stride = query.stride,
             .q_rope = q_rope_,
             .kv_a = q_kv_a_ + first,
             .kv_a_stride = columns,
             .norm_weight = weights.kv_a_norm,
             .eps = kInnerNormEps,
             .cos_sin = cos_sin_,
             .positions = array_at<int32_t>(arrays, step.at.positions),
             .slots = array_at<int64_t>(arrays, step.at.slots),
             .pages = pages.data,
             .format = pages.format,
             .rows = step.rows,
             .heads = static_cast<int32_t>(config_.num_heads),
             .nope = static_cast<int32_t>(config_.qk_nope_dim)},
            stream);
  if (step.absorbed_rows > 0) {
    absorbed_attention(weights, step, arrays, query, pages, stream);
  }
  for (size_t pass = 0; pass < step.passes.size(); ++pass) {
    mha_attention(weights, step, pass, arrays, query, pages, stream);
  }
  const int64_t heads_out = config_.num_heads * config_.v_dim;
  product(heads_out_, heads_out, weights.o.values, {hidden, heads_out}, delta_, hidden, step.rows,
          stream);
}

// W_UK folded into the query, attention over the latent rows, W_UV after.
void DeepSeekModel::absorbed_attention(const LayerWeights& weights, const StepLayout& step,
                                       const std::byte* arrays, const Query& query,
                                       const Pages& pages, cudaStream_t stream) {
  const int64_t heads = config_.num_heads, latent = config_.kv_lora_rank, v = config_.v_dim;
  // Padding comes last: a graph's rows are all absorbed.
  const auto rows = static_cast<int32_t>(step.passes.empty() ? step.rows : step.absorbed_rows);
  linear({.x = query.data,
          .x_row_stride = query.stride,
          .x_batch_stride = config_.qk_dim(),
          .weight = weights.uk.values,
          .out = q_latent_,
          .out_row_stride = heads * latent,
          .out_batch_stride = latent,
          .rows = rows,
          .n = static_cast<int32_t>(latent),
          .k = static_cast<int32_t>(config_.qk_nope_dim),
          .batches = static_cast<int32_t>(heads),
          .batch_invariant = options_.batch_invariant},
         stream);
  for (const DecodeLaunch& decode : step.decodes) {
    latent_decode(decode.tile_rows, num_multiprocessors_,
                  {.rows = rows,
                   .q_latent = q_latent_,
                   .q_rope = q_rope_,
                   .pages = pages.data,
                   .num_pages = pages.count,
                   .block_tables = array_at<int32_t>(arrays, step.at.block_tables),
                   .out = o_latent_,
                   .heads = static_cast<int32_t>(heads),
                   .softmax_scale = static_cast<float>(config_.softmax_scale()),
                   .parts = array_at<LatentDecodePart>(arrays, decode.parts),
                   .first_part = array_at<int32_t>(arrays, decode.first_part),
                   .scratch = decode_scratch_,
                   .format = pages.format},
                  stream);
  }
  linear({.x = o_latent_,
          .x_row_stride = heads * latent,
          .x_batch_stride = latent,
          .weight = weights.uv.values,
          .out = heads_out_,
          .out_row_stride = heads * v,
          .out_batch_stride = v,
          .rows = rows,
          .n = static_cast<int32_t>(v),
          .k = static_cast<int32_t>(latent),
          .batches = static_cast<int32_t>(heads),
          .batch_invariant = options_.batch_invariant},
         stream);
}

// Keys and values of a pass's sequences expanded from the latent. What rows have of earlier passes
// is where absorbed attention, which is done, had its queries.
void DeepSeekModel::mha_attention(const LayerWeights& weights, const StepLayout& step, size_t index,
                                  const std::byte* arrays, const Query& query, const Pages& pages,
                                  cudaStream_t stream) {
  const MhaPass& pass = step.passes[index];
  const int64_t latent = config_.kv_lora_rank;
  const int64_t columns = config_.num_heads * (config_.qk_nope_dim + config_.v_dim);
  FATHOM_CHECK(pass.num_keys <= options_.most_keys, "{} keys, at most {}", pass.num_keys,
               options_.most_keys);
  gather_latent({.pages = pages.data,
                 .format = pages.format,
                 .block_tables = array_at<int32_t>(arrays, step.at.block_tables),
                 .max_pages = step.max_pages,
                 .sequences = array_at<int32_t>(arrays, step.at.gathered) + pass.first_part,
                 .first_keys = array_at<int32_t>(arrays, step.at.first_keys) + pass.first_part,
                 // Each pass has one start more than it has parts.
                 .key_starts = array_at<int32_t>(arrays, step.at.key_starts) + pass.first_part +
                               static_cast<int64_t>(index),
                 .num_sequences = pass.num_parts,
                 .keys = pass.num_keys,
                 .latent = key_latent_,
                 .k_rope = key_rope_},
                stream);
  product(key_latent_, latent, weights.kv_b.values, {columns, latent}, kv_, columns, pass.num_keys,
          stream);
  mha_prefill(num_multiprocessors_,
              {.q = query.data,
               .q_row_stride = query.stride,
               .rows = step.rows,
               .kv = kv_,
               .k_rope = key_rope_,
               .keys = pass.num_keys,
               .out = heads_out_,
               .partial = reinterpret_cast<float*>(q_latent_),
               .lse = partial_lse_,
               .heads = static_cast<int32_t>(config_.num_heads),
               .softmax_scale = static_cast<float>(config_.softmax_scale()),
               .first_tile = array_at<int32_t>(arrays, step.at.mha_first_tile) +
                             static_cast<int64_t>(index) * num_multiprocessors_,
               .tiles = array_at<MhaPrefillTile>(arrays, step.at.mha_tiles) + pass.first_tile},
              stream);
}

// delta = mlp(normed), dense or a mixture of experts.
void DeepSeekModel::feed_forward(const LayerWeights& weights, int64_t rows,
                                 const int32_t* num_valid_rows, cudaStream_t stream) {
  MoeArguments arguments = {.shape = dense_shape(config_),
                            .rows = static_cast<int32_t>(rows),
                            .x = normed_,
                            .expert_ids = dense_ids_,
                            .expert_weights = dense_weights_,
                            .gate_up = weights.dense.gate_up.values,
                            .down = weights.dense.down.values,
                            .out = delta_,
                            .out_type = DType::kBF16,
                            .workspace = mlp_,
                            .progress = progress_,
                            .batch_invariant = options_.batch_invariant};
  if (weights.gate != nullptr) {
    gate({.x = normed_,
          .weight = weights.gate,
          .weight_type = weights.gate_type,
          .bias = weights.gate_bias,
          .options = gate_options(config_),
          .num_valid_rows = num_valid_rows,
          .expert_ids = expert_ids_,
          .expert_weights = expert_weights_,
          .rows = rows,
          .hidden = config_.hidden,
          .experts = config_.num_experts},
         stream);
    arguments.shape = moe_shape(config_);
    arguments.expert_ids = expert_ids_;
    arguments.expert_weights = expert_weights_;
    arguments.gate_up = weights.experts.gate_up.values;
    arguments.down = weights.experts.down.values;
    arguments.shared_gate_up = weights.shared.gate_up.values;
    arguments.shared_down = weights.shared.down.values;
  }
  moe(arguments, stream);
}

// out [rows, n] = x [rows, k] W^T
template <typename T>
void DeepSeekModel::product(const bf16* x, int64_t x_stride, const void* weight, MatrixSize size,
                            T* out, int64_t out_stride, int64_t rows, cudaStream_t stream) {
  linear({.x = x,
          .x_row_stride = x_stride,
          .weight = weight,
          .out = out,
          .out_row_stride = out_stride,
          .out_type = kDTypeOf<T>,
          .rows = static_cast<int32_t>(rows),
          .n = static_cast<int32_t>(size.n),
          .k = static_cast<int32_t>(size.k),
          .batch_invariant = options_.batch_invariant},
         stream);
}

}  // namespace fathom::cuda
