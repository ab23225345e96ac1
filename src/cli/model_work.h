// The least that a model's arithmetic must move and compute: what a measured speed is held against.
#pragma once

#include <cstdint>

#include "cache/latent_layout.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"

namespace fathom {

// Bytes that one decode step of `batch` sequences reads: every weight that is used, once, as it is
// stored, and the cache rows of `context` tokens of each sequence. Of the routed experts those that
// batch * experts_per_token independent uniform choices are expected to hit.
double decode_step_bytes(const Checkpoint& checkpoint, const LoadOptions& load,
                         CacheFormat cache_format, int64_t batch, double context);

// Floating-point operations (a multiply-add is two) of the prefill of one prompt in the multi-head
// form, with the logits of its last token only.
double prefill_flops(const ModelConfig& config, int64_t prompt_tokens);

}  // namespace fathom
