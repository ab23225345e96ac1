// What: GEMM core for many rows: out tile [64 * kGroups, kColumns] = A tile times B tile
// transposed, tile after tile, one CTA an SM.
//
// A work (a struct passed to the kernel by value) says which tiles there are and where they lie:
//   __device__ int num_tiles() const;
//   __device__ Tile tile(int index) const;
//   static constexpr TileResult kResult;
// They are known before earlier launches have ended: B is loaded then.
//
// Layout: kStages stages of A [64 * kGroups, 64] and B [kColumns, 64] in bf16 with the 128-byte
// swizzle, or 128 of k in e4m3, which are as many bytes, with A's scales; two boxes of [16, 64] for
// each consumer warp's results. kGroups consumer warpgroups compute 64 rows each with all columns,
// in registers; in one more warpgroup, one thread issues the loads, and in e4m3 one warp reads B's
// scales.
//
// Algorithm: persistent CTAs. The producer thread runs through the tiles ahead of the consumers and
// fills stages (in e4m3 another thread loads the first stages of A); with a tile's first stage it
// stores where the results belong, so that only one thread computes tile positions. Each warpgroup
// issues four wgmmas of 16 of k a stage, with one stage's wgmmas in flight while it waits for the
// next, and then releases the stage before. Groups without rows compute nothing but take part in
// the barriers. Results become rows in shared memory, each warp on its own, while the other groups
// multiply and the next tile's operands load. In e4m3 a stage is one k block of the scales: its
// wgmmas end before they are promoted, times the scales, into sums in registers of their own;
// meanwhile other warpgroups multiply. With split-K, the kSplit CTAs of a cluster have the same
// tile and a k-slice each; they exchange sums so that each completes an equal share of the columns.
// Such a launch has one tile for each cluster.
//
// Determinism: an element is summed in order of k by one warpgroup; k-slices are added in their
// order.
//
// Source: the PTX manual; the pipeline (one producer thread, consumer warpgroups, a full and an
// empty barrier) is that of NVIDIA's warp-specialised GEMMs, as described in the documentation of
// CUTLASS and DeepGEMM.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <numeric>
#include <type_traits>

#include "device/cuda/cluster.cuh"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"

namespace fathom::cuda {

enum class TileResult {
  kBf16,
  kBf16Boxes,  // stored by TMA while the next tile is multiplied
  kF32,
};

// e4m3 only: block-wise 128x128 scales of a tile's rows of B.
struct TileScales {
  const float* data = nullptr;  // first row, first k block
  int stride = 0;               // to the next 128 rows
  int row_in_block = 0;         // the first row's
  const float* rows = nullptr;  // per-row factors of the results, or null
};

// Destination of a tile's results, and how much of the tile exists.
struct alignas(16) TileOut {
  void* data = nullptr;    // first element
  int64_t row_stride = 0;  // in elements
  int rows = 0, columns = 0;
  int groups = 0;    // existing groups of 64 rows
  int k_steps = 0;   // of kStepColumns, this CTA's; 0: no more tiles
  bool f32 = false;  // e4m3 only: f32 results instead of bf16
  TileScales scales;
  const CUtensorMap* map = nullptr;  // kBf16Boxes only: boxes of [16, 64] of data
  int row = 0, column = 0;
};

struct Tile {
  const CUtensorMap* a = nullptr;         // boxes of [64, 64], in e4m3 [kRows, 128]
  const CUtensorMap* b = nullptr;         // boxes of [kColumns / 2, 64], in e4m3 [kColumns, 128]
  const CUtensorMap* a_scales = nullptr;  // e4m3 only: boxes of [1, kRows] of [k / 128, rows]
  int a_row = 0, a_batch = 0;
  int b_row = 0, b_second_row = 0, b_batch = 0;  // first rows of the two column halves
  TileOut out;                                   // k_steps of all CTAs
};

// Barrier of all threads of the cluster.
__device__ inline void meet_in_cluster() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// The tile order of a batch of GEMMs: in bands of `band` tiles along one side, across all of the
// other.
struct TileRaster {
  struct Place {
    int batch, row_tile, column_tile;
  };

  int row_tiles = 0, column_tiles = 0;  // per batch
  int band = 1;
  bool band_of_columns = false;

  __device__ Place place(int index) const {
    const int of_batch = row_tiles * column_tiles, batch = index / of_batch;
    const int within = index - batch * of_batch;
    const int across = band_of_columns ? row_tiles : column_tiles;
    const int along = band_of_columns ? column_tiles : row_tiles;
    const int first = within / (band * across) * band;
    const int width = along - first < band ? along - first : band;
    const int in_band = within - first * across;
    const int far = in_band / width, near = first + in_band - far * width;
    return {batch, band_of_columns ? far : near, band_of_columns ? near : far};
  }
};

template <int kGroupCount, int kColumnCount, int kStageCount, int kSplitCount = 1>
struct TileShape {
  static constexpr int kGroups = kGroupCount, kColumns = kColumnCount, kStages = kStageCount,
                       kSplit = kSplitCount;
  static constexpr bool kScaled = false;
  // Boxes of 16 rows that stage a warp's results.
  static constexpr int kOutBoxes = 2, kOutBoxBytes = 16 * 128;
  static constexpr int kStepColumns = 64;  // k per stage
  static constexpr int kGroupRows = 64, kRows = kGroupRows * kGroups;
  static constexpr int kGroupBytes = kGroupRows * 128, kHalfBytes = kColumns / 2 * 128;
  static constexpr int kABytes = kGroups * kGroupBytes, kBBytes = 2 * kHalfBytes;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(kGroups >= 1 && kGroups <= 3);
  // A consumer holds kColumns / 2 sums in registers, which are redistributed after the launch.
  // Three warpgroups leave 160 registers for each thread. The compiler requires an instruction to
  // need fewer than the 128 registers that a launch of four warpgroups begins with: two
  // instructions share the columns.
  static constexpr int kParts = kGroups == 3 && kColumns == 256 ? 2 : 1;
  static constexpr int kPartSums = kColumns / 2 / kParts, kPartBytes = kBBytes / kParts;
  static constexpr bool kSharesRegisters = kGroups > 1;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 232;
  // Columns that a CTA finishes, and a thread's sums of them.
  static constexpr int kOwnColumns = kColumns / kSplit, kOwnSums = kOwnColumns / 2;
};

// The shape of e4m3 tiles.
template <int kGroupCount, int kColumnCount, int kStageCount, int kSplitCount = 1>
struct ScaledTileShape : TileShape<kGroupCount, kColumnCount, kStageCount, kSplitCount> {
  static constexpr bool kScaled = true;
  static constexpr int kStepColumns = 128;
  // Whether all of a warp's results are whole boxes, which are stored while the next tile is
  // multiplied.
  static constexpr bool kWritesBoxes = kColumnCount / kSplitCount % 64 == 0;
  static constexpr int kOutBoxes = kWritesBoxes ? kColumnCount / kSplitCount / 64 : 2;
  // Columns that share a scale: tiles begin at multiples of them.
  static constexpr int kScaleColumns = std::gcd(kColumnCount, 128);
  static constexpr int kScales = kColumnCount / kScaleColumns;
  // Stages whose wgmmas are in flight at a time: a thread's registers hold them and the sums.
  static constexpr int kSets = kColumnCount > 128 ? 1 : kColumnCount > 64 ? 2 : 4;
};

struct NoScales {};
template <typename Shape>
struct StageScales {
  alignas(128) float rows[Shape::kStages][Shape::kRows];
  float columns[Shape::kStages][Shape::kScales];
};

template <typename Shape>
struct TileMemory {
  alignas(1024) uint8_t a[Shape::kStages][Shape::kABytes];
  alignas(1024) uint8_t b[Shape::kStages][Shape::kBBytes];
  alignas(1024) uint8_t
      out[Shape::kGroups * 4][Shape::kOutBoxes][Shape::kOutBoxBytes];  // of the consumer warps
  // Ring of tile descriptions: of the tile being written, those whose stages are filled, and the
  // next.
  static constexpr int kTiles = Shape::kStages + 2;
  TileOut tiles[kTiles];
  uint64_t arrived[Shape::kStages], read[Shape::kStages];
  std::conditional_t<Shape::kScaled, StageScales<Shape>, NoScales> scales;
};

// The tile of a CTA of a cluster, and its k-slice.
template <typename Shape, typename Work>
__device__ Tile find_tile(const Work& work, int index, int rank, int* first_k) {
  if constexpr (Shape::kSplit == 1) {
    return work.tile(index);
  } else {
    Tile tile = work.tile(index);
    *first_k = tile.out.k_steps * rank / Shape::kSplit;
    tile.out.k_steps = tile.out.k_steps * (rank + 1) / Shape::kSplit - *first_k;
    tile.out.scales.data += *first_k;
    return tile;
  }
}

// ---- producer: one thread

template <typename Shape, typename Work>
class TileLoader {
 public:
  __device__ TileLoader(TileMemory<Shape>& memory, const Work& work, int rank)
      : memory_(memory), work_(work), rank_(rank) {}

  __device__ void run(int first, int step) {
    const Tile first_tile = find(first);
    announce(first_tile.out);
    int ahead = min(first_tile.out.k_steps, Shape::kStages);  // stages whose B is in flight
    for (int k = 0; k < ahead; ++k) {
      expect(first_tile, k);
      load_b(first_tile, k, k);
    }
    wait_for_earlier_launches();
    for (int index = first; index < work_.num_tiles(); index += step) {
      const Tile tile = find(index);
      if (index != first) announce(tile.out);
      for (int k = 0; k < tile.out.k_steps; ++k) {
        if (ahead > 0) {
          --ahead;
          if constexpr (!Shape::kScaled) load_a(tile, stage_, k);
        } else {
          wait_until_read();
          expect(tile, stage_);
          load_b(tile, stage_, k);
          load_a(tile, stage_, k);
        }
        if (++stage_ == Shape::kStages) {
          stage_ = 0;
          ++passes_;
        }
      }
    }
    wait_until_read();
    announce({});
    barrier_arrive(&memory_.arrived[stage_]);
  }

  // For e4m3: loads A of the stages whose B run() issues at once, from another thread: the thread
  // that issues B waits in the copy engine's queue when earlier launches end.
  __device__ void load_first_a(int first) {
    const Tile tile = find(first);
    const int ahead = min(tile.out.k_steps, Shape::kStages);
    wait_for_earlier_launches();
    for (int k = 0; k < ahead; ++k) load_a(tile, k, k);
  }

 private:
  __device__ Tile find(int index) { return find_tile<Shape>(work_, index, rank_, &first_k_); }

  // Called before the barrier of the tile's first stage is armed.
  __device__ void announce(const TileOut& out) {
    memory_.tiles[tile_] = out;
    if (++tile_ == TileMemory<Shape>::kTiles) tile_ = 0;
  }

  __device__ void wait_until_read() {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }

  __device__ void expect(const Tile& tile, int stage) {
    if constexpr (Shape::kScaled) {
      barrier_expect(&memory_.arrived[stage], Shape::kABytes + Shape::kBBytes + Shape::kRows * 4);
    } else {
      barrier_expect(&memory_.arrived[stage],
                     tile.out.groups * Shape::kGroupBytes + Shape::kBBytes);
    }
  }

  __device__ void load_a(const Tile& tile, int stage, int k) {
    uint64_t* arrived = &memory_.arrived[stage];
    const int column = (first_k_ + k) * Shape::kStepColumns;
    if constexpr (Shape::kScaled) {
      copy_box(memory_.a[stage], tile.a, arrived, column, tile.a_row, tile.a_batch);
      copy_box(memory_.scales.rows[stage], tile.a_scales, arrived, tile.a_row, first_k_ + k);
    } else {
      for (int group = 0; group < tile.out.groups; ++group) {
        copy_box(memory_.a[stage] + group * Shape::kGroupBytes, tile.a, arrived, column,
                 tile.a_row + group * Shape::kGroupRows, tile.a_batch);
      }
    }
  }

  __device__ void load_b(const Tile& tile, int stage, int k) {
    uint64_t* arrived = &memory_.arrived[stage];
    const int column = (first_k_ + k) * Shape::kStepColumns;
    copy_box(memory_.b[stage], tile.b, arrived, column, tile.b_row, tile.b_batch);
    if constexpr (!Shape::kScaled) {
      copy_box(memory_.b[stage] + Shape::kHalfBytes, tile.b, arrived, column, tile.b_second_row,
               tile.b_batch);
    }
  }

  TileMemory<Shape>& memory_;
  const Work& work_;
  const int rank_;
  int first_k_ = 0;
  int stage_ = 0, passes_ = 0, tile_ = 0;
};

// ---- e4m3: column scales, one warp

// Loads the scales of 32 steps at a time, as soon as the ring has room for the first of them.
template <typename Shape, typename Work>
class TileScaleLoader {
 public:
  __device__ TileScaleLoader(TileMemory<Shape>& memory, const Work& work, int rank)
      : memory_(memory), work_(work), rank_(rank) {}

  __device__ void run(int first, int step) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int index = first; index < work_.num_tiles(); index += step) {
      int first_k;
      const TileOut out = find_tile<Shape>(work_, index, rank_, &first_k).out;
      for (int begin = 0; begin < out.k_steps; begin += 32) {
        float scales[Shape::kScales];
#pragma unroll
        for (int i = 0; i < Shape::kScales; ++i) {  // columns beyond the last use its scale
          const int column = max(min(i * Shape::kScaleColumns, out.columns - 1), 0);
          scales[i] =
              __ldg(out.scales.data + (out.scales.row_in_block + column) / 128 * out.scales.stride +
                    min(begin + lane, out.k_steps - 1));
        }
        const int count = min(out.k_steps - begin, 32);
        for (int k = 0; k < count; ++k) {
          wait_until_read();
          if (lane == k) {
#pragma unroll
            for (int i = 0; i < Shape::kScales; ++i) memory_.scales.columns[stage_][i] = scales[i];
            barrier_arrive(&memory_.arrived[stage_]);
          }
          advance();
        }
      }
    }
    wait_until_read();
    if (lane == 0) barrier_arrive(&memory_.arrived[stage_]);
  }

 private:
  __device__ void wait_until_read() const {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }
  __device__ void advance() {
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      ++passes_;
    }
  }

  TileMemory<Shape>& memory_;
  const Work& work_;
  const int rank_;
  int stage_ = 0, passes_ = 0;
};

// ---- consumer: a warpgroup and its 64 rows

template <typename Shape, typename Work>
class TileMultiplier {
 public:
  __device__ TileMultiplier(TileMemory<Shape>& memory, int rank)
      : memory_(memory),
        rank_(rank),
        group_(static_cast<int>(threadIdx.x) / 128),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    for (;;) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      const TileOut& out = memory_.tiles[tile_];
      if (++tile_ == TileMemory<Shape>::kTiles) tile_ = 0;
      if (out.k_steps == 0) break;
      const bool takes_part = group_ < out.groups;
      if (takes_part) {
        if constexpr (Shape::kScaled) {
          multiply_scaled(out.k_steps);
        } else {
          multiply(out.k_steps);
        }
      } else {
        keep_step(out.k_steps);
      }
      if constexpr (Shape::kSplit > 1) {
        meet_in_cluster();  // all stages of all CTAs have been read
        if (takes_part) send_sums();
        meet_in_cluster();
        if (takes_part) for_rank<0>([&](auto rank) { add_sums<rank.value>(); });
      }
      if (takes_part) {
        for_rank<0>([&](auto rank) {
          if constexpr (Shape::kScaled) scale_columns<rank.value>(out);
          write<rank.value>(out);
        });
      }
      if constexpr (Shape::kSplit > 1) break;
    }
    if constexpr (Work::kResult == TileResult::kBf16Boxes) {
      if (lane_ == 0) wait_until_boxes_are_read();
    }
  }

 private:
  template <int kValue>
  struct Constant {
    static constexpr int value = kValue;
  };

  // Calls `function` with this CTA's rank as a constant: registers have no run-time index.
  template <int kRank, typename Function>
  __device__ void for_rank(Function&& function) {
    if constexpr (Shape::kSplit == 1) {
      function(Constant<0>{});
    } else if constexpr (kRank < Shape::kSplit) {
      if (rank_ == kRank) {
        function(Constant<kRank>{});
      } else {
        for_rank<kRank + 1>(function);
      }
    }
  }

  __device__ void advance() {
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // Called by each warp: the end of its own wgmmas says nothing about the other warps'.
  __device__ void give_back(int stage) {
    if (lane_ == 0) barrier_arrive(&memory_.read[stage]);
  }

  __device__ void keep_step(int k_steps) {
    for (int k = 0; k < k_steps; ++k) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      give_back(stage_);
      advance();
    }
  }

  // Matrix descriptors of the next stage.
  __device__ uint64_t matrix_a() const {
    return uniform_matrix(
        swizzled_matrix(shared_address(memory_.a[stage_]) + group_ * Shape::kGroupBytes, 1024));
  }
  __device__ uint64_t matrix_b() const {
    return uniform_matrix(swizzled_matrix(shared_address(memory_.b[stage_]), 1024));
  }

  __device__ void multiply(int k_steps) {
    int add = 0, before = 0;
    for (int k = 0; k < k_steps; ++k) {
      const uint64_t a = matrix_a(), b = matrix_b();
      barrier_wait(&memory_.arrived[stage_], phase_);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          mma_64(sums_[part], moved(a, i * 32), moved(b, part * Shape::kPartBytes + i * 32), add);
        }
        add = 1;
      }
      mma_commit();
      mma_wait<1>();
      if (k > 0) give_back(before);
      before = stage_;
      advance();
    }
    mma_wait();
    give_back(before);
  }

  // Main loop for e4m3. As many stages' wgmmas are in flight as registers allow; while one group
  // promotes its sums, the other group's wgmmas keep the tensor cores busy.
  __device__ void multiply_scaled(int k_steps) {
#pragma unroll
    for (float& value : sums_[0]) value = 0;
    int k = 0;
    for (; k + Shape::kSets <= k_steps; k += Shape::kSets) multiply_stages<Shape::kSets>();
    for (; Shape::kSets > 1 && k < k_steps; ++k) multiply_stages<1>();
  }

  template <int kSets>
  __device__ void multiply_stages() {
    float products[kSets][Shape::kPartSums];
    float factors[kSets][2][Shape::kScales];  // per row of the thread and scale
    int stages[kSets];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const uint64_t a = matrix_a(), b = matrix_b();
      barrier_wait(&memory_.arrived[stage_], phase_);
      const float* rows = memory_.scales.rows[stage_] + warp_ * 16 + lane_ / 4;
#pragma unroll
      for (int i = 0; i < Shape::kScales; ++i) {
        const float of_columns = memory_.scales.columns[stage_][i];
        factors[set][0][i] = rows[0] * of_columns;
        factors[set][1][i] = rows[8] * of_columns;
      }
      begin_products(products[set], a, b);
      stages[set] = stage_;
      advance();
    }
    end_stages<kSets, 0>(products, factors, stages);
  }

  template <int kSets, int kSet>
  __device__ void end_stages(float (&products)[kSets][Shape::kPartSums], const auto& factors,
                             const int (&stages)[kSets]) {
    mma_wait<kSets - 1 - kSet>();
    pin(products[kSet]);
    give_back(stages[kSet]);
    constexpr int kSums = Shape::kScaleColumns / 2;
#pragma unroll
    for (int j = 0; j < Shape::kPartSums; ++j) {
      sums_[0][j] = fmaf(products[kSet][j], factors[kSet][j / 2 % 2][j / kSums], sums_[0][j]);
    }
    if constexpr (kSet + 1 < kSets) end_stages<kSets, kSet + 1>(products, factors, stages);
  }

  __device__ void begin_products(float (&products)[Shape::kPartSums], uint64_t a,
                                 uint64_t b) const {
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma_64_e4m3(products, moved(a, i * 32), moved(b, i * 32), i > 0);
    }
    mma_commit();
  }

  __device__ float& sum(int j) { return sums_[j / Shape::kPartSums][j % Shape::kPartSums]; }

  // ---- kSplit: sends sums of the columns that other CTAs finish into their used stages

  // Address of the sums from CTA `from`, in the order of the threads' registers.
  __device__ uint32_t place_of_sums(int from, int i) const {
    constexpr int kGroupSums = Shape::kOwnSums / 4 * 128;
    return shared_address(memory_.a) + 16 * ((from * Shape::kGroups + group_) * kGroupSums +
                                             i * 128 + static_cast<int>(threadIdx.x) % 128);
  }

  __device__ void send_sums() {
#pragma unroll
    for (int to = 0; to < Shape::kSplit; ++to) {
      if (to == rank_) continue;
#pragma unroll
      for (int i = 0; i < Shape::kOwnSums / 4; ++i) {
        const int j = to * Shape::kOwnSums + 4 * i;
        store_in_block(address_in_block(place_of_sums(rank_, i), static_cast<uint32_t>(to)),
                       make_float4(sum(j), sum(j + 1), sum(j + 2), sum(j + 3)));
      }
    }
  }

  template <int kRank>
  __device__ void add_sums() {
#pragma unroll
    for (int i = 0; i < Shape::kOwnSums / 4; ++i) {
      float4 total = make_float4(0, 0, 0, 0);
      const int j = kRank * Shape::kOwnSums + 4 * i;
#pragma unroll
      for (int from = 0; from < Shape::kSplit; ++from) {
        const float4 more = from == kRank ? make_float4(sum(j), sum(j + 1), sum(j + 2), sum(j + 3))
                                          : load_shared(place_of_sums(from, i));
        total.x += more.x;
        total.y += more.y;
        total.z += more.z;
        total.w += more.w;
      }
      sum(j) = total.x;
      sum(j + 1) = total.y;
      sum(j + 2) = total.z;
      sum(j + 3) = total.w;
    }
  }

  // ---- results

  // Adds the sums of the columns that this CTA finishes.
  template <int kRank>
  __device__ void scale_columns(const TileOut& out) {
    if (out.scales.rows == nullptr) return;
#pragma unroll
    for (int own = 0; own < Shape::kOwnColumns / 8; ++own) {
      const int block = kRank * (Shape::kOwnColumns / 8) + own;
      if (block * 8 >= out.columns) continue;
      const auto* from =
          reinterpret_cast<const float2*>(out.scales.rows + block * 8 + 2 * (lane_ % 4));
      const float2 scales = __ldg(from);
#pragma unroll
      for (int j = 4 * block; j < 4 * block + 4; j += 2) {
        sum(j) *= scales.x;
        sum(j + 1) *= scales.y;
      }
    }
  }

  template <int kRank>
  __device__ void write(const TileOut& out) {
    if constexpr (Shape::kScaled) {
      if (out.f32) return write_f32<kRank>(out);
    }
    if constexpr (Work::kResult == TileResult::kF32) {
      write_f32<kRank>(out);
    } else if constexpr (Work::kResult == TileResult::kBf16Boxes) {
      write_boxes<kRank>(out);
    } else {
      write_bf16<kRank>(out);
    }
  }

  // Packs two values of row lane / 4 (+ 8) of the warp's 16, in column 8 * block + 2 * (lane % 4).
  __device__ uint32_t packed(int block, int lower_row) {
    const int j = 4 * block + 2 * lower_row;
    return pack_bf16(sum(j), sum(j + 1));
  }

  template <int kRank>
  __device__ void write_bf16(const TileOut& out) {
    constexpr int kOutColumns = Shape::kOwnColumns;
    constexpr int kBoxColumns = kOutColumns % 64 == 0 ? 64 : kOutColumns % 32 == 0 ? 32 : 16;
    static_assert(kOutColumns % kBoxColumns == 0);
    constexpr int kChunks = kBoxColumns / 8, kRowsAtOnce = 32 / kChunks;  // 16 bytes a lane
    const int row = lane_ % 16, odd_block = lane_ / 16;  // of the matrices that the lane addresses
    const int chunk = lane_ % kChunks, first_row = lane_ / kChunks;  // for reading rows
    auto* to = static_cast<__nv_bfloat16*>(out.data) + kRank * kOutColumns + chunk * 8 +
               (warp_ * 16 + first_row) * out.row_stride;
#pragma unroll
    for (int box = 0; box < kOutColumns / kBoxColumns; ++box) {
      const uint32_t staging = shared_address(memory_.out[warp_][box % 2]);
#pragma unroll
      for (int block = 0; block < kChunks; block += 2) {
        const int first = kRank * (kOutColumns / 8) + box * kChunks + block;
        store_matrices(staging + row * 128 + (((block + odd_block) ^ (row % 8)) * 16),
                       packed(first, 0), packed(first, 1), packed(first + 1, 0),
                       packed(first + 1, 1));
      }
      __syncwarp();
      const int column = kRank * kOutColumns + box * kBoxColumns + chunk * 8;
#pragma unroll
      for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
        const int from_row = i * kRowsAtOnce + first_row;
        if (warp_ * 16 + from_row < out.rows && column < out.columns) {
          *reinterpret_cast<float4*>(to + i * kRowsAtOnce * out.row_stride + box * kBoxColumns) =
              load_shared(staging + from_row * 128 + ((chunk ^ (from_row % 8)) * 16));
        }
      }
    }
  }

  template <int kRank>
  __device__ void write_boxes(const TileOut& out) {
    static_assert(Shape::kOwnColumns == Shape::kOutBoxes * 64);
    constexpr int kBlocks = Shape::kOwnColumns / 8;
    const int row = lane_ % 16, odd_block = lane_ / 16;  // of the matrices that the lane addresses
    if (lane_ == 0) wait_until_boxes_are_read();         // boxes of the tile before
    __syncwarp();
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      const int first = kRank * kBlocks + block;
      store_matrices(shared_address(memory_.out[warp_][block / 8]) + row * 128 +
                         (((block % 8 + odd_block) ^ (row % 8)) * 16),
                     packed(first, 0), packed(first, 1), packed(first + 1, 0),
                     packed(first + 1, 1));
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) {
#pragma unroll
      for (int box = 0; box < Shape::kOutBoxes; ++box) {
        store_box(out.map, shared_address(memory_.out[warp_][box]),
                  out.column + kRank * Shape::kOwnColumns + box * 64, out.row + warp_ * 16);
      }
      commit_boxes();
    }
  }

  template <int kRank>
  __device__ void write_f32(const TileOut& out) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int row = warp_ * 16 + lane_ / 4 + 8 * lower;
      if (row >= out.rows) continue;
      float* to = static_cast<float*>(out.data) + row * out.row_stride + 2 * (lane_ % 4);
#pragma unroll
      for (int own = 0; own < Shape::kOwnColumns / 8; ++own) {
        const int block = kRank * (Shape::kOwnColumns / 8) + own;
        if (block * 8 >= out.columns) continue;
        const int j = 4 * block + 2 * lower;
        if constexpr (Shape::kScaled) {  // sums and products must lie in different register banks
          store_alone(to + block * 8, sum(j));
          store_alone(to + block * 8 + 1, sum(j + 1));
        } else {
          *reinterpret_cast<float2*>(to + block * 8) = make_float2(sum(j), sum(j + 1));
        }
      }
    }
  }

  TileMemory<Shape>& memory_;
  const int rank_, group_, warp_, lane_;
  int stage_ = 0, phase_ = 0, tile_ = 0;
  float sums_[Shape::kParts][Shape::kPartSums];
};

// ---- a CTA: its last warpgroup is the producer

template <typename Shape, typename Work>
__device__ void run_tiles(const Work& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<TileMemory<Shape>*>(bytes);
  const int rank = Shape::kSplit > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first = static_cast<int>(blockIdx.x) / Shape::kSplit,
            step = static_cast<int>(gridDim.x) / Shape::kSplit;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], Shape::kScaled ? 2 : 1);
      barrier_init(&memory.read[stage], 4 * Shape::kGroups);
    }
    fence_barrier_init();
  }
  if constexpr (Shape::kSplit > 1) {
    meet_in_cluster();
  } else {
    __syncthreads();
  }
  let_next_launch_begin();
  if (threadIdx.x >= 128 * Shape::kGroups) {
    if constexpr (Shape::kSharesRegisters) give_registers<Shape::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - 4 * Shape::kGroups, 0);
    if (warp == 0 && elect_one()) TileLoader<Shape, Work>(memory, work, rank).run(first, step);
    if constexpr (Shape::kScaled) {
      if (warp == 2 && elect_one()) TileLoader<Shape, Work>(memory, work, rank).load_first_a(first);
      if (warp == 1) {
        TileScaleLoader<Shape, Work>(memory, work, rank).run(first, step);
      }
    }
    if constexpr (Shape::kSplit > 1) {  // as often as the consumers: there is one tile
      meet_in_cluster();
      meet_in_cluster();
    }
  } else {
    if constexpr (Shape::kSharesRegisters) take_registers<Shape::kConsumerRegisters>();
    TileMultiplier<Shape, Work>(memory, rank).run();
  }
}

}  // namespace fathom::cuda
