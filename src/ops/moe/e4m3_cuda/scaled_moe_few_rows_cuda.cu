// What: scaled_moe for few tokens, bandwidth-bound by the weights of the experts that have tokens.
// One launch.
//
// Inputs/outputs: scaled_moe_cuda.h. Work of each CTA: moe_few_rows_plan.h.
//
// Layout and algorithm: those of moe_few_rows_cuda.cu, in e4m3. A ring buffer of stages of 256
// columns, two scale blocks: up to 64 tokens, up to 64 * kRowGroups rows of weights; beside each
// the scales of its tokens and its rows. Between the phases activations are quantized by blocks of
// 128 intermediate columns. A CTA may have computed only some columns of a block: they go to the
// workspace in fp32, and the CTA that adds a block's last columns to its counter reads all of them
// back and quantizes them (the warpgroup that has made the lists). An expert's weight is folded
// into the scale.
//
// Determinism: as moe_few_rows_cuda.cu. Which CTA quantizes does not affect the result.
//
// Limits: 192 rows (their sums), 512 experts, 4,096 pairs; a counter for each 128 intermediate
// columns of each tile of tokens. CTAs wait for one another: all of them must be co-resident.
//
// Measured: docs/kernels/scaled_moe.md.
#include <algorithm>

#include "base/math.h"
#include "device/cuda/cluster.cuh"
#include "device/cuda/co_resident.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_products_cuda.cuh"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_quantization_cuda.cuh"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_tokens_cuda.cuh"

namespace fathom::cuda {
namespace {

using namespace scaled_few_tokens;

constexpr int kCounters = kScaledMoeProgressWords - kNumPhases;
constexpr int kKernelThreads = (kMultiplyGroups + 2) * kWarpgroupThreads + 32;

template <int kRowGroups>
__global__ void __launch_bounds__(kKernelThreads, 1)
    scaled_moe_few_rows_kernel(const __grid_constant__ Maps maps,
                               const __grid_constant__ Arguments a) {
  constexpr int kMultiply = kMultiplyGroups * kWarpgroupThreads;
  constexpr int kCopy = kMultiply + kWarpgroupThreads, kGroup = kCopy + kWarpgroupThreads;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto* const sums = reinterpret_cast<float*>(memory + a.stages * a.stage_bytes);
  Tables& tables = *reinterpret_cast<Tables*>(reinterpret_cast<uint8_t*>(sums) + a.sum_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&tables.arrived[i], kWarpgroupThreads + 1);
      barrier_init(&tables.read[i], kRowGroups * 4);
    }
    for (uint64_t& listed : tables.listed) barrier_init(&listed, kGroupingThreads);
    for (uint64_t& computed : tables.computed) barrier_init(&computed, 1);
    barrier_init(&tables.piece_done, kRowGroups * 4);
    barrier_init(&tables.piece_taken, 1);
    fence_barrier_init();
    let_next_launch_begin();
  }
  __syncthreads();

  const ScaledWork work(a, tables, kRowGroups * kWarpgroupPairs);
  if (threadIdx.x < kMultiply) {
    wait_for_earlier_launches();
    Products<kRowGroups> products(memory, sums, tables, work, a);
    products.gate_up(kShared);
    work.wait_for_lists(0);
    products.gate_up(kRouted);
    products.end_exchange();
    products.down(kShared);
    work.wait_for_lists(1);
    products.down(kRouted);
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      named_barrier(kMultiplying, kMultiply);
    }
    using Rows = Products<kRowGroups>;
    write_out<Rows::kThreads, Rows::kStride, Rows::kTurns>(a, work.share(), sums);
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
      Quantization quantization(tables, work, a);
      quantization.run(kShared);
      quantization.run(kRouted);
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

template <int kRowGroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, const SmBudget& budget,
                GpuStream stream) {
  const auto kernel = scaled_moe_few_rows_kernel<kRowGroups>;
  stream.device().allow_shared_memory(kernel, kMoeSharedBytes);
  const int pairs = a.rows * a.experts_per_token;
  static_assert(sizeof(Tables) <= scaled_moe_table_bytes(0));
  a.sum_bytes = static_cast<int32_t>(scaled_moe_sum_bytes(a.rows, kRowGroups));
  const int behind = a.sum_bytes + scaled_moe_table_bytes(pairs);
  a.stage_bytes = moe_stage_bytes(a.rows, kRowGroups);
  a.stages = std::clamp(plan.ring_bytes / a.stage_bytes, 2, kMaxStages);
  // The stage count is even where warpgroups alternate, so that each stage always belongs to the
  // same one: otherwise a warpgroup could mistake a stage's previous fill for the one that it waits
  // for.
  if (kRowGroups == 1) a.stages &= ~1;
  launch_co_resident("scaled_moe_few_rows", kernel,
                     {.blocks = static_cast<unsigned>(plan.blocks),
                      .threads = kKernelThreads,
                      .shared_bytes = static_cast<unsigned>(a.stages * a.stage_bytes + behind),
                      .cluster = static_cast<unsigned>(plan.splits)},
                     budget.sms, stream, maps, a);
}

// Byte offsets into the workspace.
struct Workspace {
  int64_t wide[kNumPhases], activations[kNumPhases], scales[kNumPhases];
  int64_t bytes = 0;

  Workspace(const MoeShape& shape, int64_t rows) {
    const int64_t counts[kNumPhases] = {rows * shape.shared_inter,
                                        rows * shape.experts_per_token * shape.inter};
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += round_up(size, 256);
      return at;
    };
    for (const int phase : {kShared, kRouted}) {
      wide[phase] = take(counts[phase] * 4);
      activations[phase] = take(counts[phase]);
      scales[phase] = take(counts[phase] / 128 * 4);
    }
  }
};

MoeFewRowsShape plan_shape(const MoeShape& shape, int64_t rows) {
  return {.rows = rows,
          .hidden = shape.hidden,
          .num_experts = shape.num_experts,
          .experts_per_token = shape.experts_per_token,
          .inter = shape.inter,
          .shared_inter = shape.shared_inter,
          .scaled = true};
}

}  // namespace

bool scaled_moe_few_rows_takes(const MoeShape& shape, int32_t rows, const SmBudget& budget) {
  constexpr int64_t kMostRows = 192;
  const int64_t pairs = int64_t{rows} * shape.experts_per_token;
  const int64_t tiles = std::min<int64_t>(pairs, shape.num_experts) + pairs / kTileTokens;
  const int64_t counters =
      tiles * (shape.inter / 128) + ceil_div(rows, kTileTokens) * (shape.shared_inter / 128);
  const MoeFewRowsShape sizes = plan_shape(shape, rows);
  return rows <= kMostRows && pairs <= kMaxPairs && counters <= kCounters &&
         plan_moe_few_rows(sizes, budget.clusters).takes(sizes);
}

int64_t scaled_moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return Workspace(shape, rows).bytes;
}

void scaled_moe_few_rows(const MoeFewRowsPlan& plan, const ScaledMoeArguments& arguments,
                         GpuStream stream) {
  const MoeShape& shape = arguments.shape;
  const Workspace workspace(shape, arguments.rows);
  auto* const memory = static_cast<uint8_t*>(arguments.workspace);
  Arguments a = {};
  a.x = static_cast<const uint8_t*>(arguments.x);
  a.x_scales = arguments.x_scales;
  a.x_scales_stride = arguments.x_scales_stride;
  a.expert_ids = arguments.expert_ids;
  a.expert_weights = arguments.expert_weights;
  a.gate_up_scales[kShared] = arguments.shared_gate_up_scales;
  a.gate_up_scales[kRouted] = arguments.gate_up_scales;
  a.down_scales[kShared] = arguments.shared_down_scales;
  a.down_scales[kRouted] = arguments.down_scales;
  a.out = arguments.out;
  a.progress = arguments.progress;
  for (const int phase : {kShared, kRouted}) {
    a.wide[phase] = reinterpret_cast<float*>(memory + workspace.wide[phase]);
    a.activations[phase] = memory + workspace.activations[phase];
    a.activation_scales[phase] = reinterpret_cast<float*>(memory + workspace.scales[phase]);
  }
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
  a.form = arguments.form;
  a.f32 = arguments.out_type == DType::kF32;
  const Maps maps = make_maps(shape,
                              {{arguments.shared_gate_up, arguments.gate_up},
                               {arguments.shared_down, arguments.down},
                               true},
                              a.hidden_groups);
  if (plan.warpgroups == 1) {
    launch_for<1>(plan, maps, a, arguments.budget, stream);
  } else {
    launch_for<2>(plan, maps, a, arguments.budget, stream);
  }
}

void scaled_moe_few_rows(const ScaledMoeArguments& arguments, GpuStream stream) {
  scaled_moe_few_rows(
      plan_moe_few_rows(plan_shape(arguments.shape, arguments.rows), arguments.budget.clusters),
      arguments, stream);
}

}  // namespace fathom::cuda
