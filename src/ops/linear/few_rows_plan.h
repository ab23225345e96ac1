// The tiling of a skinny GEMM over a GPU's SMs. Host code, a function of the shape alone.
//
// Each batch's rows of weights are divided among `clusters` clusters, evenly to 8 rows; each
// cluster of `splits` CTAs divides k. A CTA takes its rows in tiles of up to 64 * warpgroups rows,
// k in stages of 256 bytes: 128 columns of bf16, 256 of e4m3.
#pragma once

#include <cstdint>

#include "device/sm_budget.h"

namespace fathom::cuda {

struct FewRowsShape {
  int64_t rows = 0, n = 0, k = 0, batches = 1;
  bool scaled = false;  // e4m3 with block-wise scales, 128 of k each

  int64_t stage_columns() const { return scaled ? 256 : 128; }
};

struct FewRowsPlan {
  static constexpr int kMaxStages = 32;

  int columns = 8;         // wgmma's N, at least rows: 8, 16, 32 or 64
  int warpgroups = 1;      // consumer warpgroups: 1 or 2
  int splits = 1;          // split-K: CTAs of a cluster, 1, 2, 4 or 8
  int clusters = 1;        // per batch
  bool wide_ring = false;  // more shared memory, so that no other launch's CTA fits into the SM

  int tiles(int64_t n) const;           // per CTA
  int tile_groups(int64_t n) const;     // rows of the largest tile / 8
  int exchange_bytes(int64_t n) const;  // for the partial sums that a cluster's CTAs exchange
  int stage_bytes(const FewRowsShape& shape) const;
  int stages(const FewRowsShape& shape) const;  // of the ring buffer
  // The next launch begins when a CTA has issued so many stages; 0: at once.
  int next_begins_at(const FewRowsShape& shape) const;
  // Stages after the ring that are prefetched into L2 when earlier launches have ended.
  int fetched(const FewRowsShape& shape) const;
  // Bytes of a stage's token scales and of a tile's weight scales (e4m3).
  int token_scale_bytes(const FewRowsShape& shape) const;
  int tile_scale_bytes(const FewRowsShape& shape) const;
  // Bytes of shared memory after the ring: the exchange buffer, scales and mbarriers, and what the
  // last stage's wgmma may read beyond its end.
  int bytes_behind(const FewRowsShape& shape) const;
};

// The plan with so many warpgroups and splits, and such a ring.
FewRowsPlan plan_with(const FewRowsShape& shape, const ClusterCounts& counts, int warpgroups,
                      int splits, bool wide_ring);

// The plan of least cost; the second form allows no more splits than given.
FewRowsPlan plan_few_rows(const FewRowsShape& shape, const ClusterCounts& counts,
                          int most_splits = 8);

// Estimated time of a plan in us; plan_few_rows minimises it.
double few_rows_cost(const FewRowsShape& shape, const FewRowsPlan& plan,
                     const ClusterCounts& counts);

}  // namespace fathom::cuda
