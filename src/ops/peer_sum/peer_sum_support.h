// What the sums over ranks support (peer_sum_cuda.h, peer_rows_cuda.h). Host code, not for nvcc.
#pragma once

#include "base/named_size.h"
#include "device/most_peers.h"

namespace fathom::cuda {

// n: of a row; a multiple of 8, as its norm takes it (rms_norm_support.h).
inline Result<> peer_sum_supports(const NamedSize& ranks, const NamedSize& n) {
  FATHOM_RETURN_IF_ERROR(require_at_most(ranks, kMostPeers));
  return require_at_most(n, kMostPeerSumColumns);
}

}  // namespace fathom::cuda
