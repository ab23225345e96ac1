#include "model/kernel_plan.h"

#include <algorithm>

#include "base/named_size.h"
#include "model/gpu_support.h"
#include "model/layer_options.h"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"
#include "ops/moe/moe_support.h"
#include "ops/peer_sum/peer_sum_support.h"
#include "placement/split.h"

namespace fathom::cuda {
namespace {

FeedForwardWidths widths_of(const ModelSpec& spec) {
  FeedForwardWidths widths;
  const auto add = [&](const LayerSpec& layer) {
    if (layer.dense) widths.dense = layer.dense->width();
    if (!layer.moe) return;
    widths.routed = layer.moe->experts.front().width();
    if (layer.moe->shared) widths.shared = layer.moe->shared->width();
  };
  for (const LayerSpec& layer : spec.layers) add(layer);
  for (const MtpSpec& mtp : spec.mtp) add(mtp.layer);
  return widths;
}

// The last layers' shape; their weights' type is that of the last one's experts.
DecodeLayersShape decode_layers_shape(const ModelSpec& spec, const KernelPlan& plan) {
  const ModelConfig& config = spec.config;
  return {.hidden = config.hidden,
          .heads = spec.num_heads(),
          .q_lora = config.q_lora_rank,
          .latent = config.kv_lora_rank,
          .nope = config.qk_nope_dim,
          .rope = config.qk_rope_dim,
          .v = config.v_dim,
          .num_experts = config.num_experts,
          .inter = plan.widths.routed,
          .shared_inter = plan.widths.shared,
          .gate = gate_options(config),
          .has_bf16_weights = plan.layers[spec.layers.size() - 1].mlps == DType::kBF16};
}

// Whether decode_layers() reads weights of these forms.
bool decode_layers_reads(DecodeLayersKind kind, const LayerSpec& layer, const LayerForms& forms) {
  const bool is_bf16 = kind == DecodeLayersKind::kV2LiteBf16,
             has_q_b = kind == DecodeLayersKind::kV3Tp8;
  const DType type = is_bf16 ? DType::kBF16 : DType::kF8E4M3;
  const auto is_read = [&](const WeightForm& form) { return form.type == type && !form.by_row; };
  return layer.moe && !forms.four_bit_experts && forms.router == DType::kBF16 &&
         forms.mlps == type && is_read(forms.q_kv_a) && (!has_q_b || is_read(forms.q_b)) &&
         is_read(forms.kv_b_halves) && is_read(forms.o);
}

// Each expert in one place, and experts on every rank.
Result<> experts_supported(const ModelSpec& spec) {
  const Placement& placement = spec.placement;
  if (placement.world() > kMostPeers) {
    return invalid("--enable-expert-parallel over {} GPUs (--tp {} x --dp {}): at most {}",
                   placement.world(), placement.tp, placement.dp, kMostPeers);
  }
  if (placement.redundant_experts > 0) {
    return invalid("--num-redundant-experts is {}: on GPUs each expert has one copy so far",
                   placement.redundant_experts);
  }
  const ExpertTable& table = *spec.expert_table;
  for (int64_t layer = 0; layer < table.num_layers(); ++layer) {
    for (int rank = 0; rank < table.num_ranks(); ++rank) {
      if (!table.experts_of(layer, rank).empty()) continue;
      return invalid(
          "--init-expert-location: rank {} has none of the experts of layer {} of those with "
          "experts; on GPUs each rank needs one at least",
          rank, layer);
    }
    for (int64_t expert = 0; expert < table.num_experts(); ++expert) {
      const auto copies = std::ssize(table.copies_of(layer, expert));
      if (copies == 1) continue;
      return invalid(
          "--init-expert-location: expert {} of layer {} of those with experts has {} copies; on "
          "GPUs each has one so far",
          expert, layer, copies);
    }
  }
  return {};
}

Result<> placement_supported(const ModelSpec& spec) {
  const Placement& placement = spec.placement;
  if (placement.exchanges_tokens()) FATHOM_RETURN_IF_ERROR(experts_supported(spec));
  if (placement.tp == 1) return {};
  FATHOM_RETURN_IF_ERROR(
      peer_sum_supports({"--tp", placement.tp}, {"hidden_size", spec.config.hidden}));
  if (spec.config.vocab_size < kVocabularyUnit * placement.tp) {
    return invalid("vocab_size is {}; --tp {} on GPUs takes {} at least", spec.config.vocab_size,
                   placement.tp, kVocabularyUnit * placement.tp);
  }
  const FeedForwardWidths widths = widths_of(spec);
  if (widths.routed == 0 && widths.shared > 0) {
    return invalid(
        "moe_intermediate_size is {}: with --tp {} rank {} has columns of the shared "
        "experts and none of the routed ones, which GPUs' kernels do not take",
        spec.config.moe_intermediate, placement.tp, spec.rank);
  }
  return {};
}

// What a layer's four-bit experts need of a rank.
Result<> four_bit_supported(const ModelSpec& spec, const std::vector<LayerForms>& layers) {
  const bool has_any = std::any_of(layers.begin(), layers.end(), [](const LayerForms& forms) {
    return forms.four_bit_experts.has_value();
  });
  if (!has_any) return {};
  if (spec.placement.exchanges_tokens()) {
    return invalid(
        "--enable-expert-parallel: experts of four bits are not exchanged between GPUs so far "
        "(config.json: quantization_config)");
  }
  if (const auto supported = four_bit_moe_supports(
          {"hidden_size", spec.config.hidden}, {"moe_intermediate_size", widths_of(spec).routed});
      !supported) {
    return tl::unexpected(with_context("config.json: ", supported.error()));
  }
  return {};
}

int64_t first_decode_layer(DecodeLayersKind kind, const ModelSpec& spec, const KernelPlan& plan) {
  auto first = std::ssize(spec.layers);
  if (kind == DecodeLayersKind::kNone) return first;
  const auto reads = [&](int64_t layer) {
    const auto at = static_cast<size_t>(layer);
    return decode_layers_reads(kind, spec.layers[at], plan.layers[at]);
  };
  while (first > 0 && reads(first - 1)) --first;
  return first;
}

}  // namespace

Result<KernelPlan> plan_kernels(const ModelSpec& spec, const WeightForms& forms,
                                const KernelOptions& options, const SmBudget& budget) {
  FATHOM_RETURN_IF_ERROR(placement_supported(spec));
  FATHOM_RETURN_IF_ERROR(gpu_supports(spec, options.cache_format));
  FATHOM_RETURN_IF_ERROR(
      require_at_most({"the number of the GPU's SMs", budget.sms}, kMostLatentDecodeBlocks));
  KernelPlan plan;
  plan.budget = budget;
  plan.layers = layer_forms(spec, forms);
  FATHOM_RETURN_IF_ERROR(four_bit_supported(spec, plan.layers));
  plan.widths = widths_of(spec);
  // The launch of several layers attends to all keys.
  const DecodeLayersKind kind =
      spec.config.indexer ? DecodeLayersKind::kNone
                          : decode_layers_kind(decode_layers_shape(spec, plan), plan.budget.sms);
  plan.first_decode_layer = first_decode_layer(kind, spec, plan);
  // V3's launch meets other ranks where a step owes a sum, V2-Lite's does not.
  const bool can_meet = spec.placement.tp == 1 || kind == DecodeLayersKind::kV3Tp8;
  if (!options.batch_invariant && can_meet && !spec.placement.exchanges_tokens() &&
      plan.first_decode_layer < std::ssize(spec.layers)) {
    plan.decode_layers = kind;
  }
  plan.takes_library = !options.batch_invariant && options.has_library;
  return plan;
}

}  // namespace fathom::cuda
