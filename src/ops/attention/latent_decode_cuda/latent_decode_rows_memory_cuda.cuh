// Shared memory of a CTA of latent_decode_rows_cuda.cu, the load order of a page's boxes, and the
// kernel arguments.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/ptx.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"

namespace fathom::cuda::latent_rows {

constexpr int kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr int kRows = 64;  // rows of a CTA
constexpr int kKeys = 64;  // keys of a tile: one page
constexpr int kBoxColumns = 64, kBoxBytes = 64 * 128;
constexpr int kBoxes = kColumns / kBoxColumns, kRopeBox = kBoxes - 1;
constexpr int kStages = 2, kGroups = 2, kGroupThreads = 128;
constexpr int kHalfBoxes = 4;  // boxes of latent columns a warpgroup
constexpr int kArrivals = 5;   // of a page: the rotary box and four pairs
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kK = 16;             // columns (or keys) that one wgmma multiplies
constexpr int kGroupBytes = 1024;  // 8 rows of 128 bytes

constexpr int kBothGroups = 1;  // named barrier

struct Arguments {
  const int32_t* block_tables;
  const LatentDecodePart* parts;
  const int32_t* first_part;
  __nv_bfloat16* out;
  float* sums;     // [slots, tile_blocks, 4 * kVectors]
  float* weights;  // [weights, tile_blocks, kRows]: a split's, for each CTA that reads it
  int32_t heads;
  int32_t tile_blocks;  // CTAs that compute a row tile together
  float scale_log2;
};

struct Maps {
  CUtensorMap q_latent, q_rope, pages;
};

struct SharedMemory {
  alignas(1024) uint8_t pages[kStages][kBoxes * kBoxBytes];
  alignas(1024) uint8_t queries[kBoxes * kBoxBytes];
  alignas(1024) uint8_t probabilities[kBoxBytes];
  // Double-buffered over splits, so that a warpgroup may begin one while the other ends one.
  float references[2][kRows], sums[2][kGroups][kRows];
  uint64_t arrived[kStages][kArrivals];
  uint64_t read[kStages][2];  // the half that the scores' warpgroup reads last, and the rest
  uint64_t queries_arrived[kArrivals], queries_read;
  // mbarriers at which every consumer thread arrives: a page's probabilities, its rows beyond the
  // end, a split's sums. The warpgroups run different code, which bar.sync does not support.
  uint64_t published[kGroups], cleared[kGroups], summed;
};

// The order in which a page's boxes are loaded and multiplied: the rotary one, then the half that
// its warpgroup multiplies again, then the other's. box_of(stage, arrival, i): the i-th of an
// arrival.
__device__ constexpr int boxes_of(int arrival) { return arrival == 0 ? 1 : 2; }
__device__ constexpr int box_of(int stage, int arrival, int i) {
  return arrival == 0 ? kRopeBox : (2 * (arrival - 1) + i + stage * kHalfBoxes) % (2 * kHalfBoxes);
}
constexpr int kOwnArrivals = 3;  // the first of them: released by read[stage][0]

}  // namespace fathom::cuda::latent_rows
