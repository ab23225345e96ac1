// Options of single operations derived from a model's configuration.
#pragma once

#include <optional>

#include "checkpoint/model_config.h"
#include "ops/gate/gate.h"
#include "ops/rope/rope.h"

namespace fathom {

// The norms inside attention use this eps whatever rms_norm_eps says, as in DeepSeek's own code and
// in transformers; the two are equal in all published DeepSeek checkpoints.
inline constexpr float kInnerNormEps = 1e-6f;

std::optional<YarnParameters> yarn_parameters(const ModelConfig& config);
GateOptions gate_options(const ModelConfig& config);

}  // namespace fathom
