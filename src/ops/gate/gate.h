// Expert selection from router logits, in fp32: softmax (greedy, group-limited) as in DeepSeek-V2
// and sigmoid with a selection bias as in DeepSeek-V3. Ties go to the lower index.
#pragma once

#include "device/stream.h"
#include "ops/gate/gate_options.h"
#include "tensor/tensor_view.h"

namespace fathom {

// logits [rows, experts] f32, bias [experts] f32 (empty unless kSigmoidBias) -> expert_ids [rows,
// k] i32, expert_weights [rows, k] f32, in descending order of the selection score.
void gate(const Stream& stream, ConstTensorView logits, ConstTensorView bias,
          const GateOptions& options, TensorView expert_ids, TensorView expert_weights);

}  // namespace fathom
