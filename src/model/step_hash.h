// Hashes of what ranks must decide alike for a step, so that they can be compared.
#pragma once

#include <cstdint>

#include "model/attention_plan.h"
#include "model/forward_batch.h"
#include "tensor/tensor_view.h"

namespace fathom {

// All arrays of a batch. `seed` is the hash so far.
uint64_t hash_batch(const ForwardBatch& batch, uint64_t seed);
// Which rows of a step go which way through attention.
uint64_t hash_attention(const AttentionPlan& plan, uint64_t seed);
// Which keys a layer's rows have chosen, [rows, k] i32.
uint64_t hash_key_lists(ConstTensorView lists, uint64_t seed);

}  // namespace fathom
