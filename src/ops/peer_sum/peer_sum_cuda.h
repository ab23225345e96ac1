// The sum over ranks that follows W_o and each feed-forward block under tensor parallelism, fused
// with what follows it: residual += sum over ranks of delta; out = norm of the residual. One launch
// on each rank; deltas go to the others' inboxes, and no rank waits for the host.
//
// The sum adds ranks 0, 1, … in fp32, then the residual, without rounding in between: bits are
// equal on all ranks and in every run, and a row's do not depend on the number of rows.
#pragma once

#include "device/cuda/peer_group.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"

namespace fathom::cuda {

struct PeerSumArguments {
  // As add_rms_norm() takes them; delta is this rank's part, in bf16. weight null: only the
  // residual is written. row_ids are equal on all ranks.
  AddRmsNormArguments norm;
  PeerRank peers;
  // SMs that the launch may use. Ranks that share a device divide them: their launches wait for one
  // another, so the CTAs of all must be resident at once.
  int sms = DeviceContext::current().num_multiprocessors();
};

// All ranks of the group enqueue the same exchanges, of equal rows and n, in the same order.
// Results are undefined once the group is stopped (PeerGroup::late()).
void peer_sum(const PeerSumArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
