#include "convert/mla_shape.h"

#include <algorithm>

namespace fathom::mla {
namespace {

// What DeepSeek's models have, and kernels are made for.
constexpr int64_t kUsualRopeDim = 64, kUsualRank = 512;

// Whether a rotated part of this width is whole heads, or an even part of one.
bool is_possible_rope(int64_t rope, const GroupedQueryConfig& gqa) {
  const int64_t d = gqa.head_dim;
  if (rope >= d) return rope % d == 0 && rope / d <= gqa.kv_heads;
  return rope >= 2 && rope % 2 == 0 && d % rope == 0;
}

}  // namespace

Result<MlaShape> plan_mla_shape(const ModelConfig& config, const MlaRequest& request) {
  if (!config.gqa) {
    return invalid(
        "config.json: kv_lora_rank is {}: the model has multi-head latent attention already; there "
        "is nothing to convert",
        config.kv_lora_rank);
  }
  if (config.quantization.kind != QuantizationConfig::Kind::kNone) {
    return invalid(
        "config.json: quantization_config is there: weights are converted from bf16, f16 or f32; "
        "quantize the converted model (`fathom quantize`)");
  }
  if (config.has_o_bias) {
    return invalid(
        "config.json: attention_bias is true in model_type {:?}, which has a bias on o_proj, too; "
        "a model of latent attention has none there",
        config.model_type);
  }
  const GroupedQueryConfig& gqa = *config.gqa;
  MlaShape shape{.heads = config.num_heads, .kv_heads = gqa.kv_heads, .head_dim = gqa.head_dim};
  shape.rope_dim = request.rope_dim.value_or(is_possible_rope(kUsualRopeDim, gqa) ? kUsualRopeDim
                                                                                  : gqa.head_dim);
  if (!is_possible_rope(shape.rope_dim, gqa)) {
    return invalid(
        "--rope-dim is {}: it is an even divisor of head_dim, {}, or a multiple of it up to {} "
        "(num_key_value_heads is {})",
        shape.rope_dim, gqa.head_dim, shape.key_dim(), gqa.kv_heads);
  }
  shape.fold = request.fold.value_or(shape.collapse());
  const int64_t frequencies = shape.num_frequencies();
  if (shape.fold < 1 || frequencies % shape.fold != 0 || shape.fold % shape.collapse() != 0) {
    return invalid(
        "--freqfold is {}: it divides the {} frequencies of a head and is a multiple of {}, as one "
        "frequency in {} is kept (--rope-dim {})",
        shape.fold, frequencies, shape.collapse(), shape.collapse(), shape.rope_dim);
  }
  shape.rank = request.rank.value_or(std::min(kUsualRank, shape.most_rank()));
  if (shape.rank < 1 || shape.rank > shape.most_rank()) {
    return invalid(
        "--rank is {}: from 1 to {}, the values and unrotated keys of {} KV heads of {} "
        "(--rope-dim "
        "{})",
        shape.rank, shape.most_rank(), gqa.kv_heads, gqa.head_dim, shape.rope_dim);
  }
  return shape;
}

}  // namespace fathom::mla
