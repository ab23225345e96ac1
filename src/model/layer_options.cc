#include "model/layer_options.h"

namespace fathom {

std::optional<YarnParameters> yarn_parameters(const ModelConfig& config) {
  if (!config.yarn) return std::nullopt;
  return YarnParameters{config.yarn->factor,    config.yarn->beta_fast,
                        config.yarn->beta_slow, config.yarn->original_max_position,
                        config.yarn->mscale,    config.yarn->mscale_all_dim};
}

GateOptions gate_options(const ModelConfig& config) {
  GateOptions options;
  switch (config.gate) {
    case GateKind::kSoftmaxGreedy:
      options.scoring = GateScoring::kSoftmaxGreedy;
      break;
    case GateKind::kSoftmaxGroupLimited:
      options.scoring = GateScoring::kSoftmaxGroupLimited;
      break;
    case GateKind::kSigmoidBias:
      options.scoring = GateScoring::kSigmoidBias;
      break;
  }
  options.num_groups = config.num_groups;
  options.groups_per_token = config.groups_per_token;
  options.experts_per_token = config.experts_per_token;
  options.normalize = config.normalize_weights;
  options.scaling = static_cast<float>(config.routed_scaling);
  return options;
}

}  // namespace fathom
