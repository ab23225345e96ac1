// What: logits = x weight^T in fp32; each row's k experts and their weights by the rules of gate().
//
// Inputs/outputs: gate_cuda.h.
//
// Layout: one block a multiprocessor: 64 experts and a part of the columns, which the copy engine
// brings into shared memory as boxes of [64 experts or kRows rows, 64 columns] with the 128-byte
// swizzle. Each of its two warpgroups has half of the rows. Sums of parts meet in device memory; a
// block has a row to choose for (gate_parts_cuda.cuh).
//
// Algorithm: weights are asked for before the wait for earlier launches and stay; x once it is
// over, each box multiplied when it is there: experts are M of the instruction, rows N. Sums go
// from registers to memory, eight experts of a row together.
//
// Determinism: parts' sums are added in their order, which depends on the numbers of columns,
// experts and multiprocessors alone.
//
// Limits: hidden a multiple of 64; 512 experts. All blocks run at a time.
//
// Measured: docs/kernels/fused.md.
#include <algorithm>

#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "device/cuda/wgmma.cuh"
#include "ops/gate/gate_parts_cuda.cuh"
#include "ops/gate/gate_tiles_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kTileExperts = 64, kTileColumns = 64;
constexpr int kMostTileParts = 32;  // of the columns
constexpr int kMostBoxes = 6;       // of a block's columns
constexpr int kTileGroups = 2;      // warpgroups
constexpr int kRowBytes = 128;
static_assert(kChoiceThreads == kTileGroups * 128);

struct TilePlan {
  int expert_parts, column_parts, boxes;
};

TilePlan plan_tiles(int64_t experts, int64_t hidden) {
  const int64_t boxes = hidden / kTileColumns, expert_parts = ceil_div(experts, kTileExperts);
  const int64_t most =
      std::clamp<int64_t>(num_multiprocessors() / expert_parts, 1, int64_t{kMostTileParts});
  const int64_t each = ceil_div(boxes, most);
  return {.expert_parts = static_cast<int>(expert_parts),
          .column_parts = static_cast<int>(ceil_div(boxes, each)),
          .boxes = static_cast<int>(each)};
}

template <int kRows>
struct TileMemory {
  alignas(1024) uint8_t weights[kMostBoxes][kTileExperts * kRowBytes];
  alignas(1024) uint8_t x[kMostBoxes][kRows * kRowBytes];
  uint64_t weights_arrived, x_arrived[kMostBoxes];
};

struct TileMaps {
  CUtensorMap weight, x;
};

template <int kRows, int kPerThread>
__global__ void __launch_bounds__(kChoiceThreads, 1)
    gate_tiles_kernel(const __grid_constant__ TileMaps maps,
                      const __grid_constant__ GateShape shape, int column_parts, int most_boxes,
                      float* partial) {
  constexpr int kGroupRows = kRows / kTileGroups;
  extern __shared__ __align__(1024) uint8_t bytes[];
  TileMemory<kRows>& memory = *reinterpret_cast<TileMemory<kRows>*>(bytes);
  __shared__ BlockChoiceMemory<kPerThread> choice_memory;
  const int column_part = static_cast<int>(blockIdx.x) % column_parts;
  const int first_expert = static_cast<int>(blockIdx.x) / column_parts * kTileExperts;
  const int first_box = column_part * most_boxes;
  const int boxes = min(most_boxes, static_cast<int>(shape.hidden) / kTileColumns - first_box);
  const auto rows = static_cast<int>(shape.rows);
  const bool chooses = static_cast<int>(blockIdx.x) < rows;
  let_next_launch_begin();
  if (threadIdx.x == 0) {
    barrier_init(&memory.weights_arrived, 1);
    for (uint64_t& barrier : memory.x_arrived) barrier_init(&barrier, 1);
    fence_barrier_init();
    barrier_expect(&memory.weights_arrived, boxes * kTileExperts * kRowBytes);
    for (int box = 0; box < boxes; ++box) {
      copy_box(memory.weights[box], &maps.weight, &memory.weights_arrived,
               (first_box + box) * kTileColumns, first_expert);
    }
  }
  BlockChoice<kPerThread> choice(shape.options, shape.experts, chooses ? shape.bias : nullptr,
                                 choice_memory);
  wait_for_earlier_launches();
  const int64_t valid = valid_rows(shape);
  const int group = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const int expert = first_expert + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;

  for (int first_row = 0, tile = 0; first_row < rows; first_row += kRows, ++tile) {
    if (threadIdx.x == 0) {
      for (int box = 0; box < boxes; ++box) {
        barrier_expect(&memory.x_arrived[box], kRows * kRowBytes);
        copy_box(memory.x[box], &maps.x, &memory.x_arrived[box], (first_box + box) * kTileColumns,
                 first_row);
      }
    }
    if (tile == 0) {
      __syncthreads();  // barriers are there
      barrier_wait(&memory.weights_arrived, 0);
    }
    float sums[kGroupRows / 2];
    for (int box = 0; box < boxes; ++box) {
      barrier_wait(&memory.x_arrived[box], tile & 1);
      const uint32_t weights = shared_address(memory.weights[box]);
      const uint32_t x = shared_address(memory.x[box]) + group * (kGroupRows * kRowBytes);
      pin(sums);
      mma_fence();
#pragma unroll
      for (int i = 0; i < kTileColumns / 16; ++i) {
        mma_64(sums, swizzled_matrix(weights + i * 32, 1024), swizzled_matrix(x + i * 32, 1024),
               box + i > 0);
      }
      mma_commit();
    }
    mma_wait();
    pin(sums);
    const int row = first_row + group * kGroupRows + lane % 4 * 2;
    float* const to = partial + (int64_t{column_part} * rows + row) * shape.experts + expert;
    const bool exists[2] = {expert < shape.experts, expert + 8 < shape.experts};
#pragma unroll
    for (int j = 0; j < kGroupRows / 2; ++j) {
      const int its_row = j / 4 * 8 + j % 2, half = j / 2 % 2;
      store_shared_word_if(row + its_row < rows && exists[half],
                           to + its_row * shape.experts + half * 8, sums[j]);
    }
    if (first_row + kRows < rows) __syncthreads();  // x has been read
  }
  if (!chooses) return;
  choose_for_rows(shape, valid, choice, [&](int64_t row, int its_expert) {
    return sum_of_parts<kMostTileParts>(partial + row * shape.experts + its_expert, column_parts,
                                        rows * shape.experts);
  });
}

template <int kRows, int kPerThread>
void launch_tiles(const GateShape& shape, float* partial, cudaStream_t stream) {
  const auto kernel = gate_tiles_kernel<kRows, kPerThread>;
  // Two blocks of successive launches on a multiprocessor disturb each other.
  constexpr int kAlone = 116 << 10;
  constexpr int kBytes = std::max(kAlone, static_cast<int>(sizeof(TileMemory<kRows>)));
  static const bool prepared = (allow_shared_memory(kernel, kBytes), true);
  static_cast<void>(prepared);
  const TilePlan plan = plan_tiles(shape.experts, shape.hidden);
  const TileMaps maps = {bf16_map(shape.weight, {.rows = shape.experts, .columns = shape.hidden},
                                  {.rows = kTileExperts, .columns = kTileColumns}),
                         bf16_map(shape.x, {.rows = shape.rows, .columns = shape.hidden},
                                  {.rows = kRows, .columns = kTileColumns})};
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.expert_parts * plan.column_parts),
          .threads = kChoiceThreads,
          .shared_bytes = kBytes},
         stream, maps, shape, plan.column_parts, plan.boxes, partial);
}

template <int kPerThread>
void launch_tiles(const GateShape& shape, float* partial, cudaStream_t stream) {
  if (shape.rows <= 64) {
    launch_tiles<64, kPerThread>(shape, partial, stream);
  } else {
    launch_tiles<128, kPerThread>(shape, partial, stream);
  }
}

}  // namespace

bool gate_can_tile(int64_t experts, int64_t hidden) {
  return hidden % kTileColumns == 0 && plan_tiles(experts, hidden).boxes <= kMostBoxes;
}

int64_t gate_tiles_words(int64_t rows, int64_t experts, int64_t hidden) {
  return plan_tiles(experts, hidden).column_parts * rows * experts;
}

void gate_tiles(const GateShape& shape, float* partial, cudaStream_t stream) {
  if (shape.experts <= kChoiceThreads) {
    launch_tiles<1>(shape, partial, stream);
  } else {
    launch_tiles<2>(shape, partial, stream);
  }
}

}  // namespace fathom::cuda
