// Limits of sample() on a GPU (sample_cuda.h). Host code.
#pragma once

#include "base/named_size.h"
#include "ops/sampling/device_sample_row.h"

namespace fathom::cuda {

inline Result<> sample_supports(const NamedSize& vocab) {
  return require_at_most(vocab, kMostDeviceVocab);
}

}  // namespace fathom::cuda
