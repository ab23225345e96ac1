// What: GEMM core for e4m3 with block-wise scales and large tiles: out tile [64 * kGroups,
// kColumns] = x tile times W tile transposed, tile after tile, one CTA an SM.
//
// Layout: kStages stages of x [kRows, 128] and W [kColumns, 128] with the 128-byte swizzle, and of
// their scales; a tile's results are staged in boxes of [16, 64]. Two consumer warpgroups compute
// 64 rows each with all columns, or two times 64 one after the other; in one more warpgroup a
// thread issues loads and a warp reads W's scales.
//
// Algorithm: persistent CTAs. Consumers count steps of 128 of k and tiles, whose numbers follow
// from the CTA's index and the sizes: so the compiler knows that all of a warp's threads are at the
// same stage, and matrix descriptors stay in uniform registers. They read a tile's destination in
// the epilogue. A step is four wgmmas into registers of their own, which are promoted into fp32
// sums times both scales. Scales are read before the first wgmma, because a read of shared memory
// queues behind the tensor cores' reads; whether the next stage has arrived is tested before the
// promotion, and known after it. Little more than multiplications is then left between one step's
// wgmmas and the next; meanwhile the other warpgroup's wgmmas use the tensor cores.
//
// Determinism: an element is summed in order of k by one warpgroup, bitwise identical in any tile.
//
// Source: the PTX manual; two levels of sums as in DeepSeek-V3's technical report (arXiv
// 2412.19437), section 3.3.2; 256 x 128 as two wgmmas of 64 rows a warpgroup, and the order within
// a step, as in DeepGEMM.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <numeric>

#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/linear/many_rows_tile_cuda.cuh"

namespace fathom::cuda {

template <int kGroupCount, int kColumnCount, int kStageCount>
struct LargeTileShape {
  static constexpr int kGroups = kGroupCount, kColumns = kColumnCount, kStages = kStageCount;
  static constexpr int kWarpgroups = 2;
  static constexpr int kParts = kGroups / kWarpgroups;  // times 64 rows, one after the other
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kXBytes = kRows * 128, kWeightBytes = kColumns * 128;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;
  // Columns that share a scale: tiles begin at multiples of them.
  static constexpr int kScaleColumns = std::gcd(kColumns, 128);
  static constexpr int kScales = kColumns / kScaleColumns;
  static constexpr int kSums = kColumns / 2;  // per thread, for 64 rows
  static constexpr int kBoxes = (kColumns + 63) / 64;
  static_assert(kGroups % kWarpgroups == 0 && kColumns % 16 == 0 && kColumns >= 64);

  // The first column of a box of results. The last box begins earlier where columns are no multiple
  // of 64: its overlap with the one before is written twice.
  __host__ __device__ static constexpr int first_column(int box) {
    return box * 64 < kColumns - 64 ? box * 64 : kColumns - 64;
  }
};

struct TilePlace {
  int row, column;
};

template <typename Shape>
struct LargeTileMemory {
  alignas(1024) uint8_t x[Shape::kStages][Shape::kXBytes];
  alignas(1024) uint8_t weight[Shape::kStages][Shape::kWeightBytes];
  // Each warp's results, 16 rows.
  alignas(1024) uint8_t out[Shape::kWarpgroups * 4][Shape::kParts][Shape::kBoxes][16 * 128];
  alignas(128) float x_scales[Shape::kStages][Shape::kRows];
  static constexpr int kScaleStride = (Shape::kScales + 3) / 4 * 4;  // read as float4
  alignas(16) float weight_scales[Shape::kStages][kScaleStride];
  // Ring of tile positions: the tile being stored, those whose stages are loaded, and the next.
  static constexpr int kTiles = Shape::kStages + 2;
  TilePlace tiles[kTiles];
  uint64_t arrived[Shape::kStages], read[Shape::kStages];
};

template <typename Shape>
struct LargeTileWork {
  // Boxes of [kRows, 128], [kColumns, 128], [1, kRows] and [16, 64].
  CUtensorMap x, weight, x_scales, out_map;
  const float *weight_scales, *weight_row_scales;
  void* out;
  int64_t out_row_stride;
  bool f32;
  int rows, n, k_steps;
  TileRaster raster;

  __device__ int num_tiles() const { return raster.row_tiles * raster.column_tiles; }
  __device__ TilePlace place(int index) const {
    const auto [batch, row_tile, column_tile] = raster.place(index);
    return {.row = row_tile * Shape::kRows, .column = column_tile * Shape::kColumns};
  }
};

template <typename Shape>
struct StageRing {
  int stage = 0, phase = 0;

  __device__ void advance() {
    if (++stage == Shape::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// ---- producer: one thread

template <typename Shape>
class LargeTileLoader {
 public:
  __device__ LargeTileLoader(LargeTileMemory<Shape>& memory, const LargeTileWork<Shape>& work)
      : memory_(memory), work_(work) {}

  __device__ void run() {
    const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    const TilePlace first_place = work_.place(first);
    announce(first_place);
    int ahead = min(work_.k_steps, Shape::kStages);  // stages whose W is in flight
    for (int k = 0; k < ahead; ++k) load_weight(first_place, k, k);
    wait_for_earlier_launches();
    for (int index = first; index < work_.num_tiles(); index += step) {
      const TilePlace place = work_.place(index);
      if (index != first) announce(place);
      for (int k = 0; k < work_.k_steps; ++k) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(&memory_.read[ring_.stage], ring_.phase ^ 1);
          load_weight(place, ring_.stage, k);
        }
        load_x(place, k);
        ring_.advance();
      }
    }
  }

 private:
  // Called before the barrier of the tile's first stage is armed.
  __device__ void announce(const TilePlace& place) {
    memory_.tiles[tile_] = place;
    if (++tile_ == LargeTileMemory<Shape>::kTiles) tile_ = 0;
  }

  // Arms the stage's barrier with all of its bytes.
  __device__ void load_weight(const TilePlace& place, int stage, int k) {
    uint64_t* arrived = &memory_.arrived[stage];
    barrier_expect(arrived, Shape::kXBytes + Shape::kWeightBytes + Shape::kRows * 4);
    copy_box(memory_.weight[stage], &work_.weight, arrived, k * 128, place.column);
  }

  __device__ void load_x(const TilePlace& place, int k) {
    const int stage = ring_.stage;
    uint64_t* arrived = &memory_.arrived[stage];
    copy_box(memory_.x[stage], &work_.x, arrived, k * 128, place.row);
    copy_box(memory_.x_scales[stage], &work_.x_scales, arrived, place.row, k);
  }

  LargeTileMemory<Shape>& memory_;
  const LargeTileWork<Shape>& work_;
  StageRing<Shape> ring_;
  int tile_ = 0;
};

// ---- W's scales: one warp

// Loads the scales of 32 steps at a time into the stages.
template <typename Shape>
__device__ void load_weight_scales(LargeTileMemory<Shape>& memory,
                                   const LargeTileWork<Shape>& work) {
  const int lane = static_cast<int>(threadIdx.x) % 32, last = (work.n - 1) >> 7;
  StageRing<Shape> ring;
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  for (int index = first; index < work.num_tiles(); index += step) {
    const int column = work.place(index).column;
    for (int begin = 0; begin < work.k_steps; begin += 32) {
      float scales[Shape::kScales];
#pragma unroll
      for (int i = 0; i < Shape::kScales; ++i) {  // columns beyond the last use its scale
        const int block = min((column + i * Shape::kScaleColumns) >> 7, last);
        scales[i] =
            __ldg(work.weight_scales + block * work.k_steps + min(begin + lane, work.k_steps - 1));
      }
      const int count = min(work.k_steps - begin, 32);
      for (int k = 0; k < count; ++k) {
        barrier_wait(&memory.read[ring.stage], ring.phase ^ 1);
        if (lane == k) {
#pragma unroll
          for (int i = 0; i < Shape::kScales; ++i) memory.weight_scales[ring.stage][i] = scales[i];
          barrier_arrive(&memory.arrived[ring.stage]);
        }
        ring.advance();
      }
    }
  }
}

// ---- consumer: a warpgroup

template <typename Shape>
class LargeTileMultiplier {
 public:
  __device__ LargeTileMultiplier(LargeTileMemory<Shape>& memory, const LargeTileWork<Shape>& work)
      : memory_(memory),
        work_(work),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_x_(uniform_place(shared_address(memory.x[0]) + warp_ / 4 * kPartBytes)),
        first_weight_(uniform_place(shared_address(memory.weight[0]))),
        x_(first_x_),
        weight_(first_weight_) {}

  __device__ void run() {
    const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    int tile = 0;
    for (int index = first; index < work_.num_tiles(); index += step) {
      multiply();
      write(memory_.tiles[tile]);
      if (++tile == LargeTileMemory<Shape>::kTiles) tile = 0;
    }
    if (elect_one()) wait_until_boxes_are_read();
  }

 private:
  static constexpr int kPartBytes = 64 * 128;

  // The lower half of a matrix descriptor, the address in units of 16 bytes.
  __device__ static uint32_t uniform_place(uint32_t address) {
    return static_cast<uint32_t>(uniform_matrix(swizzled_matrix(address, 1024)));
  }
  __device__ static uint64_t matrix(uint32_t place) {
    return (swizzled_matrix(0, 1024) >> 32 << 32) | place;
  }

  // The first row of this warp in a part.
  __device__ int row(int part) const { return part * Shape::kWarpgroups * 64 + warp_ * 16; }

  // Called by each warp: the end of its own wgmmas says nothing about the other warps'.
  __device__ void give_back(int stage) {
    if (lane_ == 0) barrier_arrive(&memory_.read[stage]);
  }

  __device__ void advance() {
    ring_.advance();
    x_ = ring_.stage == 0 ? first_x_ : x_ + (Shape::kXBytes >> 4);
    weight_ = ring_.stage == 0 ? first_weight_ : weight_ + (Shape::kWeightBytes >> 4);
  }

  __device__ void multiply() {
    const int steps = work_.k_steps;
    bool has_arrived = false;
    multiply_step<true>(steps == 1, has_arrived);
    constexpr int kAtOnce = 8;  // only the last one may be partial
    int k = 1;
    for (; k + kAtOnce <= steps; k += kAtOnce) {
#pragma unroll
      for (int i = 1; i < kAtOnce; ++i) multiply_step<false>(false, has_arrived);
      multiply_step<false>(k + kAtOnce == steps, has_arrived);
    }
#pragma unroll 4
    for (; k < steps; ++k) multiply_step<false>(k + 1 == steps, has_arrived);
  }

  // The first step writes the sums. At its end it may be known whether the next stage has arrived.
  template <bool kIsFirst>
  __device__ __forceinline__ void multiply_step(bool is_last, bool& has_arrived) {
    const int stage = ring_.stage, phase = ring_.phase;
    if (!has_arrived) barrier_wait(&memory_.arrived[stage], phase);
    float of_columns[Shape::kScales];
#pragma unroll
    for (int i = 0; i < Shape::kScales; ++i) of_columns[i] = memory_.weight_scales[stage][i];
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const float* of_rows = &memory_.x_scales[stage][row(part) + lane_ / 4];
      const float upper = of_rows[0], lower = of_rows[8];
      float products[Shape::kSums];
      begin_products(products, part);
      mma_wait();
      pin(products);
      if (part + 1 == Shape::kParts) {
        give_back(stage);
        advance();
        // After a tile's last stage there may be no next one: the same barrier is polled again.
        has_arrived = barrier_has_ended(&memory_.arrived[is_last ? stage : ring_.stage],
                                        is_last ? phase : ring_.phase);
      }
#pragma unroll
      for (int j = 0; j < Shape::kSums; ++j) {
        const float factor =
            (j / 2 % 2 == 0 ? upper : lower) * of_columns[j / (Shape::kScaleColumns / 2)];
        float& sum = sums_[part][j];
        sum = kIsFirst ? products[j] * factor : fmaf(products[j], factor, sum);
      }
    }
  }

  __device__ void begin_products(float (&products)[Shape::kSums], int part) const {
    const uint32_t x = x_ + (part * Shape::kWarpgroups * kPartBytes >> 4);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 32 bytes a step
      mma_64_e4m3(products, matrix(x + i * 2), matrix(weight_ + i * 2), i > 0);
    }
    mma_commit();
  }

  // ---- results

  __device__ void write(const TilePlace& place) {
    if (work_.weight_row_scales != nullptr) scale_columns(place.column);
    if (work_.f32) {
      write_f32(place);
    } else {
      write_boxes(place);
    }
  }

  __device__ void scale_columns(int first) {
#pragma unroll
    for (int block = 0; block < Shape::kColumns / 8; ++block) {
      const int column = first + block * 8;
      if (column >= work_.n) continue;
      const float2 scales = __ldg(
          reinterpret_cast<const float2*>(work_.weight_row_scales + column + 2 * (lane_ % 4)));
#pragma unroll
      for (auto& part : sums_) {
#pragma unroll
        for (int j = 4 * block; j < 4 * block + 4; j += 2) {
          part[j] *= scales.x;
          part[j + 1] *= scales.y;
        }
      }
    }
  }

  __device__ void write_boxes(const TilePlace& place) {
    const int box_row = lane_ % 16,
              odd_block = lane_ / 16;  // of the matrices that the lane addresses
    auto& boxes = memory_.out[warp_];
    if (elect_one()) wait_until_boxes_are_read();  // boxes of the tile before
    __syncwarp();
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      // Packs two values of row lane / 4 (+ 8) of the warp's 16, in column 8 * block + 2 * (lane %
      // 4).
      const auto packed = [&](int block, int lower_row) {
        const int j = 4 * block + 2 * lower_row;
        return pack_bf16(sums_[part][j], sums_[part][j + 1]);
      };
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box) {
#pragma unroll
        for (int at = 0; at < 8; at += 2) {
          const int block = Shape::first_column(box) / 8 + at;
          store_matrices(shared_address(boxes[part][box]) + box_row * 128 +
                             (((at + odd_block) ^ (box_row % 8)) * 16),
                         packed(block, 0), packed(block, 1), packed(block + 1, 0),
                         packed(block + 1, 1));
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
        for (int box = 0; box < Shape::kBoxes; ++box) {
          store_box(&work_.out_map, shared_address(boxes[part][box]),
                    place.column + Shape::first_column(box), place.row + row(part));
        }
      }
      commit_boxes();
    }
  }

  __device__ void write_f32(const TilePlace& place) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int to_row = place.row + row(part) + lane_ / 4 + 8 * lower;
        if (to_row >= work_.rows) continue;
        float* to = static_cast<float*>(work_.out) + to_row * work_.out_row_stride + place.column +
                    2 * (lane_ % 4);
#pragma unroll
        for (int block = 0; block < Shape::kColumns / 8; ++block) {
          if (place.column + block * 8 >= work_.n) continue;
          const int j = 4 * block + 2 * lower;
          // Stored singly: a sum and its product must lie in different register banks.
          store_alone(to + block * 8, sums_[part][j]);
          store_alone(to + block * 8 + 1, sums_[part][j + 1]);
        }
      }
    }
  }

  LargeTileMemory<Shape>& memory_;
  const LargeTileWork<Shape>& work_;
  const int warp_, lane_;
  const uint32_t first_x_,
      first_weight_;     // addresses of this warpgroup's operands in the first stage
  uint32_t x_, weight_;  // in the next stage
  StageRing<Shape> ring_;
  float sums_[Shape::kParts][Shape::kSums];
};

// ---- a CTA: its last warpgroup is the producer

template <typename Shape>
__device__ void run_large_tiles(const LargeTileWork<Shape>& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<LargeTileMemory<Shape>*>(bytes);
  constexpr int kMultipliers = 128 * Shape::kWarpgroups;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], 2);  // the loads, and W's scales
      barrier_init(&memory.read[stage], kMultipliers / 32);
    }
    fence_barrier_init();
  }
  __syncthreads();
  let_next_launch_begin();
  if (threadIdx.x >= kMultipliers) {
    give_registers<Shape::kLoaderRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x - kMultipliers) / 32, 0);
    if (warp == 0 && elect_one()) LargeTileLoader<Shape>(memory, work).run();
    if (warp == 1) load_weight_scales(memory, work);
  } else {
    take_registers<Shape::kMultiplierRegisters>();
    LargeTileMultiplier<Shape>(memory, work).run();
  }
}

}  // namespace fathom::cuda
