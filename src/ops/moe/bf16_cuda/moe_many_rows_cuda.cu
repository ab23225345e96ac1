// What: out[t] = mlp_shared(x[t]) + sum over t's experts of weight * mlp_e(x[t]) for many tokens.
//
// Inputs/outputs: moe_cuda.h. Workspace: moe_many_rows_plan.h.
//
// Algorithm, five launches, each of which reads on the device what the one before has decided:
//   1. sort, 2. gather: rows of x by expert, an expert's together (expert_rows_cuda.h)
//   3. gate and up: activations = silu(gate x) * (up x); rows of gate and of up are loaded in turn,
//      8 of each, so that both of a pair are in one thread's registers; includes the shared expert
//   4. down, likewise
//   5. combine: each token's weighted sum in ascending order of the experts, the shared one last
// Grouped GEMMs: expert_products_cuda.cuh, persistent CTAs that take tile after tile of the list.
// Both launches read the list and issue their first weight loads before the PDL wait: they begin
// when sort has ended. Rows without a token are computed from undefined memory; their results are
// never read.
//
// Determinism: a row's sums do not depend on its place, nor on which CTA computes them; each
// token's are added in a fixed order.
//
// Limits: kMostMoeExperts experts, tokens x experts a token below 2^31. Experts' results are
// rounded to bf16 before they are added.
//
// Measured: docs/kernels/moe_many_rows.md.
#include <cuda_bf16.h>

#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "ops/linear/many_rows_plan.h"
#include "ops/linear/many_rows_tile_cuda.cuh"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/experts_cuda/expert_products_cuda.cuh"
#include "ops/moe/experts_cuda/expert_rows_cuda.h"
#include "ops/moe/plans/moe_many_rows_plan.h"

namespace fathom::cuda {
namespace {

// ---- grouped GEMMs

template <typename Shape, bool kGatedRows>
struct ExpertWork {
  static constexpr bool kGated = kGatedRows;
  static constexpr int kOutColumns = kGated ? Shape::kWeightRows / 2 : Shape::kWeightRows;
  static constexpr int kTileGroups = kOutColumns / 8;

  struct Side {
    CUtensorMap weights, tokens[Shape::kTokenUnits];
    __nv_bfloat16* out = nullptr;
    int out_columns = 0;
    int k_steps = 0;
    int groups =
        0;  // groups of 8 rows (or 8 of gate and 8 of up) from an expert's first to the next one's
  };

  Side experts, shared;
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int* tiles_taken;  // dynamic tile counter, beyond each CTA's first tile
  int column_tiles;
  bool one_row_tile_an_expert;  // for most experts
  TileRaster shared_raster;
  int shared_tiles, rows;

  // Sort has ended, but this launch may not have executed its PDL wait: sort's output is read past
  // the L1.
  __device__ int num_tiles() const { return shared_tiles + __ldcg(num_row_tiles) * column_tiles; }

  // Dynamic scheduling: experts' tiles take unequal times, and CTAs get unequal shares of the
  // memory bandwidth.
  __device__ int after(int) const {
    return static_cast<int>(gridDim.x) + atomicAdd(tiles_taken, 1);
  }

  // The shared expert's tiles, which stay in the L2 with many rows, are interleaved with the
  // others, most of which wait for memory. They are not among the last tiles, because they can take
  // longer.
  __device__ ExpertTile tile(int index, int num_tiles) const {
    const auto shared_count = static_cast<uint32_t>(shared_tiles);
    const uint32_t among = max(shared_tiles, num_tiles - num_tiles / 4);
    const auto before = [&](int i) {
      return static_cast<int>(min(static_cast<uint32_t>(i) * shared_count / among, shared_count));
    };
    const int shared_before = before(index);
    return before(index + 1) > shared_before ? shared_tile(shared_before)
                                             : expert_tile(index - shared_before);
  }

  __device__ ExpertTile shared_tile(int index) const {
    const auto [batch, row_tile, column_tile] = shared_raster.place(index);
    const int row = row_tile * Shape::kTokens;
    return make(shared, row, min(rows - row, Shape::kTokens), column_tile, 0);
  }

  // An expert's tiles are contiguous; those with the same columns come first.
  __device__ ExpertTile expert_tile(int index) const {
    ExpertRowTile expert;
    const auto* entry = reinterpret_cast<const int4*>(row_tiles + index / column_tiles);
    static_assert(sizeof(expert) == 2 * sizeof(int4));
    reinterpret_cast<int4*>(&expert)[0] = __ldcg(entry);
    reinterpret_cast<int4*>(&expert)[1] = __ldcg(entry + 1);
    const int within = index - expert.first_tile * column_tiles;
    const int column_tile = within / expert.num_tiles;
    const int row_tile = within - column_tile * expert.num_tiles;
    const int first = row_tile * expert.units / expert.num_tiles,
              end = (row_tile + 1) * expert.units / expert.num_tiles;
    ExpertTile tile = make(experts, expert.first_row + first * kExpertRowUnit,
                           (end - first) * kExpertRowUnit, column_tile, expert.expert);
    tile.weights_are_read_once = one_row_tile_an_expert;
    return tile;
  }

  __device__ ExpertTile make(const Side& side, int row, int tokens, int column_tile,
                             int expert) const {
    const int column = column_tile * kOutColumns;
    ExpertTile tile;
    tile.weights = &side.weights;
    tile.token_units = (tokens + Shape::kTokenUnit - 1) / Shape::kTokenUnit;
    tile.tokens = &side.tokens[tile.token_units - 1];
    tile.first_group = expert * side.groups + column_tile * kTileGroups;
    tile.first_token = row;
    tile.out.data = side.out + int64_t{row} * side.out_columns + column;
    tile.out.row_stride = side.out_columns;
    tile.out.tokens = tokens;
    tile.out.columns = side.out_columns - column;
    tile.out.k_steps = side.k_steps;
    return tile;
  }
};

template <typename Shape, bool kGated>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    multiply_experts(const __grid_constant__ ExpertWork<Shape, kGated> work) {
  run_expert_tiles<Shape>(work);
}

// ---- launches

MoeManyRowsPlan plan_for(const MoeShape& shape, int32_t rows) {
  return plan_moe_many_rows(moe_many_rows_sizes(shape, rows));
}

// Operands of both GEMMs, of the routed experts or of the shared one.
struct Operands {
  const void* x;
  const void* weight;  // [experts, n of gate and up or of down, k]
  void* out;
  int64_t rows, experts, n, k;
};

// Boxes of 128 rows, 64 columns: of gate and up 8 rows each in turn.
CUtensorMap weight_map(const Operands& operands, bool gated, int slabs) {
  const int64_t halves = gated ? 2 : 1, half_rows = operands.n / halves;
  const Axis axes[] = {
      {.size = 64, .stride = 1, .box = 64},
      {.size = 8, .stride = operands.k, .box = 8},
      {.size = halves, .stride = half_rows * operands.k, .box = static_cast<int>(halves)},
      // The last up's rows are the first one's, half_rows further: no box begins there.
      {.size = (halves * operands.experts - (halves - 1)) * half_rows / 8,
       .stride = 8 * operands.k,
       .box = static_cast<int>(16 / halves)},
      {.size = operands.k / 64, .stride = 64, .box = slabs}};
  return bf16_map(operands.weight, axes);
}

template <typename Shape, bool kGated>
typename ExpertWork<Shape, kGated>::Side side(const Operands& operands) {
  typename ExpertWork<Shape, kGated>::Side made;
  made.weights = weight_map(operands, kGated, Shape::kSlabs);
  for (int i = 0; i < Shape::kTokenUnits; ++i) {
    const Axis axes[] = {
        {.size = 64, .stride = 1, .box = 64},
        {.size = operands.rows, .stride = operands.k, .box = (i + 1) * Shape::kTokenUnit},
        {.size = operands.k / 64, .stride = 64, .box = Shape::kSlabs}};
    made.tokens[i] = bf16_map(operands.x, axes);
  }
  made.out = static_cast<__nv_bfloat16*>(operands.out);
  made.out_columns = static_cast<int>(kGated ? operands.n / 2 : operands.n);
  made.k_steps = static_cast<int>((operands.k / 64 + Shape::kSlabs - 1) / Shape::kSlabs);
  made.groups = static_cast<int>(operands.n / 8);
  return made;
}

struct Products {
  Operands experts, shared;  // shared.n is 0 without a shared expert
  int32_t rows;
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int32_t* tiles_taken;
  bool one_row_tile_an_expert;
  int spare_sms;
};

template <typename Shape, bool kGated>
void launch_products(const Products& products, GpuStream stream) {
  using Work = ExpertWork<Shape, kGated>;
  const auto column_tiles_of = [](const typename Work::Side& side) {
    return (side.out_columns + Work::kOutColumns - 1) / Work::kOutColumns;
  };
  Work work = {};
  work.experts = side<Shape, kGated>(products.experts);
  work.row_tiles = products.row_tiles;
  work.num_row_tiles = products.num_row_tiles;
  work.tiles_taken = products.tiles_taken;
  work.one_row_tile_an_expert = products.one_row_tile_an_expert;
  work.column_tiles = column_tiles_of(work.experts);
  work.rows = products.rows;
  if (products.shared.n > 0) {
    work.shared = side<Shape, kGated>(products.shared);
    const ManyRowsPlan plan =
        plan_many_rows({.rows = products.rows, .n = products.shared.n, .k = products.shared.k},
                       {.groups = Shape::kTokens / 64, .columns = Shape::kWeightRows},
                       stream.device().num_multiprocessors());
    work.shared_raster = {.row_tiles = plan.row_tiles,
                          .column_tiles = column_tiles_of(work.shared),
                          .band = plan.band,
                          .band_of_columns = plan.band_of_columns};
    work.shared_tiles = work.shared_raster.row_tiles * work.shared_raster.column_tiles;
  }
  constexpr int kBytes = sizeof(ExpertTileMemory<Shape>);
  stream.device().allow_shared_memory(multiply_experts<Shape, kGated>, kBytes);
  launch(
      multiply_experts<Shape, kGated>,
      {.blocks = static_cast<unsigned>(stream.device().num_multiprocessors() - products.spare_sms),
       .threads = Shape::kThreads,
       .shared_bytes = kBytes},
      stream, work);
}

template <bool kGated>
void launch_products(const MoeManyRowsPlan& plan, const Products& products, GpuStream stream) {
  if (plan.tile_tokens == 64) {
    launch_products<ExpertTileShape<64, 4, 2>, kGated>(products, stream);
  } else if (plan.tile_tokens == 128) {
    launch_products<ExpertTileShape<128, 3, 2>, kGated>(products, stream);
  } else {
    launch_products<ExpertTileShape<256, 4, 1>, kGated>(products, stream);
  }
}

}  // namespace

MoeManyRowsSizes moe_many_rows_sizes(const MoeShape& shape, int64_t rows) {
  return {.rows = rows,
          .hidden = shape.hidden,
          .num_experts = shape.num_experts,
          .experts_per_token = shape.experts_per_token,
          .inter = shape.inter,
          .shared_inter = shape.shared_inter};
}

int64_t moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return plan_for(shape, rows).workspace_bytes;
}

void moe_many_rows_products(const MoeArguments& a, const MoeManyRowsPlan& plan, GpuStream stream) {
  const MoeShape& s = a.shape;
  auto* workspace = static_cast<uint8_t*>(a.workspace);
  const auto* num_row_tiles = reinterpret_cast<const int32_t*>(workspace + plan.num_row_tiles_at);
  auto* tiles_taken = reinterpret_cast<int32_t*>(workspace + plan.tiles_taken_at);
  const auto* row_tiles = reinterpret_cast<const ExpertRowTile*>(workspace + plan.row_tiles_at);
  void* sorted_x = workspace + plan.sorted_x_at;
  void* activations = workspace + plan.activations_at;
  void* shared_activations = workspace + plan.shared_activations_at;
  void* shared_result = workspace + plan.shared_result_at;
  launch_products<true>(plan,
                        {.experts = {sorted_x, a.gate_up, activations, plan.sorted_rows,
                                     s.num_experts, 2 * s.inter, s.hidden},
                         .shared = {a.x, a.shared_gate_up, shared_activations, a.rows, 1,
                                    2 * s.shared_inter, s.hidden},
                         .rows = a.rows,
                         .row_tiles = row_tiles,
                         .num_row_tiles = num_row_tiles,
                         .tiles_taken = tiles_taken,
                         .one_row_tile_an_expert = plan.one_row_tile_an_expert,
                         .spare_sms = plan.spare_sms},
                        stream);
  launch_products<false>(plan,
                         {.experts = {activations, a.down, sorted_x, plan.sorted_rows,
                                      s.num_experts, s.hidden, s.inter},
                          .shared = {shared_activations, a.shared_down, shared_result, a.rows, 1,
                                     s.shared_inter > 0 ? s.hidden : 0, s.shared_inter},
                          .rows = a.rows,
                          .row_tiles = row_tiles,
                          .num_row_tiles = num_row_tiles,
                          .tiles_taken = tiles_taken + 1,
                          .one_row_tile_an_expert = plan.one_row_tile_an_expert,
                          .spare_sms = plan.spare_sms},
                         stream);
}

void moe_many_rows(const MoeArguments& a, GpuStream stream) {
  const MoeShape& s = a.shape;
  const MoeManyRowsPlan plan = plan_for(s, a.rows);
  auto* workspace = static_cast<uint8_t*>(a.workspace);
  auto* positions = reinterpret_cast<int32_t*>(workspace + plan.positions_at);
  void* sorted_x = workspace + plan.sorted_x_at;

  sort_by_expert({.expert_ids = a.expert_ids,
                  .pairs = a.rows * s.experts_per_token,
                  .num_experts = s.num_experts,
                  .tile_units = plan.tile_tokens / kExpertRowUnit,
                  .positions = positions,
                  .row_tiles = reinterpret_cast<ExpertRowTile*>(workspace + plan.row_tiles_at),
                  .num_row_tiles = reinterpret_cast<int32_t*>(workspace + plan.num_row_tiles_at),
                  .tiles_taken = reinterpret_cast<int32_t*>(workspace + plan.tiles_taken_at)},
                 stream);
  gather_rows({.x = a.x,
               .sorted_x = sorted_x,
               .positions = positions,
               .rows = a.rows,
               .vectors = s.hidden / 8,
               .experts_per_token = s.experts_per_token},
              stream);
  moe_many_rows_products(a, plan, stream);
  combine_experts(
      {.results = sorted_x,
       .shared_results = s.shared_inter > 0 ? workspace + plan.shared_result_at : nullptr,
       .positions = positions,
       .weights = a.expert_weights,
       .out = a.out,
       .out_type = a.out_type,
       .rows = a.rows,
       .hidden = s.hidden,
       .experts_per_token = s.experts_per_token},
      stream);
}

}  // namespace fathom::cuda
