// What: logits = x weight^T in fp32; each row's k experts and their weights by the rules of gate().
//
// Inputs/outputs: gate_cuda.h.
//
// Layout: one CTA an SM: 32 experts and a k-slice. Each of its eight warps has 16 of the experts
// and a quarter of the slice's columns in registers (gate_product_cuda.cuh), for all rows. Partial
// sums go to device memory [parts, rows, experts]; one CTA selects for a row.
//
// Algorithm: weights are loaded before the PDL wait and stay in registers. Tile after tile of rows:
// mma, the warps' sums added in shared memory and written to device memory. Then rows are
// distributed over the CTAs, which add up the k-slices and select (gate_block_choice_cuda.cuh).
// Flag-in-data handoff without counters: a sum has arrived when its word no longer holds the mark
// of missing ones; the reader restores the mark.
//
// Determinism: warps' and k-slices' sums are added in their order, which depends on the numbers of
// columns, experts and SMs alone.
//
// Limits: hidden a multiple of 32; 512 experts. All CTAs must be co-resident.
//
// Measured: docs/kernels/fused.md.
#include <algorithm>

#include "base/math.h"
#include "device/cuda/co_resident.h"
#include "ops/gate/gate_parts_cuda.cuh"
#include "ops/gate/gate_spread_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kSpreadExperts = 32;
constexpr int kSumStride = kSpreadExperts + 1;  // padded against bank conflicts
constexpr int kShares = 4;                      // of a CTA's columns: two warps each
constexpr int kSpreadAhead = 4;                 // steps of columns in registers
constexpr int kMostParts = 16;                  // split-K limit
static_assert(kChoiceWarps == 2 * kShares);

struct SpreadPlan {
  int expert_parts, column_parts;
};

SpreadPlan plan_spread(int64_t experts, int64_t hidden, int sms) {
  const int64_t steps = hidden / kGateColumns, expert_parts = ceil_div(experts, kSpreadExperts);
  const int64_t most = std::clamp<int64_t>(sms / expert_parts, 1, int64_t{kMostParts});
  const int64_t each = ceil_div(steps, most * kShares);  // steps of a warp
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
      __syncthreads();  // the previous sums have been read
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
void launch_spread(const GateShape& shape, float* partial, int sms, GpuStream stream) {
  const auto kernel = gate_spread_kernel<kRowTiles, kPerThread>;
  constexpr int kBytes = kShares * kRowTiles * 8 * kSumStride * int{sizeof(float)};
  stream.device().allow_shared_memory(kernel, kBytes);
  const SpreadPlan plan = plan_spread(shape.experts, shape.hidden, sms);
  launch_co_resident("gate_spread", kernel,
                     {.blocks = static_cast<unsigned>(plan.expert_parts * plan.column_parts),
                      .threads = kChoiceThreads,
                      .shared_bytes = kBytes},
                     sms, stream, shape, plan.column_parts, partial);
}

template <int kPerThread>
void launch_spread(const GateShape& shape, float* partial, int sms, GpuStream stream) {
  if (shape.rows <= 8) {
    launch_spread<1, kPerThread>(shape, partial, sms, stream);
  } else if (shape.rows <= 32) {
    launch_spread<4, kPerThread>(shape, partial, sms, stream);
  } else {
    launch_spread<8, kPerThread>(shape, partial, sms, stream);
  }
}

}  // namespace

int64_t gate_spread_words(int64_t rows, int64_t experts, int64_t hidden, int sms) {
  return plan_spread(experts, hidden, sms).column_parts * rows * experts;
}

void gate_spread(const GateShape& shape, float* partial, int sms, GpuStream stream) {
  if (shape.experts <= kChoiceThreads) {
    launch_spread<1>(shape, partial, sms, stream);
  } else {
    launch_spread<2>(shape, partial, sms, stream);
  }
}

void gate_choose(const GateShape& shape, const float* logits, GpuStream stream) {
  constexpr int64_t kBlocksTogether = 8;  // per SM
  const LaunchShape launch_shape = {
      .blocks = static_cast<unsigned>(
          std::min<int64_t>(shape.rows, kBlocksTogether * stream.device().num_multiprocessors())),
      .threads = kChoiceThreads};
  if (shape.experts <= kChoiceThreads) {
    launch(gate_choose_kernel<1>, launch_shape, stream, shape, logits);
  } else {
    launch(gate_choose_kernel<2>, launch_shape, stream, shape, logits);
  }
}

}  // namespace fathom::cuda
