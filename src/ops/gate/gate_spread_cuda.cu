// What: logits = x weight^T in fp32; each row's k experts and their weights by the rules of gate().
//
// Inputs/outputs: gate_cuda.h.
//
// Layout: one block a multiprocessor: 32 experts and a part of the columns. Each of its eight warps
// has 16 of the experts and a quarter of the columns in registers (gate_product_cuda.cuh), for all
// rows. Sums of parts meet
// in device memory [parts, rows, experts]; a block has a row to choose for.
//
// Algorithm: weights are asked for before the wait for earlier launches and stay. Tile after tile
// of rows: products, the warps' sums added in shared memory, out to memory. Then rows are shared
// among the blocks, which add up the parts and choose (gate_block_choice_cuda.cuh). Nobody counts
// who has written: a sum is there when its word no longer holds the mark of those that are missing,
// which whoever has read it puts back.
//
// Determinism: warps' and parts' sums are added in their order, which depends on the numbers of
// columns, experts and multiprocessors alone.
//
// Limits: hidden a multiple of 32; 512 experts. All blocks run at a time.
//
// Measured: docs/kernels/fused.md.
#include <algorithm>

#include "base/math.h"
#include "device/cuda/launch.h"
#include "ops/gate/gate_parts_cuda.cuh"
#include "ops/gate/gate_spread_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kSpreadExperts = 32;
constexpr int kSumStride = kSpreadExperts + 1;  // of a row's: no bank twice
constexpr int kShares = 4;                      // of a block's columns: two warps each
constexpr int kSpreadAhead = 4;                 // steps of columns in registers
constexpr int kMostParts = 16;                  // of the columns
static_assert(kChoiceWarps == 2 * kShares);

struct SpreadPlan {
  int expert_parts, column_parts;
};

SpreadPlan plan_spread(int64_t experts, int64_t hidden) {
  const int64_t steps = hidden / kGateColumns, expert_parts = ceil_div(experts, kSpreadExperts);
  const int64_t most =
      std::clamp<int64_t>(num_multiprocessors() / expert_parts, 1, int64_t{kMostParts});
  const int64_t each = ceil_div(steps, most * kShares);  // of a warp
  return {.expert_parts = static_cast<int>(expert_parts),
          .column_parts = static_cast<int>(ceil_div(steps, each * kShares))};
}

template <int kRowTiles, int kPerThread>
__global__ void __launch_bounds__(kChoiceThreads, 1)
    gate_spread_kernel(const __grid_constant__ GateShape shape, int column_parts, float* partial) {
  constexpr int kRows = kRowTiles * 8;
  __shared__ BlockChoiceMemory<kPerThread> memory;
  extern __shared__ float sums[];  // [shares, kRows, kSumStride]
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int column_part = static_cast<int>(blockIdx.x) % column_parts;
  const int first_expert = static_cast<int>(blockIdx.x) / column_parts * kSpreadExperts;
  const auto rows = static_cast<int>(shape.rows);
  const bool chooses = static_cast<int>(blockIdx.x) < rows;
  let_next_launch_begin();
  const int share = warp / 2, half = warp % 2 * (kSpreadExperts / 2);
  GateProduct<NarrowWeights, kSpreadExperts / 32, kRowTiles, kSpreadAhead> product(
      shape, first_expert + half, column_part * kShares + share, column_parts * kShares);
  product.prefetch();
  BlockChoice<kPerThread> choice(shape.options, shape.experts, chooses ? shape.bias : nullptr,
                                 memory);
  wait_for_earlier_launches();
  const int64_t valid = valid_rows(shape);

  for (int first_row = 0; first_row < rows; first_row += kRows) {
    const int num_rows = min(rows - first_row, kRows);
    if (first_row > 0) {
      product.begin_rows();
      __syncthreads();  // the sums before have been read
    }
    product.run(shape.x + first_row * shape.hidden, num_rows);
    product.store_by_row(sums + share * (kRows * kSumStride) + half, kSumStride);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < num_rows * kSpreadExperts;
         i += kChoiceThreads) {
      const int row = i / kSpreadExperts, expert = i % kSpreadExperts;
      float sum = 0;
#pragma unroll
      for (int s = 0; s < kShares; ++s) sum += sums[(s * kRows + row) * kSumStride + expert];
      if (first_expert + expert < shape.experts) {
        store_shared_word(partial + (column_part * rows + first_row + row) * shape.experts +
                              first_expert + expert,
                          sum);
      }
    }
  }
  if (!chooses) return;
  choose_for_rows(shape, valid, choice, [&](int64_t row, int expert) {
    return sum_of_parts<kMostParts>(partial + row * shape.experts + expert, column_parts,
                                    rows * shape.experts);
  });
}

template <int kPerThread>
__global__ void __launch_bounds__(kChoiceThreads)
    gate_choose_kernel(const __grid_constant__ GateShape shape, const float* logits) {
  __shared__ BlockChoiceMemory<kPerThread> memory;
  let_next_launch_begin();
  BlockChoice<kPerThread> choice(shape.options, shape.experts, shape.bias, memory);
  wait_for_earlier_launches();
  choose_for_rows(shape, valid_rows(shape), choice,
                  [&](int64_t row, int expert) { return logits[row * shape.experts + expert]; });
}

template <int kRowTiles, int kPerThread>
void launch_spread(const GateShape& shape, float* partial, cudaStream_t stream) {
  const auto kernel = gate_spread_kernel<kRowTiles, kPerThread>;
  constexpr int kBytes = kShares * kRowTiles * 8 * kSumStride * int{sizeof(float)};
  static const bool prepared = (allow_shared_memory(kernel, kBytes), true);
  static_cast<void>(prepared);
  const SpreadPlan plan = plan_spread(shape.experts, shape.hidden);
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.expert_parts * plan.column_parts),
          .threads = kChoiceThreads,
          .shared_bytes = kBytes},
         stream, shape, plan.column_parts, partial);
}

template <int kPerThread>
void launch_spread(const GateShape& shape, float* partial, cudaStream_t stream) {
  if (shape.rows <= 8) {
    launch_spread<1, kPerThread>(shape, partial, stream);
  } else if (shape.rows <= 32) {
    launch_spread<4, kPerThread>(shape, partial, stream);
  } else {
    launch_spread<8, kPerThread>(shape, partial, stream);
  }
}

}  // namespace

int64_t gate_spread_words(int64_t rows, int64_t experts, int64_t hidden) {
  return plan_spread(experts, hidden).column_parts * rows * experts;
}

void gate_spread(const GateShape& shape, float* partial, cudaStream_t stream) {
  if (shape.experts <= kChoiceThreads) {
    launch_spread<1>(shape, partial, stream);
  } else {
    launch_spread<2>(shape, partial, stream);
  }
}

void gate_choose(const GateShape& shape, const float* logits, cudaStream_t stream) {
  constexpr int64_t kBlocksTogether = 8;  // of a multiprocessor
  const LaunchShape launch_shape = {.blocks = static_cast<unsigned>(std::min<int64_t>(
                                        shape.rows, kBlocksTogether * num_multiprocessors())),
                                    .threads = kChoiceThreads};
  if (shape.experts <= kChoiceThreads) {
    launch(gate_choose_kernel<1>, launch_shape, stream, shape, logits);
  } else {
    launch(gate_choose_kernel<2>, launch_shape, stream, shape, logits);
  }
}

}  // namespace fathom::cuda
