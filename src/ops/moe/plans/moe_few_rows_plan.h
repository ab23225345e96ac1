// Plan of few-token MoE: how it is divided among the SMs of a GPU. Host code, a function of the
// shape and the number of tokens alone: the tokens' experts are known only on the device.
#pragma once

#include <cstdint>

#include "ops/linear/few_rows_plan.h"

namespace fathom::cuda {

inline constexpr int kMostMoeExperts = 512;

struct MoeFewRowsShape {
  int64_t rows = 0, hidden = 0, num_experts = 0, experts_per_token = 0, inter = 0, shared_inter = 0;
  bool scaled = false;  // e4m3 with scales for blocks of 128 columns
};

// In the first phase all CTAs share the intermediate columns of all experts that have tokens
// evenly. In the second, each of `clusters` clusters has an even share of the hidden columns, and
// its `splits` CTAs share the experts' intermediate columns. CTAs beyond those clusters are idle
// then.
struct MoeFewRowsPlan {
  int blocks = 132;    // the same for every shape: they count one another
  int warpgroups = 1;  // 1 or 2, each with 64 weight rows at a time
  int splits = 1, clusters = 132;
  int ring_bytes = 0;

  int hidden_groups(int64_t hidden) const;  // groups of 8 columns a cluster has
  // Whether a cluster's share of the hidden columns fits a wgmma, and two stages fit the ring.
  bool takes(const MoeFewRowsShape& shape) const;
};

inline constexpr int kMoeSharedBytes = 227 * 1024;  // of a CTA

// Bytes of a row of a CTA's sums in shared memory, with padding against bank conflicts.
constexpr int moe_sum_bytes(int warpgroups) { return (64 * warpgroups + 8) * 4; }
// Bytes of all rows' sums for e4m3. With one warpgroup's weight rows two warpgroups have sums of
// their own, and an exchange buffer for a tile of up to 64 rows.
constexpr int64_t scaled_moe_sum_bytes(int64_t rows, int warpgroups) {
  if (warpgroups == 2) return rows * moe_sum_bytes(2);
  const int64_t columns = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  return rows * 2 * moe_sum_bytes(1) + columns * 256;
}
// Bytes of the lists that a CTA makes for `pairs` pairs of a token and an expert, and of its
// mbarriers.
constexpr int moe_table_bytes(int64_t pairs) { return 6 * 1024 + static_cast<int>(pairs) * 4; }
// The same with scales beside the stages.
constexpr int scaled_moe_table_bytes(int64_t pairs) { return moe_table_bytes(pairs) + 9 * 1024; }
// Bytes of a stage of 128 columns, for e4m3 of 256.
constexpr int moe_stage_bytes(int64_t rows, int warpgroups) {
  return ((rows < 64 ? static_cast<int>(rows + 7) / 8 : 8) + 8 * warpgroups) * 2048;
}

MoeFewRowsPlan plan_moe_few_rows(const MoeFewRowsShape& shape, const ClusterCounts& counts);

}  // namespace fathom::cuda
