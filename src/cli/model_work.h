// The minimal bytes and operations of a model's steps, as a roofline for measured speeds.
#pragma once

#include <cstdint>

#include "cache/latent_layout.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"

namespace fathom {

// The bytes that a decode step of `batch` sequences reads: each weight in use once, as stored, and
// the cache rows of `context` tokens per sequence. Routed experts count by the expected number that
// batch * experts_per_token independent uniform choices hit. With sparse attention, rows that see
// more keys than they may attend to read the index keys of all tokens and the latents of those
// chosen.
double decode_step_bytes(const Checkpoint& checkpoint, const LoadOptions& load,
                         CacheFormat cache_format, int64_t batch, double context);

// Floating-point operations (a multiply-add is two) of one prompt's prefill in the multi-head form,
// with the logits of its last token only. With sparse attention, rows that see more keys than they
// may attend to score all of them and attend to those chosen.
double prefill_flops(const ModelConfig& config, int64_t prompt_tokens);

}  // namespace fathom
