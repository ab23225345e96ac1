// Attention of one layer; part of DeepSeekModel (deepseek_cuda.h).
#include "base/check.h"
#include "model/deepseek_cuda.h"
#include "model/layer_options.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"
#include "ops/attention/prefill_cuda/cached_prefix_cuda.h"
#include "ops/attention/prefill_cuda/mha_prefill_cuda.h"
#include "ops/linear/linear_cuda.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/rope/query_key_cuda.h"
#include "ops/scaled_linear/scaled_absorb_cuda.h"

namespace fathom::cuda {

// delta = W_o · attention(x)
void DeepSeekModel::attention(const LayerWeights& weights, const Activation& x,
                              const StepLayout& step, const std::byte* arrays, const Pages& pages,
                              GpuStream stream) {
  const int64_t hidden = config_.hidden, columns = q_kv_a_columns();
  product(x, weights.q_kv_a, {columns, hidden}, {q_kv_a_, columns}, step.rows, stream);
  const Activation latent = query_latent(weights, step.rows, stream);
  const Query query = project_query(weights, latent, step.rows, stream);
  if (is_sparse()) {
    write_index_key_rows(weights.indexer, q_kv_a_ + config_.q_lora_rank, columns, step, arrays,
                         step.at.slots, pages, stream);
    for (const IndexPass& pass : step.index_passes) {
      choose_keys(weights.indexer, x, latent, pass, step, arrays, pages, stream);
    }
  }
  query_key({.q = query.data,
             .q_stride = query.stride,
             .q_rope = q_rope_,
             .kv_a = q_kv_a_ + columns - config_.latent_dim(),
             .kv_a_stride = columns,
             .norm_weight = weights.kv_a_norm,
             .eps = kInnerNormEps,
             .cos_sin = cos_sin_,
             .positions = array_at<int32_t>(arrays, step.at.positions),
             .slots = array_at<int64_t>(arrays, step.at.slots),
             .pages = pages.data,
             .format = pages.format,
             .rows = step.rows,
             .heads = static_cast<int32_t>(heads_),
             .nope = static_cast<int32_t>(config_.qk_nope_dim)},
            stream);
  const Activation out = heads_out(weights, step);
  if (step.absorbed_rows > 0) {
    absorbed_attention(weights, step, arrays, query, pages, out, stream);
  }
  for (size_t pass = 0; pass < step.passes.size(); ++pass) {
    mha_attention(weights, step, pass, arrays, query, pages, out, stream);
  }
  product(out, weights.o, {hidden, heads_ * config_.v_dim}, {delta_, hidden}, step.rows, stream);
}

// Destination of attention's rows: e4m3 where all of their producers and the output projection
// support it. A separate buffer, because a later pass quantizes its keys before all rows are there.
DeepSeekModel::Activation DeepSeekModel::heads_out(const LayerWeights& weights,
                                                   const StepLayout& step) const {
  const int64_t columns = heads_ * config_.v_dim;
  if (!is_e4m3(weights.o) || (step.absorbed_rows > 0 && !is_e4m3(weights.uv))) {
    return {heads_out_, columns};
  }
  Activation out;
  out.quantized = quantized(step.rows, columns, weights.o.input_scale);
  out.quantized.values = heads_out_;
  out.quantized.scales = reinterpret_cast<float*>(heads_out_ + step.rows * columns / 2);
  return out;
}

// With query compression the norm of its latent, as its second GEMM reads it, and an indexer's. An
// indexer whose GEMM reads another form of e4m3 quantizes bf16 by itself.
DeepSeekModel::Activation DeepSeekModel::query_latent(const LayerWeights& weights, int64_t rows,
                                                      GpuStream stream) {
  const int64_t columns = q_kv_a_columns(), lora = config_.q_lora_rank;
  if (lora == 0) return {};
  const WeightMatrix& index_q = is_sparse() ? weights.indexer.q : weights.q_b;
  const bool is_alike =
      index_q.type == weights.q_b.type && index_q.input_scale == weights.q_b.input_scale;
  Activation normed;
  if (is_e4m3(weights.q_b)) {
    normed.quantized = quantized(rows, lora, weights.q_b.input_scale);
  }
  if (!is_e4m3(weights.q_b) || !is_alike) {
    normed.data = q_a_normed_;
    normed.stride = lora;
  }
  rms_norm({.x = q_kv_a_,
            .x_stride = columns,
            .weight = weights.q_a_norm,
            .eps = kInnerNormEps,
            .out = normed.data,
            .out_stride = normed.stride,
            .quantized = normed.quantized,
            .rows = rows,
            .n = lora},
           stream);
  return normed;
}

// Without query compression the query is already computed.
DeepSeekModel::Query DeepSeekModel::project_query(const LayerWeights& weights,
                                                  const Activation& latent, int64_t rows,
                                                  GpuStream stream) {
  const int64_t lora = config_.q_lora_rank;
  if (lora == 0) return {q_kv_a_, q_kv_a_columns()};
  product(latent, weights.q_b, {q_rows(), lora}, {q_, q_rows()}, rows, stream);
  return {q_, q_rows()};
}

// W_UK folded into the query, attention over the latent rows, W_UV after.
void DeepSeekModel::absorbed_attention(const LayerWeights& weights, const StepLayout& step,
                                       const std::byte* arrays, const Query& query,
                                       const Pages& pages, const Activation& out,
                                       GpuStream stream) {
  const int64_t heads = heads_, latent = config_.kv_lora_rank, v = config_.v_dim;
  // Padding comes last: a graph's rows are all absorbed.
  const auto rows = static_cast<int32_t>(step.passes.empty() ? step.rows : step.absorbed_rows);
  head_product({query.data, query.stride}, config_.qk_dim(), weights.uk,
               {latent, config_.qk_nope_dim}, {q_latent_, heads * latent}, rows, stream);
  if (step.decodes.empty()) {
    sparse_attention(step, arrays, pages, rows, stream);
  } else {
    latent_attention(step, arrays, pages, rows, stream);
  }
  head_product({o_latent_, heads * latent}, latent, weights.uv, {v, latent}, out, rows, stream);
}

void DeepSeekModel::latent_attention(const StepLayout& step, const std::byte* arrays,
                                     const Pages& pages, int64_t rows, GpuStream stream) {
  for (const DecodeLaunch& decode : step.decodes) {
    latent_decode(decode.tile_rows, plan_.budget.sms,
                  {.rows = static_cast<int32_t>(rows),
                   .q_latent = q_latent_,
                   .q_rope = q_rope_,
                   .pages = pages.data,
                   .num_pages = pages.count,
                   .block_tables = array_at<int32_t>(arrays, step.at.block_tables),
                   .out = o_latent_,
                   .heads = static_cast<int32_t>(heads_),
                   .softmax_scale = static_cast<float>(config_.softmax_scale()),
                   .parts = array_at<LatentDecodePart>(arrays, decode.parts),
                   .first_part = array_at<int32_t>(arrays, decode.first_part),
                   .scratch = decode_scratch_,
                   .format = pages.format},
                  stream);
  }
}

// out[m, h] = x[m, h] W[h]^T for each head h; x's heads are `x_head_stride` apart.
void DeepSeekModel::head_product(const Activation& x, int64_t x_head_stride,
                                 const WeightMatrix& weight, MatrixSize size, const Activation& out,
                                 int64_t rows, GpuStream stream) {
  if (is_e4m3(weight)) {
    scaled_absorb({.x = x.data,
                   .x_row_stride = x.stride,
                   .x_head_stride = x_head_stride,
                   .weight = weight.values,
                   .weight_scales = weight.scales,
                   .out = out.data,
                   .out_row_stride = out.stride,
                   .out_head_stride = size.n,
                   .quantized = out.quantized,
                   .rows = static_cast<int32_t>(rows),
                   .heads = static_cast<int32_t>(heads_),
                   .n = static_cast<int32_t>(size.n),
                   .k = static_cast<int32_t>(size.k)},
                  stream);
  } else {
    linear({.x = x.data,
            .x_row_stride = x.stride,
            .x_batch_stride = x_head_stride,
            .weight = weight.values,
            .out = out.data,
            .out_row_stride = out.stride,
            .out_batch_stride = size.n,
            .rows = static_cast<int32_t>(rows),
            .n = static_cast<int32_t>(size.n),
            .k = static_cast<int32_t>(size.k),
            .batches = static_cast<int32_t>(heads_),
            .batch_invariant = options_.batch_invariant},
           stream);
  }
}

// Expands keys and values of a pass's sequences from the latent. Results of earlier passes for the
// same rows lie in the query buffer of absorbed attention, which is done.
void DeepSeekModel::mha_attention(const LayerWeights& weights, const StepLayout& step, size_t index,
                                  const std::byte* arrays, const Query& query, const Pages& pages,
                                  const Activation& out, GpuStream stream) {
  const MhaPass& pass = step.passes[index];
  const int64_t latent = config_.kv_lora_rank;
  const int64_t columns = heads_ * (config_.qk_nope_dim + config_.v_dim);
  FATHOM_CHECK(pass.num_keys <= options_.most_keys, "{} keys, at most {}", pass.num_keys,
               options_.most_keys);
  Activation keys;
  if (is_e4m3(weights.kv_b)) {
    keys.quantized = quantized(pass.num_keys, latent, weights.kv_b.input_scale);
  } else {
    keys.data = key_latent_;
    keys.stride = latent;
  }
  gather_latent({.pages = pages.data,
                 .format = pages.format,
                 .block_tables = array_at<int32_t>(arrays, step.at.block_tables),
                 .max_pages = step.max_pages,
                 .sequences = array_at<int32_t>(arrays, step.at.gathered) + pass.first_part,
                 .first_keys = array_at<int32_t>(arrays, step.at.first_keys) + pass.first_part,
                 // Each pass has one start more than it has runs of keys.
                 .key_starts = array_at<int32_t>(arrays, step.at.key_starts) + pass.first_part +
                               static_cast<int64_t>(index),
                 .num_sequences = pass.num_parts,
                 .keys = pass.num_keys,
                 .latent = keys.data,
                 .k_rope = key_rope_,
                 .quantized = keys.quantized},
                stream);
  product(keys, weights.kv_b, {columns, latent}, {kv_, columns}, pass.num_keys, stream);
  mha_prefill(plan_.budget.sms,
              {.q = query.data,
               .q_row_stride = query.stride,
               .rows = step.rows,
               .kv = kv_,
               .k_rope = key_rope_,
               .keys = pass.num_keys,
               .out = out.data,
               .quantized = out.quantized,
               .partial = reinterpret_cast<float*>(q_latent_),
               .lse = partial_lse_,
               .heads = static_cast<int32_t>(heads_),
               .softmax_scale = static_cast<float>(config_.softmax_scale()),
               .first_tile = array_at<int32_t>(arrays, step.at.mha_first_tile) +
                             static_cast<int64_t>(index) * plan_.budget.sms,
               .tiles = array_at<MhaPrefillTile>(arrays, step.at.mha_tiles) + pass.first_tile},
              stream);
}

}  // namespace fathom::cuda
