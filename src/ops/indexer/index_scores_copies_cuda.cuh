// The copying warp of index scores' CTA: it finds the units of work, tells the warpgroups of them,
// and copies queries and keys (TMA) as far ahead as there are stages.
#pragma once

#include <cstdint>

#include "device/cuda/ptx.cuh"
#include "device/cuda/tile_load.cuh"
#include "ops/indexer/index_scores_cuda.h"
#include "ops/indexer/index_scores_shared_cuda.cuh"

namespace fathom::cuda::index_scoring {

struct Maps {
  CUtensorMap keys, queries;
};

template <int kHeads>
class Copies {
 public:
  __device__ Copies(const IndexScoresArguments& arguments, const Maps& maps, Shared<kHeads>& shared)
      : arguments_(arguments), maps_(maps), shared_(shared) {}

  __device__ void run() {
    IndexUnits units(arguments_.lengths, arguments_.table_starts, arguments_.rows,
                     arguments_.dense_keys);
    IndexUnit unit = units.next();
    int32_t pages = read_pages(unit);
    while (unit.num_rows > 0) {
      begin_task(unit);
      const int num_pages = unit.num_pages;
      unit = units.next();
      const int32_t next_pages = read_pages(unit);  // they arrive while these are copied
      copy_keys(num_pages, pages);
      pages = next_pages;
    }
    begin_task({});
  }

 private:
  // Lane i: the number of the unit's page i.
  __device__ int32_t read_pages(const IndexUnit& unit) const {
    if (lane_ >= unit.num_pages) return 0;
    const int page = FATHOM_PLANTED(arguments_, kWrongIndexPage) && lane_ == 1 ? 0 : lane_;
    return arguments_.block_tables[unit.table + unit.first_page + page];
  }

  __device__ void begin_task(const IndexUnit& unit) {
    const int stage = task_.stage();
    barrier_wait(&shared_.task_is_done[stage], task_.parity() ^ 1);
    Task& task = shared_.tasks[stage];
    if (lane_ < kBlockRows) {
      task.lengths[lane_] = unit.length > arguments_.dense_keys ? unit.length : 0;
    }
    if (lane_ == 0) {
      task.num_rows = unit.num_rows, task.first_row = unit.first_row;
      task.first_key = unit.first_page * kKeys, task.num_pages = unit.num_pages;
    }
    __syncwarp();
    if (elect_one()) {
      constexpr int kWeightBytes = kHeads * static_cast<int>(sizeof(float));
#pragma unroll 1
      for (int pair = 0; pair < kGroups; ++pair) {
        uint64_t* const there = &shared_.task_is_there[stage][pair];
        const int first = pair * kPairRows, rows = min(unit.num_rows - first, kPairRows);
        barrier_expect(there, max(rows, 0) * (kHeads * kRowBytes + kWeightBytes));
#pragma unroll 1
        for (int i = first; i < first + rows; ++i) {
          const int row = unit.first_row + i;
          copy_box(shared_.queries[stage][i], &maps_.queries, there, 0, row * kHeads);
          copy_bytes(shared_.weights[stage][i], arguments_.weights + int64_t{row} * kHeads,
                     kWeightBytes, there);
        }
      }
    }
    task_.advance(1);
  }

  __device__ void copy_keys(int num_pages, int32_t pages) {
#pragma unroll 1
    for (int i = 0; i < num_pages; ++i) {
      const int stage = page_.stage();
      const int32_t number = __shfl_sync(~0u, pages, i);
      uint64_t* const there = &shared_.keys_are_there[stage][page_.parity()];
      barrier_wait(&shared_.keys_are_read[stage], page_.parity() ^ 1);
      if (elect_one()) {
        barrier_expect(there, kIndexPageBytes);
        copy_box(shared_.keys[stage], &maps_.keys, there, 0, 0, number);
        copy_bytes(shared_.scales[stage],
                   arguments_.pages.data + number * arguments_.pages.stride + kIndexValueBytes,
                   sizeof(shared_.scales[stage]), there);
      }
      page_.advance(1);
    }
  }

  const IndexScoresArguments& arguments_;
  const Maps& maps_;
  Shared<kHeads>& shared_;
  const int lane_ = threadIdx.x % kWarp;
  Place<kQueryStages> task_;
  Place<kKeyStages> page_;
};

}  // namespace fathom::cuda::index_scoring
