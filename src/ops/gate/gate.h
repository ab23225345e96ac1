// Expert choice from router logits, in fp32: softmax (greedy, group-limited) as in DeepSeek-V2 and
// sigmoid with a bias for the choice as in DeepSeek-V3. Ties go to the lower index.
#pragma once

#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

enum class GateScoring { kSoftmaxGreedy, kSoftmaxGroupLimited, kSigmoidBias };

struct GateOptions {
  GateScoring scoring = GateScoring::kSigmoidBias;
  int64_t num_groups = 1;
  int64_t groups_per_token = 1;
  int64_t experts_per_token = 1;
  bool normalize = false;  // weights divided by their sum (+ 1e-20)
  float scaling = 1;  // routed_scaling_factor; for the softmax kinds not applied when normalised
};

// logits [rows, experts] f32, bias [experts] f32 (empty unless kSigmoidBias) ->
// expert_ids [rows, k] i32, expert_weights [rows, k] f32, in descending order of the choosing
// score.
void gate(const Stream& stream, ConstTensorView logits, ConstTensorView bias,
          const GateOptions& options, TensorView expert_ids, TensorView expert_weights);

}  // namespace fathom
