// How the mixture of experts of few tokens is cut over the multiprocessors of a GPU. Host code, a
// function of the shape and the number of tokens alone: which experts they have is known only on
// the device.
#pragma once

#include <cstdint>

#include "ops/linear/few_rows_plan.h"

namespace fathom::cuda {

struct MoeFewRowsShape {
  int64_t rows = 0, hidden = 0, num_experts = 0, experts_per_token = 0, inter = 0, shared_inter = 0;
  bool scaled = false;  // e4m3, with scales by blocks of 128 columns
};

// All blocks share the intermediate columns of all experts that have tokens evenly. Then each of
// `clusters` clusters has an even share of the hidden columns, and its `splits` blocks share the
// experts' intermediate columns. Blocks beyond those clusters have nothing to do then.
struct MoeFewRowsPlan {
  int blocks = 132;    // the same for every shape: they count one another
  int warpgroups = 1;  // 64 rows of weights at a time are one's: 1 or 2
  int splits = 1, clusters = 132;
  int ring_bytes = 0;

  int hidden_groups(int64_t hidden) const;  // of a cluster, in 8 columns
};

inline constexpr int kMoeSharedBytes = 227 * 1024;  // of a block

// Bytes of a row of a block's sums in shared memory, with what keeps rows out of each other's
// banks.
constexpr int moe_sum_bytes(int warpgroups) { return (64 * warpgroups + 8) * 4; }
// The same of e4m3 for all rows; with one warpgroup's rows of weights two warpgroups have sums of
// their own, and exchange those of a tile of up to 64 rows.
constexpr int64_t scaled_moe_sum_bytes(int64_t rows, int warpgroups) {
  if (warpgroups == 2) return rows * moe_sum_bytes(2);
  const int columns = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  return rows * 2 * moe_sum_bytes(1) + columns * 256;
}
// Of the lists that a block makes for so many pairs of a token and an expert, and its barriers.
constexpr int moe_table_bytes(int64_t pairs) { return 6 * 1024 + static_cast<int>(pairs) * 4; }
// The same with scales beside the stages.
constexpr int scaled_moe_table_bytes(int64_t pairs) { return moe_table_bytes(pairs) + 9 * 1024; }
// Of a stage of 128 columns, of e4m3 of 256.
constexpr int moe_stage_bytes(int64_t rows, int warpgroups) {
  return ((rows < 64 ? static_cast<int>(rows + 7) / 8 : 8) + 8 * warpgroups) * 2048;
}

MoeFewRowsPlan plan_moe_few_rows(const MoeFewRowsShape& shape, const ClusterCounts& counts);

}  // namespace fathom::cuda
