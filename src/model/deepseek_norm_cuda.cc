// The norms between a layer's blocks, where ranks meet; part of DeepSeekModel (deepseek_cuda.h).
#include <algorithm>

#include "base/math.h"
#include "model/deepseek_cuda.h"
#include "ops/peer_sum/peer_rows_cuda.h"
#include "ops/peer_sum/peer_sum_cuda.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"

namespace fathom::cuda {

const float* DeepSeekModel::norm_weight(Norm norm) const {
  if (norm.kind == NormKind::kFinal) return weights_.final_norm;
  if (norm.kind == NormKind::kMtpFinal) return weights_.mtp.head_norm;
  const LayerWeights& layer = weights_.layers[norm.layer];
  return norm.kind == NormKind::kInput ? layer.input_norm : layer.post_attention_norm;
}

DeepSeekModel::Forms DeepSeekModel::norm_forms(Norm norm) const {
  if (norm.kind == NormKind::kFinal || norm.kind == NormKind::kMtpFinal) return {.bf16 = true};
  const LayerWeights& layer = weights_.layers[norm.layer];
  if (norm.kind != NormKind::kInput) return feed_forward_forms(layer);
  Forms forms = forms_of(layer.q_kv_a);
  forms.bf16 |= is_sparse();  // an indexer's weights_proj is bf16
  return forms;
}

// residual += delta, which in a lane is this rank's part of a sum; returns norm(residual). Without
// `adds` only the norm.
DeepSeekModel::Activation DeepSeekModel::add_and_norm(ResidualField residual, bool adds, Norm norm,
                                                      int64_t rows, GpuStream stream) {
  const Activation out = normed(norm_forms(norm), rows);
  const AddRmsNormArguments own = {.residual = this->*residual,
                                   .delta = adds ? delta_ : nullptr,
                                   .delta_stride = config_.hidden,
                                   .weight = norm_weight(norm),
                                   .eps = static_cast<float>(config_.rms_norm_eps),
                                   .out = out.data,
                                   .quantized = out.quantized,
                                   .rows = rows,
                                   .n = config_.hidden};
  if (adds && !lane_.empty()) {
    sum_and_norm(own, residual, norm, rows, stream);
  } else {
    add_rms_norm(own, stream);
  }
  return out;
}

// The same for the rows that need logits, written to logit_residual_.
DeepSeekModel::Activation DeepSeekModel::narrow_and_norm(const StepLayout& step,
                                                         const std::byte* arrays, Norm norm,
                                                         GpuStream stream) {
  const Activation out = normed(norm_forms(norm), step.logit_rows);
  const AddRmsNormArguments own = {.residual = residual_,
                                   .delta = delta_,
                                   .delta_stride = config_.hidden,
                                   .row_ids = array_at<int32_t>(arrays, step.at.logit_rows),
                                   .gathered = logit_residual_,
                                   .weight = norm_weight(norm),
                                   .eps = static_cast<float>(config_.rms_norm_eps),
                                   .out = out.data,
                                   .quantized = out.quantized,
                                   .rows = step.logit_rows,
                                   .n = config_.hidden};
  if (lane_.empty()) {
    add_rms_norm(own, stream);
  } else {
    sum_and_norm(own, &DeepSeekModel::residual_, norm, step.rows, stream);
  }
  return out;
}

// add_rms_norm() of the sum over the lane's ranks. `own`: with this rank's part. `divided_rows`:
// the rows of the residual, which decide how its sums are made.
void DeepSeekModel::sum_and_norm(const AddRmsNormArguments& own, ResidualField residual, Norm norm,
                                 int64_t divided_rows, GpuStream stream) {
  if (divided_rows <= kMostPeerRows) {
    peer_sum({.norm = own, .peers = peers_, .sms = peer_sms()}, stream);
    return;
  }
  PeerRowsArguments rows = {.weight = own.weight,
                            .eps = own.eps,
                            .rows = own.rows,
                            .n = own.n,
                            .row_ids = own.row_ids,
                            .gathered = own.gathered,
                            .divided_rows = divided_rows,
                            .peers = peers_,
                            .sms = peer_sms()};
  for (size_t rank = 0; rank < lane_.size(); ++rank) {
    const DeepSeekModel& peer = *lane_[rank];
    const Activation out = peer.normed(peer.norm_forms(norm), own.rows);
    rows.ranks[rank] = {peer.*residual, peer.delta_, out.data, out.quantized};
  }
  peer_sum_rows(rows, stream);
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
