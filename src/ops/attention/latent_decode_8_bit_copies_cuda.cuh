// Pages, brought into shared memory: the work of one warp of a block of
// latent_decode_8_bit_cuda.cu.
#pragma once

#include "device/cuda/ptx.cuh"
#include "device/cuda/tile_load.cuh"
#include "ops/attention/latent_decode_8_bit_memory_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

template <typename Row>
__device__ void copy_page(const CUtensorMap& map, const std::byte* pages, int64_t page, uint8_t* to,
                          uint64_t* arrived) {
  using Page = PageLayout<Row>;
  barrier_expect(arrived, Page::kBytes);
  if constexpr (Page::kIsLinear) {
    copy_bytes(to, pages + page * Page::kBytes, Page::kBytes, arrived);
  } else {
    for (int box = 0; box < Page::kNumBoxes; ++box) {
      copy_box(to + box * Page::kBoxBytes, &map, arrived, box * (Page::kBoxRow / 2),
               static_cast<int>(page) * kKeys);
    }
  }
}

// Pages that hold none of a sequence's new tokens were written by earlier steps: those are asked
// for before the launches before this one have ended.
template <typename Row, typename Shared>
__device__ void issue_pages(Shared& shared, const CUtensorMap& map, const Arguments& arguments,
                            int first_part) {
  const int lane = threadIdx.x % 32;
  constexpr int kWithin = LatentDecodePart::kPagesWithin;
  int turn = 0;
  for (int p = first_part, more = 1; more; ++p) {
    const LatentDecodePart part = arguments.parts[p];
    more = part.more;
    const int32_t* table = arguments.block_tables + part.first_page;
    int ahead = 0;  // lane's page of the next 32
    for (int t = 0; t < part.num_tiles; ++t, ++turn) {
      if (t % 32 == kWithin) ahead = t + lane < part.num_tiles ? table[t + lane] : 0;
      const int later = __shfl_sync(~0u, ahead, (t - kWithin) & 31);
      const int64_t page = t < kWithin ? part.pages[t] : later;
      const int stage = turn % Shared::kStages;
      if (t == part.old_tiles) wait_for_earlier_launches();
      if (lane != 0) continue;
      if (turn >= Shared::kStages) {
        if (Shared::kStages < 2 * kGroups) {
          prefetch_bytes(arguments.pages + page * (kKeys * Row::kBytes), kKeys * Row::kBytes);
        }
        barrier_wait(&shared.read[stage], (turn / Shared::kStages - 1) & 1);
      }
      copy_page<Row>(map, arguments.pages, page, shared.pages[stage], &shared.arrived[stage]);
    }
  }
}

}  // namespace fathom::cuda::latent_8_bit
