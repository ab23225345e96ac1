// Limits of gate() on a GPU (gate_cuda.h). Host code.
#pragma once

#include "base/named_size.h"
#include "ops/gate/gate_options.h"

namespace fathom::cuda {

struct GateSizes {
  NamedSize hidden, experts, experts_per_token;
  NamedSize groups;  // for scorings with groups; otherwise 1
};

inline Result<> gate_supports(const GateSizes& sizes) {
  FATHOM_RETURN_IF_ERROR(require_multiple(sizes.hidden, 32));
  FATHOM_RETURN_IF_ERROR(require_at_most(sizes.experts, kMostGateExperts));
  FATHOM_RETURN_IF_ERROR(require_at_most(sizes.experts_per_token, kMostChosenExperts));
  return require_at_most(sizes.groups, kMostGateGroups);
}

}  // namespace fathom::cuda
