// What a configuration means for single operations.
#pragma once

#include <optional>

#include "checkpoint/model_config.h"
#include "ops/gate/gate.h"
#include "ops/rope/rope.h"

namespace fathom {

// The norms inside attention have this eps whatever rms_norm_eps says, as in DeepSeek's own code
// and in transformers; the two differ in no published DeepSeek checkpoint.
inline constexpr float kInnerNormEps = 1e-6f;

std::optional<YarnParameters> yarn_parameters(const ModelConfig& config);
GateOptions gate_options(const ModelConfig& config);

}  // namespace fathom
