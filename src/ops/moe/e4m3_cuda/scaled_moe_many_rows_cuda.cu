// What: out[t] = mlp_shared(x[t]) + sum over t's experts of weight * mlp_e(x[t]) in e4m3 with
// block-wise scales, for many tokens.
//
// Inputs/outputs: scaled_moe_cuda.h. Workspace: moe_many_rows_plan.h.
//
// Algorithm, the five launches of moe_many_rows_cuda.cu:
//   1. sort, 2. gather: rows of x and their scales by expert, an expert's together
//      (expert_rows_cuda.h)
//   3. gate and up: activations = quantized(silu(gate x) * (up x)); includes the shared expert
//   4. down, likewise, in bf16
//   5. combine: each token's weighted sum in ascending order of the experts, the shared one last
// Grouped GEMMs: scaled_expert_products_cuda.cuh, persistent CTAs that take tile after tile of the
// list. Both launches read the list and issue their first weight loads before the PDL wait: they
// begin when sort has ended. Rows without a token are computed from undefined memory; their results
// are never read.
//
// Determinism: a row's sums do not depend on its place, nor on which CTA computes them; each
// token's are added in a fixed order.
//
// Limits: kMostMoeExperts experts, tokens x experts a token below 2^31. Experts' results are
// rounded to bf16 before they are added.
//
// Measured: docs/kernels/scaled_moe_many_rows.md.
#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "ops/linear/many_rows_plan.h"
#include "ops/linear/many_rows_tile_cuda.cuh"
#include "ops/moe/e4m3_cuda/scaled_expert_products_cuda.cuh"
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"
#include "ops/moe/experts_cuda/expert_rows_cuda.h"
#include "ops/moe/plans/moe_many_rows_plan.h"

namespace fathom::cuda {
namespace {

// Indexed by the tokens of a tile: fewer tokens leave room for more weight stages.
constexpr int kStagesOf[] = {8, 6, 5, 4};
template <bool kGated, int kTokens>
using ScaledTiles =
    ScaledExpertShape<kGated, kTokens, kTokens == 192 ? 3 : 2, kStagesOf[kTokens / 64 - 1]>;

template <typename TileShape>
struct ScaledExpertWork {
  using Shape = TileShape;
  static constexpr bool kGated = Shape::kGated;
  // Columns of a tile, and of a CTA's half.
  static constexpr int kTileColumns = kGated ? Shape::kTileRows / 2 : Shape::kTileRows;
  static constexpr int kOutColumns = kTileColumns / Shape::kBlocks;
  static constexpr int kShortTile = 4;  // steps
  // Rows of one coordinate of the weights' boxes.
  static constexpr int kRowsTogether = kGated ? 16 : 1;

  struct Side {
    CUtensorMap weights, tokens[Shape::kTokenUnits];
    const float* token_scales = nullptr;  // [k_steps, rows]
    int64_t token_scales_stride = 0;
    const float* weight_scales = nullptr;
    uint8_t* out = nullptr;
    float* out_scales = nullptr;  // of gate and up: [out_columns / 128, rows]
    int64_t out_scales_stride = 0;
    int out_columns = 0;
    int weight_rows = 0;  // weight rows of an expert
    int k_steps = 0;
  };

  Side experts, shared;
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int* tiles_taken;  // dynamic tile counter beyond each cluster's first tile; null: static schedule
  int column_tiles, tile_units;  // units of kExpertRowUnit rows in an expert's tile, at most
  bool one_row_tile_an_expert;   // for most experts
  TileRaster shared_raster;
  int shared_tiles, rows;
  bool shared_first;  // otherwise interleaved with the others
  ScaleForm form;

  // Sort has ended, but this launch may not have executed its PDL wait: sort's output is read past
  // the L1.
  __device__ int num_tiles() const { return shared_tiles + __ldcg(num_row_tiles) * column_tiles; }

  // Dynamic scheduling is the default: experts' tiles take unequal times, and CTAs get unequal
  // shares of the memory bandwidth. Short tiles have a fixed order: they end before the atomic
  // returns.
  __device__ bool in_fixed_order() const {
    return experts.k_steps <= kShortTile || tiles_taken == nullptr;
  }
  // Serpentine order over the clusters: where full and small tiles alternate, no cluster gets all
  // the full ones.
  __device__ int in_pass(int pass) const {
    const auto clusters = static_cast<int>(gridDim.x) / Shape::kBlocks;
    const auto cluster = static_cast<int>(blockIdx.x) / Shape::kBlocks;
    return pass * clusters + (pass % 2 == 0 ? cluster : clusters - 1 - cluster);
  }
  __device__ int next() const {
    return static_cast<int>(gridDim.x) / Shape::kBlocks + atomicAdd(tiles_taken, 1);
  }

  // The shared expert's tiles, which stay in the L2 with many rows, are interleaved with the
  // others, most of which wait for memory. They are not among the last tiles, because they can take
  // longer. With very many rows they come first: interleaved, each would miss the L2 for its rows
  // and weights.
  __device__ ScaledExpertTile tile(int index, int num_tiles, bool waited, int rank) const {
    if (shared_tiles == 0) return expert_tile(index, waited, rank);
    const auto shared_count = static_cast<uint32_t>(shared_tiles);
    const uint32_t among =
        shared_first ? shared_tiles : max(shared_tiles, num_tiles - num_tiles / 4);
    const auto before = [&](int i) {
      return static_cast<int>(min(static_cast<uint32_t>(i) * shared_count / among, shared_count));
    };
    const int shared_before = before(index);
    return before(index + 1) > shared_before ? shared_tile(shared_before, rank)
                                             : expert_tile(index - shared_before, waited, rank);
  }

  __device__ static ExpertRowTile past_l1(const ExpertRowTile* entry) {
    ExpertRowTile copy;
    static_assert(sizeof(copy) == 2 * sizeof(int4));
    reinterpret_cast<int4*>(&copy)[0] = __ldcg(reinterpret_cast<const int4*>(entry));
    reinterpret_cast<int4*>(&copy)[1] = __ldcg(reinterpret_cast<const int4*>(entry) + 1);
    return copy;
  }

  __device__ ScaledExpertTile shared_tile(int index, int rank) const {
    const auto [batch, row_tile, column_tile] = shared_raster.place(index);
    const int row = row_tile * Shape::kTokens;
    return make(shared, row, min(rows - row, Shape::kTokens), column_tile, 0, rank);
  }

  // An expert's tiles are contiguous; those with the same columns come first.
  __device__ ScaledExpertTile expert_tile(int index, bool waited, int rank) const {
    // The same entries are read repeatedly: through the L1 after the PDL wait, when it holds
    // nothing stale.
    const ExpertRowTile* entry = row_tiles + index / column_tiles;
    const ExpertRowTile expert = waited ? *entry : past_l1(entry);
    const int within = index - expert.first_tile * column_tiles;
    const int column_tile = within / expert.num_tiles;
    const int row_tile = within - column_tile * expert.num_tiles;
    // All tiles of an expert are equal except the last, in multiples of a warpgroup's tokens.
    constexpr int kGroupUnits = 64 / kExpertRowUnit;
    const int groups = (expert.units + kGroupUnits - 1) / kGroupUnits;
    const int each = (groups + expert.num_tiles - 1) / expert.num_tiles * kGroupUnits;
    const int first = min(row_tile * each, expert.units), end = min(first + each, expert.units);
    ScaledExpertTile tile = make(experts, expert.first_row + first * kExpertRowUnit,
                                 (end - first) * kExpertRowUnit, column_tile, expert.expert, rank);
    tile.weights_are_read_once = one_row_tile_an_expert;
    return tile;
  }

  __device__ ScaledExpertTile make(const Side& side, int row, int tokens, int column_tile,
                                   int expert, int rank) const {
    constexpr int kOutBytes = kGated ? 1 : 2;
    const int column = column_tile * kTileColumns + rank * kOutColumns;
    ScaledExpertTile tile;
    tile.weights = &side.weights;
    constexpr int kBoxes = Shape::kTokenUnit * Shape::kBlocks;
    tile.tokens.units = (tokens + kBoxes - 1) / kBoxes;
    tile.tokens.map = &side.tokens[tile.tokens.units - 1];
    tile.first_row = (expert * side.weight_rows + column) / kRowsTogether;
    tile.tokens.first = row;
    tile.out.data = side.out + (int64_t{row} * side.out_columns + column) * kOutBytes;
    if constexpr (kGated) {
      tile.out.scales = side.out_scales + column_tile * side.out_scales_stride + row;
    }
    // If out's columns end with the first CTA's, the second CTA's results are discarded.
    const int scaled_column = min(column, side.out_columns - 1);
    const int scale_row = (expert * side.weight_rows + scaled_column) / 128;
    tile.scales.tokens = side.token_scales + row;
    tile.scales.tokens_stride = side.token_scales_stride;
    tile.scales.weights = side.weight_scales + int64_t{scale_row} * side.k_steps;
    tile.scales.second = side.out_columns / 128 * side.k_steps;
    tile.out.row_stride = side.out_columns;
    tile.out.tokens = tokens;
    tile.out.columns = side.out_columns - column;
    tile.out.k_steps = side.k_steps;
    tile.out.form = form;
    return tile;
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    multiply_scaled_experts(const __grid_constant__ ScaledExpertWork<Shape> work) {
  run_scaled_expert_tiles<Shape>(work);
}

// ---- launches

MoeManyRowsPlan scaled_plan_for(const MoeShape& shape, int32_t rows) {
  return plan_moe_many_rows(scaled_moe_many_rows_sizes(shape, rows));
}

// Operands of both GEMMs, of the routed experts or of the shared one.
struct ScaledOperands {
  const void* x;
  const float* x_scales;
  int64_t x_scales_stride;
  const void* weight;  // [experts, n of gate and up or of down, k]
  const float* weight_scales;
  void* out;
  float* out_scales;  // of gate and up
  int64_t out_scales_stride;
  int64_t rows, experts, n, k;
};

constexpr int64_t kBlockRows = ScaledTiles<false, 64>::kWeightRows;

CUtensorMap weight_map(const ScaledOperands& o) {
  const Axis axes[] = {{.size = o.k, .stride = 1, .box = 128},
                       {.size = o.experts * o.n, .stride = o.k, .box = kBlockRows},
                       {.size = 1, .stride = o.experts * o.n * o.k, .box = 1}};
  return e4m3_map(o.weight, axes);
}

// 64 rows of gate, then the same of up: of each 16 the even ones first, then the odd ones.
CUtensorMap gated_weight_map(const ScaledOperands& o) {
  const int64_t half_rows = o.n / 2;
  const Axis axes[] = {
      {.size = o.k, .stride = 1, .box = 128},
      {.size = 8, .stride = 2 * o.k, .box = 8},
      {.size = 2, .stride = o.k, .box = 2},
      // The last up's rows are the first one's, half_rows further: no box begins there.
      {.size = (2 * o.experts - 1) * half_rows / 16, .stride = 16 * o.k, .box = kBlockRows / 32},
      {.size = 2, .stride = half_rows * o.k, .box = 2}};
  return e4m3_map(o.weight, axes);
}

template <typename Work>
typename Work::Side side(const ScaledOperands& o) {
  using Shape = typename Work::Shape;
  constexpr bool kGated = Shape::kGated;
  typename Work::Side made;
  made.weights = kGated ? gated_weight_map(o) : weight_map(o);
  for (int i = 0; i < Shape::kTokenUnits; ++i) {
    const Axis axes[] = {{.size = o.k, .stride = 1, .box = 128},
                         {.size = o.rows, .stride = o.k, .box = (i + 1) * Shape::kTokenUnit}};
    made.tokens[i] = e4m3_map(o.x, axes);
  }
  made.token_scales = o.x_scales;
  made.token_scales_stride = o.x_scales_stride;
  made.weight_scales = o.weight_scales;
  made.out = static_cast<uint8_t*>(o.out);
  made.out_scales = o.out_scales;
  made.out_scales_stride = o.out_scales_stride;
  made.out_columns = static_cast<int>(kGated ? o.n / 2 : o.n);
  made.weight_rows = static_cast<int>(o.n);
  made.k_steps = static_cast<int>(o.k / 128);
  return made;
}

struct ScaledProducts {
  ScaledOperands experts, shared;  // shared.n is 0 without a shared expert
  int32_t rows;
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int32_t* tiles_taken;
  int tile_units;
  bool one_row_tile_an_expert;
  int spare_sms;
  ScaleForm form;
};

constexpr int kRowsOfSharedFirst = 2048;

template <typename Shape>
void launch_tiles(const ScaledProducts& products, GpuStream stream) {
  using Work = ScaledExpertWork<Shape>;
  const auto column_tiles_of = [](const typename Work::Side& side) {
    return (side.out_columns + Work::kTileColumns - 1) / Work::kTileColumns;
  };
  Work work = {};
  work.experts = side<Work>(products.experts);
  work.row_tiles = products.row_tiles;
  work.num_row_tiles = products.num_row_tiles;
  work.tiles_taken = products.tiles_taken;
  work.tile_units = products.tile_units;
  work.one_row_tile_an_expert = products.one_row_tile_an_expert;
  work.column_tiles = column_tiles_of(work.experts);
  work.rows = products.rows;
  work.shared_first = products.rows >= kRowsOfSharedFirst;
  work.form = products.form;
  if (products.shared.n > 0) {
    work.shared = side<Work>(products.shared);
    const ManyRowsPlan plan =
        plan_many_rows({.rows = products.rows, .n = products.shared.n, .k = products.shared.k},
                       {.groups = Shape::kTokens / 64, .columns = Shape::kTileRows},
                       stream.device().num_multiprocessors());
    work.shared_raster = {.row_tiles = plan.row_tiles,
                          .column_tiles = column_tiles_of(work.shared),
                          .band = plan.band,
                          .band_of_columns = plan.band_of_columns};
    work.shared_tiles = work.shared_raster.row_tiles * work.shared_raster.column_tiles;
  }
  const int sms = stream.device().num_multiprocessors() - products.spare_sms;
  constexpr int kBytes = sizeof(ScaledExpertMemory<Shape>);
  stream.device().allow_shared_memory(multiply_scaled_experts<Shape>, kBytes);
  launch(multiply_scaled_experts<Shape>,
         {.blocks = static_cast<unsigned>(sms / Shape::kBlocks * Shape::kBlocks),
          .threads = Shape::kThreads,
          .shared_bytes = kBytes,
          .cluster = Shape::kBlocks},
         stream, work);
}

template <bool kGated>
void launch_products(const ScaledProducts& products, GpuStream stream) {
  const int tokens = products.tile_units * kExpertRowUnit;
  const auto launch_of = tokens <= 64    ? launch_tiles<ScaledTiles<kGated, 64>>
                         : tokens <= 128 ? launch_tiles<ScaledTiles<kGated, 128>>
                         : tokens <= 192 ? launch_tiles<ScaledTiles<kGated, 192>>
                                         : launch_tiles<ScaledTiles<kGated, 256>>;
  launch_of(products, stream);
}

// The launches of gate and up, and of down.
void launch_both(const ScaledMoeArguments& a, const MoeManyRowsPlan& plan, int32_t* tiles_taken,
                 GpuStream stream, const ScaledMoeLaunches& launches) {
  const MoeShape& s = a.shape;
  auto* workspace = static_cast<uint8_t*>(a.workspace);
  const auto* num_row_tiles = reinterpret_cast<const int32_t*>(workspace + plan.num_row_tiles_at);
  const auto* row_tiles = reinterpret_cast<const ExpertRowTile*>(workspace + plan.row_tiles_at);
  void* sorted_x = workspace + plan.sorted_x_at;
  auto* x_scales = reinterpret_cast<float*>(workspace + plan.x_scales_at);
  void* activations = workspace + plan.activations_at;
  auto* activation_scales = reinterpret_cast<float*>(workspace + plan.activation_scales_at);
  void* shared_activations = workspace + plan.shared_activations_at;
  auto* shared_scales = reinterpret_cast<float*>(workspace + plan.shared_activation_scales_at);
  void* shared_result = workspace + plan.shared_result_at;
  const bool has_shared = s.shared_inter > 0;
  if (launches.gate_up) {
    launch_products<true>({.experts = {.x = sorted_x,
                                       .x_scales = x_scales,
                                       .x_scales_stride = plan.sorted_rows,
                                       .weight = a.gate_up,
                                       .weight_scales = a.gate_up_scales,
                                       .out = activations,
                                       .out_scales = activation_scales,
                                       .out_scales_stride = plan.sorted_rows,
                                       .rows = plan.sorted_rows,
                                       .experts = s.num_experts,
                                       .n = 2 * s.inter,
                                       .k = s.hidden},
                           .shared = {.x = a.x,
                                      .x_scales = a.x_scales,
                                      .x_scales_stride = a.x_scales_stride,
                                      .weight = a.shared_gate_up,
                                      .weight_scales = a.shared_gate_up_scales,
                                      .out = shared_activations,
                                      .out_scales = shared_scales,
                                      .out_scales_stride = plan.shared_scales_stride,
                                      .rows = a.rows,
                                      .experts = 1,
                                      .n = 2 * s.shared_inter,
                                      .k = s.hidden},
                           .rows = a.rows,
                           .row_tiles = row_tiles,
                           .num_row_tiles = num_row_tiles,
                           .tiles_taken = tiles_taken,
                           .tile_units = plan.tile_tokens / kExpertRowUnit,
                           .one_row_tile_an_expert = plan.one_row_tile_an_expert,
                           .spare_sms = plan.spare_sms,
                           .form = a.form},
                          stream);
  }
  if (launches.down) {
    launch_products<false>({.experts = {.x = activations,
                                        .x_scales = activation_scales,
                                        .x_scales_stride = plan.sorted_rows,
                                        .weight = a.down,
                                        .weight_scales = a.down_scales,
                                        .out = sorted_x,
                                        .rows = plan.sorted_rows,
                                        .experts = s.num_experts,
                                        .n = s.hidden,
                                        .k = s.inter},
                            .shared = {.x = shared_activations,
                                       .x_scales = shared_scales,
                                       .x_scales_stride = plan.shared_scales_stride,
                                       .weight = a.shared_down,
                                       .weight_scales = a.shared_down_scales,
                                       .out = shared_result,
                                       .rows = a.rows,
                                       .experts = 1,
                                       .n = has_shared ? s.hidden : 0,
                                       .k = s.shared_inter},
                            .rows = a.rows,
                            .row_tiles = row_tiles,
                            .num_row_tiles = num_row_tiles,
                            .tiles_taken = tiles_taken == nullptr ? nullptr : tiles_taken + 1,
                            .tile_units = plan.tile_tokens / kExpertRowUnit,
                            .one_row_tile_an_expert = plan.one_row_tile_an_expert,
                            .spare_sms = plan.spare_sms},
                           stream);
  }
}

}  // namespace

MoeManyRowsSizes scaled_moe_many_rows_sizes(const MoeShape& shape, int64_t rows) {
  return {.rows = rows,
          .hidden = shape.hidden,
          .num_experts = shape.num_experts,
          .experts_per_token = shape.experts_per_token,
          .inter = shape.inter,
          .shared_inter = shape.shared_inter,
          .scaled = true};
}

int64_t scaled_moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return scaled_plan_for(shape, rows).workspace_bytes;
}

void scaled_moe_many_rows_products(const ScaledMoeArguments& a, const MoeManyRowsPlan& plan,
                                   GpuStream stream) {
  auto* const tiles_taken =
      reinterpret_cast<int32_t*>(static_cast<uint8_t*>(a.workspace) + plan.tiles_taken_at);
  launch_both(a, plan, tiles_taken, stream, {});
}

void scaled_moe_many_rows(const ScaledMoeArguments& a, GpuStream stream,
                          ScaledMoeLaunches launches) {
  const MoeShape& s = a.shape;
  const MoeManyRowsPlan plan = scaled_plan_for(s, a.rows);
  auto* workspace = static_cast<uint8_t*>(a.workspace);
  auto* positions = reinterpret_cast<int32_t*>(workspace + plan.positions_at);
  // Sort zeroes them.
  auto* tiles_taken = launches.sort_and_gather
                          ? reinterpret_cast<int32_t*>(workspace + plan.tiles_taken_at)
                          : launches.tiles_taken;
  void* sorted_x = workspace + plan.sorted_x_at;

  if (launches.sort_and_gather) {
    sort_by_expert({.expert_ids = a.expert_ids,
                    .pairs = a.rows * s.experts_per_token,
                    .num_experts = s.num_experts,
                    .tile_units = plan.tile_tokens / kExpertRowUnit,
                    .positions = positions,
                    .row_tiles = reinterpret_cast<ExpertRowTile*>(workspace + plan.row_tiles_at),
                    .num_row_tiles = reinterpret_cast<int32_t*>(workspace + plan.num_row_tiles_at),
                    .tiles_taken = tiles_taken},
                   stream);
    gather_rows({.x = a.x,
                 .sorted_x = sorted_x,
                 .scales = a.x_scales,
                 .scales_stride = a.x_scales_stride,
                 .sorted_scales = reinterpret_cast<float*>(workspace + plan.x_scales_at),
                 .sorted_scales_stride = plan.sorted_rows,
                 .positions = positions,
                 .rows = a.rows,
                 .vectors = s.hidden / 16,
                 .scale_blocks = s.hidden / 128,
                 .experts_per_token = s.experts_per_token},
                stream);
  }
  launch_both(a, plan, tiles_taken, stream, launches);
  if (launches.combine) {
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
}

}  // namespace fathom::cuda
