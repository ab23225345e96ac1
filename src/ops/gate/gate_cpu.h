// The CPU form of gate.
#pragma once

#include "device/cpu/thread_pool.h"
#include "ops/gate/gate.h"

namespace fathom::cpu {

void gate(ThreadPool& pool, ConstTensorView logits, ConstTensorView bias,
          const GateOptions& options, TensorView expert_ids, TensorView expert_weights);

}  // namespace fathom::cpu
