// What: GEMM out = x W^T of e4m3 with block-wise scales, for many rows.
//
// Inputs/outputs: scaled_linear_cuda.h. Tiles and their order: ops/linear/many_rows_plan.h.
//
// Layout and algorithm: scaled_large_tile_cuda.cuh for large tiles,
// ops/linear/many_rows_tile_cuda.cuh for small ones and for split-K. This file says where a tile's
// operands, scales and results lie.
//
// Determinism: one warpgroup adds an element's k blocks in their order, bitwise identical for any
// tile; with split-K the k-slices are added in their order, and the bits differ. The sizes alone
// decide which, the number of rows among them.
//
// Limits: k a multiple of 128, n of 8.
//
// Source: two levels of sums as in DeepSeek-V3's technical report (arXiv 2412.19437), section
// 3.3.2; tiles of up to 192 columns so that both levels fit registers, as in DeepGEMM's
// documentation.
//
// Measured: docs/kernels/scaled_linear.md.
#include <span>

#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "ops/linear/many_rows_tile_cuda.cuh"
#include "ops/scaled_linear/scaled_large_tile_cuda.cuh"
#include "ops/scaled_linear/scaled_many_rows_cuda.h"

namespace fathom::cuda {
namespace {

template <typename Shape>
struct ScaledWork {
  static constexpr TileResult kResult =
      Shape::kWritesBoxes ? TileResult::kBf16Boxes : TileResult::kBf16;

  CUtensorMap x, x_scales, weight, out_map;
  const float *weight_scales, *weight_row_scales;
  uint8_t* out;
  int64_t out_row_stride;
  bool f32;
  int rows, n, k_steps;
  TileRaster raster;

  __device__ int num_tiles() const { return raster.row_tiles * raster.column_tiles; }

  __device__ Tile tile(int index) const {
    const auto [batch, row_tile, column_tile] = raster.place(index);
    const int row = row_tile * Shape::kRows, column = column_tile * Shape::kColumns;
    Tile tile;
    tile.a = &x;
    tile.b = &weight;
    tile.a_scales = &x_scales;
    tile.a_row = row;
    tile.b_row = column;
    tile.out.data = out + (row * out_row_stride + column) * (f32 ? 4 : 2);
    tile.out.row_stride = out_row_stride;
    tile.out.rows = rows - row;
    tile.out.map = &out_map;
    tile.out.row = row;
    tile.out.column = column;
    tile.out.columns = n - column;
    tile.out.groups = min(Shape::kGroups, (rows - row + 63) / 64);
    tile.out.k_steps = k_steps;
    tile.out.f32 = f32;
    tile.out.scales = {.data = weight_scales + int64_t{column / 128} * k_steps,
                       .stride = k_steps,
                       .row_in_block = column % 128,
                       .rows = weight_row_scales == nullptr ? nullptr : weight_row_scales + column};
    return tile;
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    scaled_many_rows_kernel(const __grid_constant__ ScaledWork<Shape> work) {
  run_tiles<Shape>(work);
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    scaled_large_tiles_kernel(const __grid_constant__ LargeTileWork<Shape> work) {
  run_large_tiles<Shape>(work);
}

// ---- launch

// Tensor map of e4m3 rows, 128 of k a box; with a batch axis of size 1 for kernels that expect one.
CUtensorMap operand_map(const void* matrix, int64_t rows, int64_t row_stride, int k, int box_rows,
                        bool in_batches) {
  const Axis axes[] = {{.size = k, .stride = 1, .box = 128},
                       {.size = rows, .stride = row_stride, .box = box_rows},
                       {.size = 1, .stride = rows * row_stride, .box = 1}};
  return e4m3_map(matrix, std::span(axes).first(in_batches ? 3 : 2));
}

CUtensorMap scales_map(const ScaledLinearArguments& a, int box_rows) {
  const Axis axes[] = {{.size = a.rows, .stride = 1, .box = box_rows},
                       {.size = a.k / 128, .stride = a.x_scales_stride, .box = 1}};
  return f32_map(a.x_scales, axes);
}

CUtensorMap out_map(const ScaledLinearArguments& a) {
  const Axis axes[] = {{.size = a.n, .stride = 1, .box = 64},
                       {.size = a.rows, .stride = a.out_row_stride, .box = 16}};
  return bf16_map(a.out, axes);
}

TileRaster raster_of(const ManyRowsPlan& plan) {
  return {.row_tiles = plan.row_tiles,
          .column_tiles = plan.column_tiles,
          .band = plan.band,
          .band_of_columns = plan.band_of_columns};
}

template <typename Work>
void launch_with(void (*kernel)(Work), const Work& work, const ManyRowsPlan& plan, int threads,
                 int shared_bytes, GpuStream stream) {
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.num_blocks),
          .threads = static_cast<unsigned>(threads),
          .shared_bytes = static_cast<unsigned>(shared_bytes),
          .cluster = static_cast<unsigned>(plan.tile.split)},
         stream, work);
}

template <typename Shape>
void launch_for(const ScaledLinearArguments& a, const ManyRowsPlan& plan, GpuStream stream) {
  const auto kernel = scaled_many_rows_kernel<Shape>;
  constexpr int kBytes = sizeof(TileMemory<Shape>);
  stream.device().allow_shared_memory(kernel, kBytes);
  const ScaledWork<Shape> work = {
      .x = operand_map(a.x, a.rows, a.x_row_stride, a.k, Shape::kRows, true),
      .x_scales = scales_map(a, Shape::kRows),
      .weight = operand_map(a.weight, a.n, a.k, a.k, Shape::kColumns, true),
      .out_map = out_map(a),
      .weight_scales = a.weight_scales,
      .weight_row_scales = a.weight_row_scales,
      .out = static_cast<uint8_t*>(a.out),
      .out_row_stride = a.out_row_stride,
      .f32 = a.out_type == DType::kF32,
      .rows = a.rows,
      .n = a.n,
      .k_steps = a.k / 128,
      .raster = raster_of(plan)};
  launch_with(kernel, work, plan, Shape::kThreads, kBytes, stream);
}

template <typename Shape>
void launch_large(const ScaledLinearArguments& a, const ManyRowsPlan& plan, GpuStream stream) {
  const auto kernel = scaled_large_tiles_kernel<Shape>;
  constexpr int kBytes = sizeof(LargeTileMemory<Shape>);
  stream.device().allow_shared_memory(kernel, kBytes);
  const LargeTileWork<Shape> work = {
      .x = operand_map(a.x, a.rows, a.x_row_stride, a.k, Shape::kRows, false),
      .weight = operand_map(a.weight, a.n, a.k, a.k, Shape::kColumns, false),
      .x_scales = scales_map(a, Shape::kRows),
      .out_map = out_map(a),
      .weight_scales = a.weight_scales,
      .weight_row_scales = a.weight_row_scales,
      .out = a.out,
      .out_row_stride = a.out_row_stride,
      .f32 = a.out_type == DType::kF32,
      .rows = a.rows,
      .n = a.n,
      .k_steps = a.k / 128,
      .raster = raster_of(plan)};
  launch_with(kernel, work, plan, Shape::kThreads, kBytes, stream);
}

}  // namespace

void scaled_linear_many_rows(const ScaledLinearArguments& a, const ManyRowsPlan& plan,
                             GpuStream stream) {
  if (a.rows == 0) return;
  const ManyRowsTile tile = plan.tile;
  if (tile == ManyRowsTile{4, 128, 1}) {
    launch_large<LargeTileShape<4, 128, 3>>(a, plan, stream);
  } else if (tile == ManyRowsTile{4, 112, 1}) {
    launch_large<LargeTileShape<4, 112, 3>>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 192, 1}) {
    launch_large<LargeTileShape<2, 192, 4>>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 144, 1}) {
    launch_large<LargeTileShape<2, 144, 5>>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 128, 1}) {
    launch_large<LargeTileShape<2, 128, 5>>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 64, 1}) {
    launch_large<LargeTileShape<2, 64, 8>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 192, 1}) {
    launch_for<ScaledTileShape<1, 192, 6, 1>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 144, 1}) {
    launch_for<ScaledTileShape<1, 144, 7, 1>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 128, 1}) {
    launch_for<ScaledTileShape<1, 128, 8, 1>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 64, 1}) {
    launch_for<ScaledTileShape<1, 64, 12, 1>>(a, plan, stream);
  } else if (tile == ManyRowsTile{2, 128, 2}) {
    launch_for<ScaledTileShape<2, 128, 5, 2>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 128, 2}) {
    launch_for<ScaledTileShape<1, 128, 8, 2>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 64, 2}) {
    launch_for<ScaledTileShape<1, 64, 12, 2>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 64, 4}) {
    launch_for<ScaledTileShape<1, 64, 12, 4>>(a, plan, stream);
  } else if (tile == ManyRowsTile{1, 128, 4}) {
    launch_for<ScaledTileShape<1, 128, 8, 4>>(a, plan, stream);
  } else {
    check(cudaErrorInvalidConfiguration, "looking for a kernel of this tile");
  }
}

void scaled_linear_many_rows(const ScaledLinearArguments& a, GpuStream stream) {
  scaled_linear_many_rows(
      a,
      plan_many_rows({.rows = a.rows, .n = a.n, .k = a.k, .type = ManyRowsType::kScaledE4M3},
                     stream.device().num_multiprocessors(), !a.batch_invariant),
      stream);
}

}  // namespace fathom::cuda
