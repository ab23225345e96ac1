// How the mixture of experts of few tokens is cut over the multiprocessors of a GPU. Host code, a
// function of the shape and the number of tokens alone: which experts they have is known only on
// the device.
#pragma once

#include <cstdint>

#include "ops/linear/few_rows_plan.h"

namespace fathom::cuda {

struct MoeFewRowsShape {
  int64_t rows = 0, hidden = 0, num_experts = 0, experts_per_token = 0, inter = 0, shared_inter = 0;
};

// Gate and up: `gate_blocks` blocks share the intermediate columns of all experts that have tokens.
// Down: each of `down_clusters` clusters has an even share of the hidden columns, its
// `down_splits` blocks share the experts.
struct MoeFewRowsPlan {
  int gate_warpgroups = 1, gate_blocks = 132, gate_ring_bytes = 0;
  int down_warpgroups = 1, down_splits = 1, down_clusters = 132, down_ring_bytes = 0;
};

// Bytes of a row of down's sums in shared memory, with what keeps rows out of each other's banks.
constexpr int64_t down_sum_bytes(int warpgroups) { return (64 * warpgroups + 8) * 4; }

MoeFewRowsPlan plan_moe_few_rows(const MoeFewRowsShape& shape, const ClusterCounts& counts);

}  // namespace fathom::cuda
