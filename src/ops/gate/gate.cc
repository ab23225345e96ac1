#include "ops/gate/gate.h"

#include "ops/gate/gate_cpu.h"

namespace fathom {

void gate(const Stream& stream, ConstTensorView logits, ConstTensorView bias,
          const GateOptions& options, TensorView expert_ids, TensorView expert_weights) {
  const int64_t k = options.experts_per_token;
  FATHOM_CHECK(logits.rank() == 2 && expert_ids.rank() == 2 && expert_weights.rank() == 2 &&
                   expert_ids.size(0) == logits.size(0) && expert_ids.size(1) == k &&
                   expert_weights.size(0) == logits.size(0) && expert_weights.size(1) == k,
               "logits {}, ids {}, weights {}, {} experts a token", logits.shape_string(),
               expert_ids.shape_string(), expert_weights.shape_string(), k);
  const int64_t experts = logits.size(1);
  FATHOM_CHECK(k >= 1 && k <= experts, "{} of {} experts a token", k, experts);
  const bool grouped = options.scoring != GateScoring::kSoftmaxGreedy;
  const int64_t groups = grouped ? options.num_groups : 1;
  const int64_t kept = grouped ? options.groups_per_token : 1;
  FATHOM_CHECK(groups >= 1 && experts % groups == 0 && kept >= 1 && kept <= groups &&
                   kept * (experts / groups) >= k,
               "{} experts in {} groups, {} kept, {} experts a token", experts, groups, kept, k);
  if (options.scoring == GateScoring::kSigmoidBias) {
    FATHOM_CHECK(bias.rank() == 1 && bias.size(0) == experts, "bias {} for {} experts",
                 bias.shape_string(), experts);
    FATHOM_CHECK(groups == 1 || experts / groups >= 2, "{} experts in {} groups", experts, groups);
  }
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::gate(stream.pool(), logits, bias, options, expert_ids, expert_weights);
  }
}

}  // namespace fathom
