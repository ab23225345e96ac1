// The draw: the kept token with the largest logit / temperature + noise (gumbel_noise.h), the
// lowest id among equals. A function of each token's own logit and key, not of what else is kept.
#pragma once

#include <cstdint>
#include <span>

#include "device/cpu/isa.h"
#include "ops/sampling/gumbel_noise.h"
#include "ops/sampling/truncation.h"

namespace fathom {

// `maxima`: the row's block maxima. `largest`: an id with the largest logit, which is finite; the
// cutoff keeps it. Every level draws the same token.
int32_t race(std::span<const float> logits, std::span<const float> maxima, int32_t largest,
             const Cutoff& cutoff, float inverse_temperature, const NoiseKey& key,
             CpuIsa isa = cpu_isa());

}  // namespace fathom
