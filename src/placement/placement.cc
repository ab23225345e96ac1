#include "placement/placement.h"

#include "base/math.h"
#include "placement/split.h"

namespace fathom {
namespace {

Result<> check_heads(const Placement& placement, const ModelConfig& config) {
  const int64_t unit = head_unit(config);
  const int64_t most = ceil_div(config.num_heads, unit);
  if (placement.tp <= most) return {};
  if (unit == 1) {
    return invalid("tp is {}, the model has {} heads (num_attention_heads): at most {}",
                   placement.tp, config.num_heads, most);
  }
  return invalid(
      "tp is {}, the model has {} heads (num_attention_heads), {} at a time to fill whole FP8 "
      "blocks of {} columns (quantization_config.weight_block_size): at most {}",
      placement.tp, config.num_heads, unit, config.quantization.block_cols, most);
}

Result<> check_experts(const Placement& placement, const ModelConfig& config) {
  const int world = placement.world();
  const int64_t redundant = placement.redundant_experts;
  if (!placement.expert_parallel) {
    if (redundant == 0) return {};
    return invalid("num-redundant-experts is {}, without enable-expert-parallel only 0 is allowed",
                   redundant);
  }
  if (config.num_experts == 0) {
    return invalid("enable-expert-parallel is on, the model has no experts (n_routed_experts)");
  }
  const int64_t most = config.num_experts * (world - 1);  // one copy of each expert on each rank
  if (redundant < 0 || redundant > most) {
    return invalid(
        "num-redundant-experts is {}, allowed are 0 to {} ({} experts of n_routed_experts on {} "
        "ranks)",
        redundant, most, config.num_experts, world);
  }
  if (config.num_experts + redundant < world) {
    return invalid(
        "enable-expert-parallel spreads {} experts (n_routed_experts) and {} redundant ones over "
        "tp * "
        "dp = {} ranks; num-redundant-experts must be at least {}",
        config.num_experts, redundant, world, world - config.num_experts);
  }
  return {};
}

}  // namespace

Result<> check_placement(const Placement& placement, const ModelConfig& config) {
  if (placement.tp < 1 || placement.tp > kMaxRanks) {
    return invalid("tp is {}, allowed are 1 to {}", placement.tp, kMaxRanks);
  }
  if (placement.dp < 1 || placement.dp > kMaxRanks) {
    return invalid("dp is {}, allowed are 1 to {}", placement.dp, kMaxRanks);
  }
  if (placement.world() > kMaxRanks) {
    return invalid("tp * dp is {} * {} = {} ranks, at most {} are allowed", placement.tp,
                   placement.dp, placement.world(), kMaxRanks);
  }
  FATHOM_RETURN_IF_ERROR(check_heads(placement, config));
  if (placement.tp > config.vocab_size) {
    return invalid("tp is {}, the model has {} tokens (vocab_size): at most as many", placement.tp,
                   config.vocab_size);
  }
  return check_experts(placement, config);
}

int64_t num_moe_layers(const ModelConfig& config, bool with_mtp) {
  const int64_t layers = config.num_layers + (with_mtp ? config.num_mtp_layers : 0);
  int64_t count = 0;
  for (int64_t layer = 0; layer < layers; ++layer) count += config.is_moe_layer(layer) ? 1 : 0;
  return count;
}

}  // namespace fathom
