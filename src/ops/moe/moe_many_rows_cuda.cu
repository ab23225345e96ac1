// What: out[t] = mlp_shared(x[t]) + sum over t's experts of weight * mlp_e(x[t]) for many tokens.
//
// Inputs/outputs: moe_cuda.h. Workspace: moe_many_rows_plan.h.
//
// Algorithm, five launches, each of which finds on the device what the one before has decided:
//   1. sort: counts the tokens of each expert, gives every (token, expert) a row among the sorted
//      ones, an expert's rows together and from a multiple of 16 on, and lists row tiles. Each
//      block counts all ids again rather than waiting for others' counts
//   2. gather: x's rows to their places among the sorted rows
//   3. gate and up: activations = silu(gate x) * (up x); rows of gate and of up are copied in turn,
//   8
//      of each, so that both of a pair are in one thread's registers; the shared expert's, too
//   4. down, likewise
//   5. combine: each token's weighted sum in ascending order of the experts, the shared one last
// Products: expert_products_cuda.cuh, persistent blocks that take tile after tile of the list. Both
// launches read the list, and ask for their first weights, before they wait for what comes before
// them: they begin when sort has ended. Rows that no token has are computed from what happens to
// lie there; nobody reads what they give.
//
// Determinism: a row's sums do not depend on its place, nor on which block computes them; each
// token's are added in a fixed order.
//
// Limits: 256 experts, tokens x experts a token below 2^31. Experts' results are rounded to bf16
// before they are added.
//
// Measured: docs/kernels/moe_many_rows.md.
#include <cuda_bf16.h>

#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "ops/linear/many_rows_plan.h"
#include "ops/linear/many_rows_tile_cuda.cuh"
#include "ops/moe/expert_products_cuda.cuh"
#include "ops/moe/moe_many_rows_cuda.h"
#include "ops/moe/moe_many_rows_plan.h"

namespace fathom::cuda {
namespace {

constexpr int kMaxExperts = 256;

// ---- sort: each block counts all ids and finds the places of its own

constexpr int kSortWarps = 32, kSortThreads = 32 * kSortWarps;

struct SortArguments {
  const int32_t* expert_ids;
  int pairs;
  int tile_units;  // of kExpertRowUnit rows, at most, in a row tile
  int32_t* positions;
  ExpertRowTile* row_tiles;
  int32_t* num_row_tiles;
  int32_t* tiles_taken;  // [2], of either product
};

struct SortMemory {
  int before[kMaxExperts], after[kMaxExperts];  // ids before the block's and from those on
  int starts[kSortWarps][kMaxExperts];          // of the block's warps: counts, then first rows
  int ends[2][kMaxExperts];                     // running sums: units of 64 rows, row tiles
};

__device__ void count_all(SortMemory& memory, const SortArguments& arguments, int first) {
  for (int i = 4 * static_cast<int>(threadIdx.x); i < arguments.pairs; i += 4 * kSortThreads) {
    int ids[4] = {-1, -1, -1, -1};
    if (i + 4 <= arguments.pairs) {
      *reinterpret_cast<int4*>(ids) = *reinterpret_cast<const int4*>(arguments.expert_ids + i);
    } else {
      for (int j = 0; i + j < arguments.pairs; ++j) ids[j] = arguments.expert_ids[i + j];
    }
    int* counts = i < first ? memory.before : memory.after;  // first is a multiple of 4
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (ids[j] >= 0) atomicAdd(&counts[ids[j]], 1);
    }
  }
}

__global__ void __launch_bounds__(kSortThreads, 1) sort_by_expert(const SortArguments arguments) {
  __shared__ SortMemory memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = threadIdx.x;
  const int first = static_cast<int>(blockIdx.x) * kSortThreads;
  if (expert < kMaxExperts) memory.before[expert] = memory.after[expert] = 0;
  for (int e = lane; e < kMaxExperts; e += 32) memory.starts[warp][e] = 0;
  let_next_launch_begin();
  wait_for_earlier_launches();
  __syncthreads();
  count_all(memory, arguments, first);
  const int pair = first + static_cast<int>(threadIdx.x);
  const int id = pair < arguments.pairs ? arguments.expert_ids[pair] : -1;
  const unsigned same = __match_any_sync(~0u, id);
  const int earlier = __popc(same & ((1u << lane) - 1));
  if (id >= 0 && earlier == 0) memory.starts[warp][id] = __popc(same);
  __syncthreads();

  int units = 0, tiles = 0;
  if (expert < kMaxExperts) {
    const int rows = memory.before[expert] + memory.after[expert];
    units = (rows + kExpertRowUnit - 1) / kExpertRowUnit;
    tiles = (units + arguments.tile_units - 1) / arguments.tile_units;
    memory.ends[0][expert] = units;
    memory.ends[1][expert] = tiles;
  }
  __syncthreads();
  for (int distance = 1; distance < kMaxExperts; distance *= 2) {
    int more[2] = {0, 0};
    if (expert < kMaxExperts && expert >= distance) {
      more[0] = memory.ends[0][expert - distance];
      more[1] = memory.ends[1][expert - distance];
    }
    __syncthreads();
    if (expert < kMaxExperts) {
      memory.ends[0][expert] += more[0];
      memory.ends[1][expert] += more[1];
    }
    __syncthreads();
  }
  if (expert < kMaxExperts) {
    const int first_row = (memory.ends[0][expert] - units) * kExpertRowUnit;
    const int first_tile = memory.ends[1][expert] - tiles;
    int start = first_row + memory.before[expert];
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = memory.starts[w][expert];
      memory.starts[w][expert] = start;
      start += count;
    }
    if (blockIdx.x == 0) {
      for (int i = 0; i < tiles; ++i) {
        arguments.row_tiles[first_tile + i] = {.expert = expert,
                                               .first_row = first_row,
                                               .units = units,
                                               .first_tile = first_tile,
                                               .num_tiles = tiles};
      }
      if (expert == kMaxExperts - 1) *arguments.num_row_tiles = memory.ends[1][expert];
      if (expert < 2) arguments.tiles_taken[expert] = 0;
    }
  }
  __syncthreads();
  if (pair < arguments.pairs) {
    arguments.positions[pair] = id >= 0 ? memory.starts[warp][id] + earlier : -1;
  }
}

// ---- gather: a warp a token

constexpr int kGatherThreads = 256;

struct GatherArguments {
  const uint4* x;  // [rows, vectors]: 8 values each
  uint4* sorted_x;
  const int32_t* positions;
  int rows, vectors, experts_per_token;
};

__global__ void __launch_bounds__(kGatherThreads) gather_rows(const GatherArguments arguments) {
  const int lane = threadIdx.x % 32, vectors = arguments.vectors;
  const int64_t row = blockIdx.x * (kGatherThreads / 32) + threadIdx.x / 32;
  // In this order: what comes next begins when sort has ended, and reads its lists.
  wait_for_earlier_launches();
  let_next_launch_begin();
  if (row >= arguments.rows) return;
  const uint4* from = arguments.x + row * vectors;
  const int32_t* positions = arguments.positions + row * arguments.experts_per_token;
  constexpr int kAtOnce = 8;
  for (int first = lane; first < vectors; first += 32 * kAtOnce) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + 32 * i < vectors) values[i] = from[first + 32 * i];
    }
    for (int j = 0; j < arguments.experts_per_token; ++j) {
      const int64_t position = positions[j];
      if (position < 0) continue;
      uint4* to = arguments.sorted_x + position * vectors;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i < vectors) to[first + 32 * i] = values[i];
      }
    }
  }
}

// ---- products

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
        0;  // of 8 rows (or 8 of gate and 8 of up) from an expert's first to the next one's
  };

  Side experts, shared;
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int* tiles_taken;  // behind each block's first
  int column_tiles;
  bool one_row_tile_an_expert;  // of most
  TileRaster shared_raster;
  int shared_tiles, rows;

  // The launch of sort has ended, but this one may not have waited for it yet: what it wrote is
  // read past the L1.
  __device__ int num_tiles() const { return shared_tiles + __ldcg(num_row_tiles) * column_tiles; }

  // Experts' tiles take unequal times, and blocks do not all have the same share of the memory's
  // bandwidth: who is done first has the next.
  __device__ int after(int) const {
    return static_cast<int>(gridDim.x) + atomicAdd(tiles_taken, 1);
  }

  // The shared expert's tiles, which many rows keep in the L2, lie scattered among the others, most
  // of which wait for memory; not among the last, for they can be longer.
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

  // An expert's tiles follow one another: those with the same columns first.
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

// ---- combine: a block a token

constexpr int kCombineThreads = 256;
constexpr int kExpertsAtOnce = 8;

struct CombineArguments {
  const uint4* results;         // [sorted rows, vectors]
  const uint4* shared_results;  // [rows, vectors] or null
  const int32_t* positions;
  const float* weights;
  void* out;
  int vectors, experts_per_token;
};

__device__ void add_scaled(float (&sum)[8], const uint4& values, float weight) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += weight * __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xFFFF0000);
  }
}

template <bool kF32>
__global__ void __launch_bounds__(kCombineThreads) combine(const CombineArguments arguments) {
  __shared__ int positions[kMaxExperts];
  __shared__ float weights[kMaxExperts];
  __shared__ int count;
  const int num = arguments.experts_per_token, thread = threadIdx.x, vectors = arguments.vectors;
  const int64_t row = blockIdx.x;
  let_next_launch_begin();
  wait_for_earlier_launches();
  // Sorted rows ascend with the experts.
  if (thread < num) {
    const int32_t* all = arguments.positions + row * num;
    const int mine = all[thread];
    int before = 0, present = 0;
    for (int j = 0; j < num; ++j) {
      before += all[j] >= 0 && all[j] < mine;
      present += all[j] >= 0;
    }
    if (mine >= 0) {
      positions[before] = mine;
      weights[before] = arguments.weights[row * num + thread];
    }
    if (thread == 0) count = present;
  }
  if (num == 0 && thread == 0) count = 0;
  __syncthreads();
  for (int v = thread; v < vectors; v += kCombineThreads) {
    float sum[8] = {};
    uint4 last = {};
    if (arguments.shared_results != nullptr) last = arguments.shared_results[row * vectors + v];
    for (int first = 0; first < count; first += kExpertsAtOnce) {
      uint4 values[kExpertsAtOnce];
#pragma unroll
      for (int i = 0; i < kExpertsAtOnce; ++i) {
        if (first + i < count) {
          values[i] = arguments.results[int64_t{positions[first + i]} * vectors + v];
        }
      }
#pragma unroll
      for (int i = 0; i < kExpertsAtOnce; ++i) {
        if (first + i < count) add_scaled(sum, values[i], weights[first + i]);
      }
    }
    add_scaled(sum, last, 1);
    if constexpr (kF32) {
      float4* out = static_cast<float4*>(arguments.out) + (row * vectors + v) * 2;
      out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      static_cast<uint4*>(arguments.out)[row * vectors + v] =
          make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                     pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    }
  }
}

// ---- launches

MoeManyRowsPlan plan_for(const MoeShape& shape, int32_t rows) {
  return plan_moe_many_rows({.rows = rows,
                             .hidden = shape.hidden,
                             .num_experts = shape.num_experts,
                             .experts_per_token = shape.experts_per_token,
                             .inter = shape.inter,
                             .shared_inter = shape.shared_inter});
}

// What the two products of an expert's (or the shared one's) need to know.
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
  Operands experts, shared;  // shared.n is 0 where there is none
  int32_t rows;
  const ExpertRowTile* row_tiles;
  const int32_t* num_row_tiles;
  int32_t* tiles_taken;
  bool one_row_tile_an_expert;
};

template <typename Shape, bool kGated>
void launch_products(const Products& products, cudaStream_t stream) {
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
    const ManyRowsPlan plan = plan_many_rows(
        {.rows = products.rows, .n = products.shared.n, .k = products.shared.k},
        {.groups = Shape::kTokens / 64, .columns = Shape::kWeightRows}, num_multiprocessors());
    work.shared_raster = {.row_tiles = plan.row_tiles,
                          .column_tiles = column_tiles_of(work.shared),
                          .band = plan.band,
                          .band_of_columns = plan.band_of_columns};
    work.shared_tiles = work.shared_raster.row_tiles * work.shared_raster.column_tiles;
  }
  constexpr int kBytes = sizeof(ExpertTileMemory<Shape>);
  static const bool allowed = [] {
    allow_shared_memory(multiply_experts<Shape, kGated>, kBytes);
    return true;
  }();
  static_cast<void>(allowed);
  launch(multiply_experts<Shape, kGated>,
         {.blocks = static_cast<unsigned>(num_multiprocessors()),
          .threads = Shape::kThreads,
          .shared_bytes = kBytes},
         stream, work);
}

template <bool kGated>
void launch_products(const MoeManyRowsPlan& plan, const Products& products, cudaStream_t stream) {
  if (plan.tile_tokens == 64) {
    launch_products<ExpertTileShape<64, 4, 2>, kGated>(products, stream);
  } else if (plan.tile_tokens == 128) {
    launch_products<ExpertTileShape<128, 3, 2>, kGated>(products, stream);
  } else {
    launch_products<ExpertTileShape<256, 4, 1>, kGated>(products, stream);
  }
}

}  // namespace

int64_t moe_many_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return plan_for(shape, rows).workspace_bytes;
}

void moe_many_rows(const MoeArguments& a, cudaStream_t stream) {
  const MoeShape& s = a.shape;
  const MoeManyRowsPlan plan = plan_for(s, a.rows);
  auto* workspace = static_cast<uint8_t*>(a.workspace);
  auto* positions = reinterpret_cast<int32_t*>(workspace + plan.positions_at);
  auto* num_row_tiles = reinterpret_cast<int32_t*>(workspace + plan.num_row_tiles_at);
  auto* tiles_taken = reinterpret_cast<int32_t*>(workspace + plan.tiles_taken_at);
  auto* row_tiles = reinterpret_cast<ExpertRowTile*>(workspace + plan.row_tiles_at);
  void* sorted_x = workspace + plan.sorted_x_at;
  void* activations = workspace + plan.activations_at;
  void* shared_activations = workspace + plan.shared_activations_at;
  void* shared_result = workspace + plan.shared_result_at;
  const int vectors = s.hidden / 8;

  const int pairs = a.rows * s.experts_per_token;
  launch(sort_by_expert,
         {.blocks = static_cast<unsigned>((pairs + kSortThreads - 1) / kSortThreads),
          .threads = kSortThreads},
         stream,
         SortArguments{.expert_ids = a.expert_ids,
                       .pairs = pairs,
                       .tile_units = plan.tile_tokens / kExpertRowUnit,
                       .positions = positions,
                       .row_tiles = row_tiles,
                       .num_row_tiles = num_row_tiles,
                       .tiles_taken = tiles_taken});
  constexpr int kRowsABlock = kGatherThreads / 32;
  launch(gather_rows,
         {.blocks = static_cast<unsigned>((a.rows + kRowsABlock - 1) / kRowsABlock),
          .threads = kGatherThreads},
         stream,
         GatherArguments{.x = static_cast<const uint4*>(a.x),
                         .sorted_x = static_cast<uint4*>(sorted_x),
                         .positions = positions,
                         .rows = a.rows,
                         .vectors = vectors,
                         .experts_per_token = s.experts_per_token});
  launch_products<true>(plan,
                        {.experts = {sorted_x, a.gate_up, activations, plan.sorted_rows,
                                     s.num_experts, 2 * s.inter, s.hidden},
                         .shared = {a.x, a.shared_gate_up, shared_activations, a.rows, 1,
                                    2 * s.shared_inter, s.hidden},
                         .rows = a.rows,
                         .row_tiles = row_tiles,
                         .num_row_tiles = num_row_tiles,
                         .tiles_taken = tiles_taken,
                         .one_row_tile_an_expert = plan.one_row_tile_an_expert},
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
                          .one_row_tile_an_expert = plan.one_row_tile_an_expert},
                         stream);
  const CombineArguments combined = {
      .results = static_cast<const uint4*>(sorted_x),
      .shared_results = s.shared_inter > 0 ? static_cast<const uint4*>(shared_result) : nullptr,
      .positions = positions,
      .weights = a.expert_weights,
      .out = a.out,
      .vectors = vectors,
      .experts_per_token = s.experts_per_token};
  launch(a.out_type == DType::kF32 ? combine<true> : combine<false>,
         {.blocks = static_cast<unsigned>(a.rows), .threads = kCombineThreads}, stream, combined);
}

}  // namespace fathom::cuda
