// What: out[t] = mlp_shared(x[t]) + sum over t's experts e of weight * mlp_e(x[t]) for few tokens,
// bandwidth-bound by the weights of the experts that have tokens. One launch.
//
// Inputs/outputs: moe_cuda.h. Work of each CTA: moe_few_rows_plan.h.
//
// Layout: one CTA per SM: kWarpgroups consumer warpgroups (wgmma), one warpgroup that copies
// tokens' rows (cp.async), one that groups tokens by expert, one warp that loads weights (TMA). A
// ring buffer of stages (weight_stream_cuda.cuh) of 128 columns: up to 64 tokens, then up to 64 *
// kWarpgroups rows of weights. Beside it the sums [rows, own hidden columns] in fp32, and the lists
// of expert_tiles_cuda.cuh.
//
// Algorithm: two phases in one weight stream.
//   1. Gate and up. Each CTA takes an even share of the shared expert's intermediate columns, and
//      then of those of all experts that have tokens, tokens in tiles of 64. A stage alternates 8
//      rows of gate and the same 8 of up, so that one thread holds both values of an activation.
//      Activations, times the expert's weight, go to the workspace.
//   2. Down. A cluster has a share of the hidden columns; its CTAs share the intermediate columns:
//      the shared expert's first, then those of all experts with tokens. The result of a run of an
//      expert's columns is added to the sums of its tokens; at the end the cluster's sums are
//      reduced and written.
// Weight loads wait for no barrier: the shared expert's are issued before the PDL wait, the second
// phase's while the first one ends. Activations are waited for with two counters. The shared
// expert's are complete long before they are needed; the wait for the routed experts' activations
// overlaps with the shared expert's columns. Each CTA finds the experts that have tokens by itself,
// while the shared expert is computed.
//
// Determinism: a pair's place is by expert, then by its index; sums are formed in the order of the
// experts, a cluster's in the order of its CTAs. Not batch-invariant: other tokens' experts move
// the ends of column runs. (Atomics count integers.)
//
// Limits: 448 rows (their sums), 512 experts, 4,096 pairs. CTAs wait for one another: all of them
// must be co-resident.
//
// Source: weights on M for few tokens, lists kept on the device and both GEMMs in one launch as in
// HPC-Ops' and FlashInfer's mixture-of-experts kernels for small batches.
//
// Measured: docs/kernels/moe_few_rows.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "device/cuda/co_resident.h"
#include "device/cuda/ptx.cuh"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_few_rows_products_cuda.cuh"

namespace fathom::cuda {
namespace {

using namespace few_tokens;

enum NamedBarrier { kAll, kMultiplying, kCopying, kGrouping };

struct Arguments {
  static constexpr int kStageColumns = kStageHalves * 64, kRunUnits = 1;

  const __nv_bfloat16* x;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* out;
  uint64_t* progress;                      // [kNumPhases]
  __nv_bfloat16* activations[kNumPhases];  // [rows, shared_inter], [pairs, inter]
  int32_t rows, hidden, num_experts, experts_per_token, inter, shared_inter;
  int32_t splits, clusters, hidden_groups;  // hidden_groups: at most, of a cluster
  int32_t stages, stage_bytes, token_groups;
  bool f32;
};

struct Tables {
  uint64_t arrived[kMaxStages], read[kMaxStages];
  uint64_t listed[2];             // the lists for the first, the second phase are ready
  uint64_t computed[kNumPhases];  // this CTA's activations are written; `awaited` is then known
  uint64_t awaited[kNumPhases];   // value of progress when all CTAs' activations are written
  ExpertTiles experts;

  __device__ int16_t* ids() { return reinterpret_cast<int16_t*>(this + 1); }
  __device__ uint16_t* sorted(int num_pairs) {
    return reinterpret_cast<uint16_t*>(ids() + num_pairs);
  }
};

using FewRowsWork = Work<Arguments, Tables>;

// ---- tokens: one warpgroup
//
// A thread copies the same 16 bytes of 128 columns of every eighth row.

class TokenCopies {
 public:
  __device__ TokenCopies(uint8_t* ring, Tables& tables, const FewRowsWork& work, const Arguments& a)
      : ring_(shared_address(ring)),
        tables_(tables),
        work_(work),
        a_(a),
        chunk_(threadIdx.x % 16),
        row_(threadIdx.x % kWarpgroupThreads / 16) {}

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      const uint16_t* sorted = tables_.sorted(num_pairs(a_));
      copy(tile.count, 0, stages_of<Arguments>(a_.hidden), a_.hidden, [&](int row) {
        const int place = tile.first + row;
        const int token = phase == kShared ? place : sorted[place] / a_.experts_per_token;
        return a_.x + static_cast<int64_t>(token) * a_.hidden;
      });
    }
  }

  __device__ void down(Phase phase) {
    const int inter = inter_of(a_, phase);
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      copy(tile.count, piece.first * Arguments::kStageColumns, piece.count, inter, [&](int row) {
        return a_.activations[phase] + static_cast<int64_t>(tile.first + row) * inter;
      });
    }
  }

  // Waits for the activations of all CTAs.
  __device__ void wait_for(Phase phase) const {
    if (threadIdx.x % kWarpgroupThreads == 0) {
      barrier_wait(&tables_.computed[phase], 0);
      while (load_acquire(&a_.progress[phase]) < tables_.awaited[phase]) {
      }
    }
    named_barrier(kCopying, kWarpgroupThreads);
  }

 private:
  static constexpr int kEach = kTileTokens / kGroupRows;

  // Copies columns from first_column on of rows row_at(0 … rows).
  template <typename RowAt>
  __device__ void copy(int rows, int first_column, int num_stages, int columns, RowAt row_at) {
    const __nv_bfloat16* from[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * kGroupRows + row_;
      from[i] = row < rows ? row_at(row) : nullptr;
    }
    const uint32_t to =
        ring_ + chunk_ / 8 * (a_.token_groups * kGroupBytes) + swizzled_chunk(row_, chunk_ % 8);
    for (int k = 0; k < num_stages; ++k) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      const int column = first_column + k * Arguments::kStageColumns + chunk_ * 8;
      const bool exists = column < columns;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (from[i] == nullptr) continue;
        copy_16_or_zero(to + at_.stage * a_.stage_bytes + i * kGroupBytes,
                        from[i] + (exists ? column : 0), exists ? 16 : 0);
      }
      barrier_arrive_after_copies(&tables_.arrived[at_.stage]);
      ++done_;
      at_.advance(a_.stages);
    }
  }

  const uint32_t ring_;
  Tables& tables_;
  const FewRowsWork& work_;
  const Arguments& a_;
  const int chunk_, row_;
  RingPosition at_;
  int done_ = 0;
};

// ---- wgmma

template <int kWarpgroups>
class Products {
 public:
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kStride = moe_sum_bytes(kWarpgroups) / 4;  // row stride of the sums

  __device__ Products(const uint8_t* ring, float* sums, Tables& tables, const FewRowsWork& work,
                      const Arguments& a)
      : ring_(shared_address(ring)),
        sums_(sums),
        tables_(tables),
        work_(work),
        a_(a),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
    for (int i = threadIdx.x; i < a.rows * kStride / 4; i += kThreads) {
      reinterpret_cast<float4*>(sums)[i] = make_float4(0, 0, 0, 0);
    }
  }

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      with_columns(tile.count, [&]<int kColumns>() { gate_up<kColumns>(phase, piece, tile); });
    }
    named_barrier(kMultiplying, kThreads);
    if (threadIdx.x == 0) {
      const uint64_t before = add_release(&a_.progress[phase], 1);
      tables_.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
      barrier_arrive(&tables_.computed[phase]);
    }
  }

  __device__ void down(Phase phase) {
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      with_columns(tile.count, [&]<int kColumns>() { down<kColumns>(phase, piece, tile); });
    }
  }

 private:
  template <int kColumns>
  __device__ void multiply(float (&d)[kColumns / 2], int num_stages, const StageOperand& weights) {
    multiply_tile<kColumns, true>(
        d, at_, num_stages, a_.stages, ring_, a_.stage_bytes, weights,
        {.begin = 0, .half_stride = a_.token_groups * kGroupBytes, .group_stride = kGroupBytes},
        tables_.arrived, tables_.read);
  }

  template <int kColumns>
  __device__ void gate_up(Phase phase, const Piece& piece, const TokenTile& tile) {
    float weight[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      weight[i] = 1;
      if (phase == kRouted && column_of(lane_, i) < tile.count) {
        weight[i] =
            a_.expert_weights[tables_.sorted(num_pairs(a_))[tile.first + column_of(lane_, i)]];
      }
    }
    float d[kColumns / 2];
    multiply<kColumns>(d, stages_of<Arguments>(a_.hidden),
                       {.begin = token_bytes(a_) + warp_ / 4 * (kWarpgroupPairs * kPairBytes),
                        .half_stride = kGroupBytes,
                        .group_stride = kRowBytes});
    if (warp_ >= piece.count) return;  // one warp has the 16 rows of a pair
    const int inter = inter_of(a_, phase);
    __nv_bfloat16* out = a_.activations[phase] + static_cast<int64_t>(tile.first) * inter +
                         (piece.first + warp_) * kGroupRows + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int j = i / 2 * 4 + i % 2;
      if (column_of(lane_, i) < tile.count) {
        out[static_cast<int64_t>(column_of(lane_, i)) * inter] =
            __float2bfloat16(swiglu(d[j], d[j + 2]) * weight[i]);
      }
    }
  }

  template <int kColumns>
  __device__ void down(Phase phase, const Piece& piece, const TokenTile& tile) {
    int token[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      token[i] = -1;
      if (column_of(lane_, i) >= tile.count) continue;
      const int place = tile.first + column_of(lane_, i);
      token[i] =
          phase == kShared ? place : tables_.sorted(num_pairs(a_))[place] / a_.experts_per_token;
    }
    float d[kColumns / 2];
    multiply<kColumns>(d, piece.count,
                       {.begin = token_bytes(a_) + warp_ / 4 * (kWarpgroupGroups * kGroupBytes),
                        .half_stride = work_.share().num_groups * kGroupBytes,
                        .group_stride = kGroupBytes});
    // Only this warp updates these columns of all rows.
    float* sums = sums_ + warp_ * 16 + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int j = i / 2 * 4 + i % 2;
      if (token[i] < 0) continue;
      sums[token[i] * kStride] += d[j];
      sums[token[i] * kStride + 8] += d[j + 2];
    }
    __syncwarp();
  }

  const uint32_t ring_;
  float* const sums_;
  Tables& tables_;
  const FewRowsWork& work_;
  const Arguments& a_;
  const int lane_, warp_;
  RingPosition at_;
};

// ---- the kernel

template <int kWarpgroups>
__global__ void __launch_bounds__((kWarpgroups + 2) * kWarpgroupThreads + 32, 1)
    moe_few_rows_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  constexpr int kMultiply = kWarpgroups * kWarpgroupThreads;
  constexpr int kCopy = kMultiply + kWarpgroupThreads, kGroup = kCopy + kWarpgroupThreads;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto* const sums = reinterpret_cast<float*>(memory + a.stages * a.stage_bytes);
  Tables& tables = *reinterpret_cast<Tables*>(sums + a.rows * Products<kWarpgroups>::kStride);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&tables.arrived[i], kWarpgroupThreads + 1);
      barrier_init(&tables.read[i], kWarpgroups * 4);
    }
    for (uint64_t& listed : tables.listed) barrier_init(&listed, kGroupingThreads);
    for (uint64_t& computed : tables.computed) barrier_init(&computed, 1);
    fence_barrier_init();
    let_next_launch_begin();
  }
  __syncthreads();

  const FewRowsWork work(a, tables, kWarpgroups * kWarpgroupPairs);
  if (threadIdx.x < kMultiply) {
    wait_for_earlier_launches();
    Products<kWarpgroups> products(memory, sums, tables, work, a);
    products.gate_up(kShared);
    work.wait_for_lists(0);
    products.gate_up(kRouted);
    products.down(kShared);
    work.wait_for_lists(1);
    products.down(kRouted);
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      named_barrier(kMultiplying, kMultiply);
    }
    using Rows = Products<kWarpgroups>;
    write_out<Rows::kThreads, Rows::kStride, 1>(a, work.share(), sums);
  } else {
    if (threadIdx.x < kCopy) {
      wait_for_earlier_launches();
      TokenCopies copies(memory, tables, work, a);
      copies.gate_up(kShared);
      work.wait_for_lists(0);
      copies.gate_up(kRouted);
      copies.wait_for(kShared);
      copies.down(kShared);
      copies.wait_for(kRouted);
      copies.down(kRouted);
    } else if (threadIdx.x < kGroup) {
      wait_for_earlier_launches();
      make_lists(tables, work, a, kGrouping);
    } else if (threadIdx.x == kGroup) {
      WeightCopies<Arguments, Tables> copies(memory, tables, work, a);
      copies.gate_up(kShared, maps.gate_up[kShared]);
      work.wait_for_lists(0);
      copies.gate_up(kRouted, maps.gate_up[kRouted]);
      copies.down(kShared, maps.down[kShared]);
      copies.down(kRouted, maps.down[kRouted]);
    }
    __syncwarp();
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }
  if (a.splits > 1) {  // the cluster's other CTAs have read this CTA's sums
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

template <int kWarpgroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, const SmBudget& budget,
                GpuStream stream) {
  const auto kernel = moe_few_rows_kernel<kWarpgroups>;
  stream.device().allow_shared_memory(kernel, kMoeSharedBytes);
  const int pairs = a.rows * a.experts_per_token;
  static_assert(sizeof(Tables) <= moe_table_bytes(0));
  const int behind = a.rows * moe_sum_bytes(kWarpgroups) + moe_table_bytes(pairs);
  a.stage_bytes = moe_stage_bytes(a.rows, kWarpgroups);
  a.stages = std::clamp(plan.ring_bytes / a.stage_bytes, 2, kMaxStages);
  launch_co_resident("moe_few_rows", kernel,
                     {.blocks = static_cast<unsigned>(plan.blocks),
                      .threads = (kWarpgroups + 2) * kWarpgroupThreads + 32,
                      .shared_bytes = static_cast<unsigned>(a.stages * a.stage_bytes + behind),
                      .cluster = static_cast<unsigned>(plan.splits)},
                     budget.sms, stream, maps, a);
}

MoeFewRowsShape plan_shape(const MoeShape& shape, int64_t rows) {
  return {.rows = rows,
          .hidden = shape.hidden,
          .num_experts = shape.num_experts,
          .experts_per_token = shape.experts_per_token,
          .inter = shape.inter,
          .shared_inter = shape.shared_inter};
}

int64_t shared_activation_bytes(const MoeShape& shape, int64_t rows) {
  constexpr int64_t kAlignment = 1024;
  return (rows * shape.shared_inter * 2 + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return shared_activation_bytes(shape, rows) +
         int64_t{rows} * shape.experts_per_token * shape.inter * 2;
}

int moe_few_rows_blocks(const SmBudget& budget) {
  return plan_moe_few_rows({.rows = 1, .hidden = 64}, budget.clusters).blocks;
}

bool moe_few_rows_takes(const MoeShape& shape, int32_t rows, const SmBudget& budget) {
  const MoeFewRowsShape sizes = plan_shape(shape, rows);
  return rows * int64_t{shape.experts_per_token} <= kMaxPairs &&
         plan_moe_few_rows(sizes, budget.clusters).takes(sizes);
}

void moe_few_rows(const MoeFewRowsPlan& plan, const MoeArguments& arguments, GpuStream stream) {
  const MoeShape& shape = arguments.shape;
  Arguments a = {};
  a.x = static_cast<const __nv_bfloat16*>(arguments.x);
  a.expert_ids = arguments.expert_ids;
  a.expert_weights = arguments.expert_weights;
  a.out = arguments.out;
  a.progress = arguments.progress;
  a.activations[kShared] = static_cast<__nv_bfloat16*>(arguments.workspace);
  a.activations[kRouted] = reinterpret_cast<__nv_bfloat16*>(
      static_cast<char*>(arguments.workspace) + shared_activation_bytes(shape, arguments.rows));
  a.rows = arguments.rows;
  a.hidden = shape.hidden;
  a.num_experts = shape.num_experts;
  a.experts_per_token = shape.experts_per_token;
  a.inter = shape.inter;
  a.shared_inter = shape.shared_inter;
  a.splits = plan.splits;
  a.clusters = plan.clusters;
  a.hidden_groups = plan.hidden_groups(shape.hidden);
  a.token_groups =
      std::min((arguments.rows + kGroupRows - 1) / kGroupRows, kTileTokens / kGroupRows);
  a.f32 = arguments.out_type == DType::kF32;
  const Maps maps = make_maps(
      shape,
      {{arguments.shared_gate_up, arguments.gate_up}, {arguments.shared_down, arguments.down}},
      a.hidden_groups);
  if (plan.warpgroups == 1) {
    launch_for<1>(plan, maps, a, arguments.budget, stream);
  } else {
    launch_for<2>(plan, maps, a, arguments.budget, stream);
  }
}

void moe_few_rows(const MoeArguments& arguments, GpuStream stream) {
  moe_few_rows(
      plan_moe_few_rows(plan_shape(arguments.shape, arguments.rows), arguments.budget.clusters),
      arguments, stream);
}

}  // namespace fathom::cuda
