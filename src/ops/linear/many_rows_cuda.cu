// What: GEMM out[b] = x[b] W[b]^T for many rows, bf16 products summed in fp32.
//
// Inputs/outputs: linear_cuda.h. Tiles and their order: many_rows_plan.h.
//
// Layout and algorithm: many_rows_tile_cuda.cuh. This file says where a tile's operands and results
// lie.
//
// Determinism: one warpgroup sums an element in order of k, bitwise identical for any tile; with
// split-K the k-slices are added in their order, and the bits differ. The sizes alone decide which,
// the number of rows among them.
//
// Limits: bf16; k a multiple of 64, n of 8.
//
// Measured: docs/kernels/many_rows.md.
#include <type_traits>

#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "ops/linear/many_rows_cuda.h"
#include "ops/linear/many_rows_tile_cuda.cuh"

namespace fathom::cuda {
namespace {

template <typename Shape, TileResult kTileResult>
struct LinearWork {
  static constexpr TileResult kResult = kTileResult;

  CUtensorMap x, weight;
  void* out;
  int64_t out_row_stride, out_batch_stride;
  int rows, n, k_steps;
  TileRaster raster;
  int tiles;  // of all batches together

  __device__ int num_tiles() const { return tiles; }

  __device__ Tile tile(int index) const {
    const auto [batch, row_tile, column_tile] = raster.place(index);
    const int row = row_tile * Shape::kRows, column = column_tile * Shape::kColumns;
    using Element = std::conditional_t<kResult == TileResult::kF32, float, __nv_bfloat16>;
    Tile tile;
    tile.a = &x;
    tile.b = &weight;
    tile.a_row = row;
    tile.b_row = column;
    tile.b_second_row = column + Shape::kColumns / 2;
    tile.a_batch = tile.b_batch = batch;
    tile.out.data =
        static_cast<Element*>(out) + batch * out_batch_stride + row * out_row_stride + column;
    tile.out.row_stride = out_row_stride;
    tile.out.rows = rows - row;
    tile.out.columns = n - column;
    tile.out.groups = min(Shape::kGroups, (rows - row + 63) / 64);
    tile.out.k_steps = k_steps;
    return tile;
  }
};

template <typename Shape, TileResult kResult>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    multiply_many_rows(const __grid_constant__ LinearWork<Shape, kResult> work) {
  run_tiles<Shape>(work);
}

template <typename Shape, TileResult kResult>
void launch_for(const LinearArguments& a, const ManyRowsPlan& plan, GpuStream stream) {
  LinearWork<Shape, kResult> work;
  work.x = bf16_batch_map(a.x,
                          {.batches = a.batches,
                           .rows = a.rows,
                           .columns = a.k,
                           .row_stride = a.x_row_stride,
                           .batch_stride = a.x_batch_stride},
                          {.rows = 64, .columns = 64});
  work.weight = bf16_batch_map(a.weight,
                               {.batches = a.batches,
                                .rows = a.n,
                                .columns = a.k,
                                .row_stride = a.k,
                                .batch_stride = int64_t{a.n} * a.k},
                               {.rows = Shape::kColumns / 2, .columns = 64});
  work.out = a.out;
  work.out_row_stride = a.out_row_stride;
  work.out_batch_stride = a.out_batch_stride;
  work.rows = a.rows;
  work.n = a.n;
  work.k_steps = a.k / 64;
  work.raster = {.row_tiles = plan.row_tiles,
                 .column_tiles = plan.column_tiles,
                 .band = plan.band,
                 .band_of_columns = plan.band_of_columns};
  work.tiles = plan.row_tiles * plan.column_tiles * a.batches;
  constexpr int kBytes = sizeof(TileMemory<Shape>);
  stream.device().allow_shared_memory(multiply_many_rows<Shape, kResult>, kBytes);
  launch(multiply_many_rows<Shape, kResult>,
         {.blocks = static_cast<unsigned>(plan.num_blocks),
          .threads = Shape::kThreads,
          .shared_bytes = kBytes,
          .cluster = Shape::kSplit},
         stream, work);
}

template <TileResult kResult>
void launch_tile(const LinearArguments& a, const ManyRowsPlan& plan, GpuStream stream) {
  const ManyRowsTile tile = plan.tile;
  if (tile == ManyRowsTile{2, 256, 1}) {
    launch_for<TileShape<2, 256, 4, 1>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{3, 192, 1}) {
    launch_for<TileShape<3, 192, 3, 1>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 192, 1}) {
    launch_for<TileShape<2, 192, 4, 1>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 128, 1}) {
    launch_for<TileShape<2, 128, 6, 1>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 64, 1}) {
    launch_for<TileShape<1, 64, 12, 1>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 256, 2}) {
    launch_for<TileShape<2, 256, 4, 2>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 128, 2}) {
    launch_for<TileShape<2, 128, 6, 2>, kResult>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 64, 2}) {
    launch_for<TileShape<1, 64, 12, 2>, kResult>(a, plan, stream);
  } else {
    check(cudaErrorInvalidConfiguration, "looking for a kernel of this tile");
  }
}

}  // namespace

void linear_many_rows(const LinearArguments& a, const ManyRowsPlan& plan, GpuStream stream) {
  if (a.out_type == DType::kF32) {
    launch_tile<TileResult::kF32>(a, plan, stream);
  } else {
    launch_tile<TileResult::kBf16>(a, plan, stream);
  }
}

void linear_many_rows(const LinearArguments& a, GpuStream stream) {
  linear_many_rows(a,
                   plan_many_rows({.rows = a.rows, .n = a.n, .k = a.k, .batches = a.batches},
                                  stream.device().num_multiprocessors(), !a.batch_invariant),
                   stream);
}

}  // namespace fathom::cuda
