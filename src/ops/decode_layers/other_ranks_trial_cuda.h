// Stands in for the other ranks of a group that share one device with a rank that runs
// decode_layers(): two of its launches would not fit there. For the test and the benchmark.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/cuda/peer_group.h"

namespace fathom::cuda {

struct OtherRanksArguments {
  PeerRank peers;                   // as the rank that runs decode_layers() sees the group
  const uint16_t* parts = nullptr;  // [ranks, rows, exchanges, n] bf16: what each rank adds
  uint16_t* received = nullptr;     // the same: what each of them has received; null: not wanted
  int32_t exchanges = 0;
  int32_t rows = 1;
  int32_t n = 0;  // a multiple of kPacketValues
};

// Enqueues one launch of four CTAs, which make the next exchanges of the group's first `rows` rows;
// all have had as many. Results are those of a stopped exchange if the other launch does not come.
void enqueue_other_ranks(const OtherRanksArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
