// What: out[t] = addend[t] + sum over t's experts e of weight * mlp_e(x[t]) with four-bit experts,
// for many tokens.
//
// Inputs/outputs: four_bit_moe_cuda.h. Workspace: plans/moe_many_rows_plan.h.
//
// Algorithm: the five launches of bf16_cuda/moe_many_rows_cuda.cu, with four-bit weights in the
// grouped GEMMs (expert_products_cuda.cuh) and without a shared expert: sort, gather, gate and up,
// down, combine. A weight is rounded to bf16 once more than in few rows: code * scale.
//
// Determinism: a row's sums do not depend on its place, nor on which CTA computes them; each
// token's are added in a fixed order.
//
// Limits: kMostMoeExperts experts, tokens x experts a token below 2^31. Experts' results are
// rounded to bf16 before they are added.
//
// Measured: docs/kernels/four_bits.md.
#include <cuda_bf16.h>

#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/experts_cuda/expert_products_cuda.cuh"
#include "ops/moe/experts_cuda/expert_rows_cuda.h"
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"

namespace fathom::cuda {
namespace {

// ---- grouped GEMMs

template <typename Shape, bool kGatedRows>
struct FourBitWork {
  static constexpr bool kGated = kGatedRows;
  static constexpr int kOutColumns = kGated ? Shape::kWeightRows / 2 : Shape::kWeightRows;
  static constexpr int kTilePanels = Shape::kWeightRows / kFourBitPanelRows;

  CUtensorMap tokens[Shape::kTokenUnits];
  const uint8_t* weights;  // [experts][panels][blocks]
  __nv_bfloat16* out;      // [sorted rows, out_columns]
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int* tiles_taken;  // dynamic tile counter, beyond each CTA's first tile
  int panels, blocks, out_columns, column_tiles;
  bool one_row_tile_an_expert;  // for most experts

  // Sort has ended, but this launch may not have executed its PDL wait: sort's output is read past
  // the L1.
  __device__ int num_tiles() const { return __ldcg(num_row_tiles) * column_tiles; }

  __device__ int after(int) const {
    return static_cast<int>(gridDim.x) + atomicAdd(tiles_taken, 1);
  }

  // An expert's tiles are contiguous; those with the same columns come first.
  __device__ ExpertTile tile(int index, int) const {
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
    const int row = expert.first_row + first * kExpertRowUnit;
    const int column = column_tile * kOutColumns, panel = column_tile * kTilePanels;
    ExpertTile tile;
    tile.panels = weights + (static_cast<int64_t>(expert.expert) * panels + panel) * blocks *
                                kFourBitBlockBytes;
    tile.num_panels = min(kTilePanels, panels - panel);
    tile.first_token = row;
    tile.out.tokens = (end - first) * kExpertRowUnit;
    tile.token_units = (tile.out.tokens + Shape::kTokenUnit - 1) / Shape::kTokenUnit;
    tile.tokens = &tokens[tile.token_units - 1];
    tile.weights_are_read_once = one_row_tile_an_expert;
    tile.out.data = out + int64_t{row} * out_columns + column;
    tile.out.row_stride = out_columns;
    tile.out.columns = out_columns - column;
    tile.out.k_steps = (blocks + Shape::kSlabs - 1) / Shape::kSlabs;
    tile.out.blocks = blocks;
    return tile;
  }
};

template <typename Shape, bool kGated>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    multiply_experts(const __grid_constant__ FourBitWork<Shape, kGated> work) {
  run_expert_tiles<Shape>(work);
}

// ---- launches

struct Product {
  const void* x;  // [rows, k]
  const void* weights;
  void* out;
  int64_t rows, n, k;  // n of gate and up, or of down
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int32_t* tiles_taken;
};

template <typename Shape, bool kGated>
void launch_product(const MoeManyRowsPlan& plan, const Product& product, GpuStream stream) {
  using Work = FourBitWork<Shape, kGated>;
  Work work = {};
  for (int i = 0; i < Shape::kTokenUnits; ++i) {
    const Axis axes[] = {
        {.size = 64, .stride = 1, .box = 64},
        {.size = product.rows, .stride = product.k, .box = (i + 1) * Shape::kTokenUnit},
        {.size = product.k / 64, .stride = 64, .box = Shape::kSlabs}};
    work.tokens[i] = bf16_map(product.x, axes);
  }
  work.weights = static_cast<const uint8_t*>(product.weights);
  work.out = static_cast<__nv_bfloat16*>(product.out);
  work.row_tiles = product.row_tiles;
  work.num_row_tiles = product.num_row_tiles;
  work.tiles_taken = product.tiles_taken;
  work.panels = static_cast<int>(product.n / kFourBitPanelRows);
  work.blocks = static_cast<int>(product.k / kFourBitBlockColumns);
  work.out_columns = static_cast<int>(kGated ? product.n / 2 : product.n);
  work.column_tiles = (work.out_columns + Work::kOutColumns - 1) / Work::kOutColumns;
  work.one_row_tile_an_expert = plan.one_row_tile_an_expert;
  constexpr int kBytes = sizeof(ExpertTileMemory<Shape>);
  stream.device().allow_shared_memory(multiply_experts<Shape, kGated>, kBytes);
  launch(multiply_experts<Shape, kGated>,
         {.blocks = static_cast<unsigned>(stream.device().num_multiprocessors()),
          .threads = Shape::kThreads,
          .shared_bytes = kBytes},
         stream, work);
}

template <ExpertWeights kForm, bool kGated>
void launch_product(const MoeManyRowsPlan& plan, const Product& product, GpuStream stream) {
  if (plan.tile_tokens == 64) {
    launch_product<ExpertTileShape<64, 6, 2, kForm>, kGated>(plan, product, stream);
  } else if (plan.tile_tokens == 128) {
    launch_product<ExpertTileShape<128, 4, 2, kForm>, kGated>(plan, product, stream);
  } else {
    launch_product<ExpertTileShape<256, 5, 1, kForm>, kGated>(plan, product, stream);
  }
}

template <bool kGated>
void launch_product(FourBitCode code, const MoeManyRowsPlan& plan, const Product& product,
                    GpuStream stream) {
  if (code == FourBitCode::kInteger) {
    launch_product<ExpertWeights::kFourBitInteger, kGated>(plan, product, stream);
  } else {
    launch_product<ExpertWeights::kFourBitE2m1, kGated>(plan, product, stream);
  }
}

MoeManyRowsPlan plan_for(const MoeShape& shape, int32_t rows) {
  MoeShape routed = shape;
  routed.shared_inter = 0;
  return plan_moe_many_rows(moe_many_rows_sizes(routed, rows));
}

}  // namespace

int64_t four_bit_moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return plan_for(shape, rows).workspace_bytes;
}

void four_bit_moe_many_rows(const FourBitMoeArguments& a, GpuStream stream) {
  const MoeShape& s = a.shape;
  if (a.rows == 0) return;
  const MoeManyRowsPlan plan = plan_for(s, a.rows);
  auto* const workspace = static_cast<uint8_t*>(a.workspace);
  auto* const positions = reinterpret_cast<int32_t*>(workspace + plan.positions_at);
  auto* const row_tiles = reinterpret_cast<ExpertRowTile*>(workspace + plan.row_tiles_at);
  auto* const num_row_tiles = reinterpret_cast<int32_t*>(workspace + plan.num_row_tiles_at);
  auto* const tiles_taken = reinterpret_cast<int32_t*>(workspace + plan.tiles_taken_at);
  void* const sorted_x = workspace + plan.sorted_x_at;
  void* const activations = workspace + plan.activations_at;
  sort_by_expert({.expert_ids = a.expert_ids,
                  .pairs = a.rows * s.experts_per_token,
                  .num_experts = s.num_experts,
                  .tile_units = plan.tile_tokens / kExpertRowUnit,
                  .positions = positions,
                  .row_tiles = row_tiles,
                  .num_row_tiles = num_row_tiles,
                  .tiles_taken = tiles_taken},
                 stream);
  gather_rows({.x = a.x,
               .sorted_x = sorted_x,
               .positions = positions,
               .rows = a.rows,
               .vectors = s.hidden / 8,
               .experts_per_token = s.experts_per_token},
              stream);
  launch_product<true>(a.code, plan,
                       {.x = sorted_x,
                        .weights = a.gate_up,
                        .out = activations,
                        .rows = plan.sorted_rows,
                        .n = int64_t{2} * s.inter,
                        .k = s.hidden,
                        .row_tiles = row_tiles,
                        .num_row_tiles = num_row_tiles,
                        .tiles_taken = tiles_taken},
                       stream);
  launch_product<false>(a.code, plan,
                        {.x = activations,
                         .weights = a.down,
                         .out = sorted_x,
                         .rows = plan.sorted_rows,
                         .n = s.hidden,
                         .k = s.inter,
                         .row_tiles = row_tiles,
                         .num_row_tiles = num_row_tiles,
                         .tiles_taken = tiles_taken + 1},
                        stream);
  combine_experts({.results = sorted_x,
                   .shared_results = a.addend,
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
