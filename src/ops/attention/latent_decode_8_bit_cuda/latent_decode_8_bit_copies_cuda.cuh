// Kernel arguments and the page producer warp for the kernels over 8-bit caches.
#pragma once

#include "base/math_constants.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "device/cuda/tile_load.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_memory_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"

namespace fathom::cuda::latent_8_bit {

// Kernel arguments for row tiles of one CTA.
inline Arguments kernel_arguments(int num_multiprocessors, const LatentDecodeArguments& arguments) {
  Arguments inner;
  inner.q_latent = static_cast<const __nv_bfloat16*>(arguments.q_latent);
  inner.q_rope = static_cast<const __nv_bfloat16*>(arguments.q_rope);
  inner.pages = static_cast<const std::byte*>(arguments.pages);
  inner.block_tables = arguments.block_tables;
  inner.parts = arguments.parts;
  inner.first_part = arguments.first_part;
  inner.out = static_cast<__nv_bfloat16*>(arguments.out);
  inner.sums = arguments.scratch;
  inner.weights = arguments.scratch + latent_decode_scratch(num_multiprocessors).sums;
  inner.heads = arguments.heads;
  inner.tile_blocks = 1;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  return inner;
}

// The tensor map describes a page as bf16 with half as many columns; TMA zero-fills box columns
// beyond a row.
template <typename Row>
CUtensorMap map_of_pages(const LatentDecodeArguments& arguments) {
  if constexpr (PageLayout<Row>::kIsLinear) return {};
  return bf16_map(arguments.pages,
                  {.rows = arguments.num_pages * kKeys, .columns = Row::kBytes / 2},
                  {.rows = kKeys, .columns = PageLayout<Row>::kBoxRow / 2});
}

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

// Pages without new tokens were written by earlier steps: their loads are issued before the PDL
// wait.
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
    int ahead = 0;  // each lane's page of the next 32
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
