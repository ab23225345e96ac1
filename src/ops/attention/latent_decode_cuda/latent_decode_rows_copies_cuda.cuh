// Producer warp of latent_decode_rows_cuda.cu: loads pages and queries into shared memory.
#pragma once

#include "ops/attention/latent_decode_cuda/latent_decode_rows_memory_cuda.cuh"

namespace fathom::cuda::latent_rows {

// Loads a split's queries once those of the previous split, number parts_before, have been read.
__device__ inline void copy_queries(SharedMemory& shared, const Maps& maps,
                                    const LatentDecodePart& part, int rank, int parts_before) {
  if (parts_before > 0) barrier_wait(&shared.queries_read, (parts_before - 1) & 1);
  const int row = part.out_row + rank * kRows;
  for (int arrival = 0; arrival < kArrivals; ++arrival) {
    uint64_t* arrived = &shared.queries_arrived[arrival];
    barrier_expect(arrived, boxes_of(arrival) * kBoxBytes);
    for (int i = 0; i < boxes_of(arrival); ++i) {
      const int box = box_of(0, arrival, i);
      copy_box(shared.queries + box * kBoxBytes, box == kRopeBox ? &maps.q_rope : &maps.q_latent,
               arrived, box == kRopeBox ? 0 : box * kBoxColumns, row);
    }
  }
}

class Copies {
 public:
  __device__ Copies(SharedMemory& shared, const Maps& maps, const Arguments& arguments, int rank)
      : shared_(shared), maps_(maps), arguments_(arguments), rank_(rank) {}

  __device__ void run(const LatentDecodePart& part) {
    constexpr int kWithin = LatentDecodePart::kPagesWithin;
    const int lane = threadIdx.x % 32;
    const int32_t* table = arguments_.block_tables + part.first_page;
    int ahead = 0;  // each lane's page of the next 32
    for (int t = 0; t < part.num_tiles; ++t) {
      if (t % 32 == kWithin) ahead = t + lane < part.num_tiles ? table[t + lane] : 0;
      const int later = __shfl_sync(~0u, ahead, (t - kWithin) & 31);
      const int page = t < kWithin ? part.pages[t] : later;
      if (lane == 0) copy_page(part, t, page);
    }
    ++parts_;
  }

 private:
  __device__ void copy_page(const LatentDecodePart& part, int t, int page) {
    if (t >= part.old_tiles) wait_once();
    const int stage = t % kStages;
    const int use = stage == 0 ? even_pages_++ : odd_pages_++;
#pragma unroll
    for (int arrival = 0; arrival < kArrivals; ++arrival) {
      if (use > 0 && (arrival == 0 || arrival == kOwnArrivals)) {
        barrier_wait(&shared_.read[stage][arrival == kOwnArrivals], (use - 1) & 1);
      }
      uint64_t* arrived = &shared_.arrived[stage][arrival];
      barrier_expect(arrived, boxes_of(arrival) * kBoxBytes);
#pragma unroll
      for (int i = 0; i < boxes_of(arrival); ++i) {
        const int box = box_of(stage, arrival, i);
        uint8_t* to = shared_.pages[stage] + box * kBoxBytes;
        copy_box(to, &maps_.pages, arrived, box * kBoxColumns, page * kKeys);
      }
    }
    if (t == 0) {
      wait_once();
      copy_queries(shared_, maps_, part, rank_, parts_);
    }
  }

  // Pages of earlier steps are loaded before the PDL wait.
  __device__ void wait_once() {
    if (!waited_) wait_for_earlier_launches();
    waited_ = true;
  }

  SharedMemory& shared_;
  const Maps& maps_;
  const Arguments& arguments_;
  const int rank_;
  int even_pages_ = 0, odd_pages_ = 0;  // loaded into each stage
  int parts_ = 0;
  bool waited_ = false;
};

}  // namespace fathom::cuda::latent_rows
