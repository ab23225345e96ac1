// What: grouped GEMM of experts with many tokens: out[token, n] = sum over k of tokens[token, k] *
// weights[n, k], tile after tile, one persistent CTA per SM.
//
// A work (a struct that a kernel takes by value) says which tiles there are and where they lie:
//   __device__ int num_tiles() const;
//   __device__ ExpertTile tile(int index, int num_tiles) const;
//   __device__ int after(int index) const;  the tile that its CTA takes next
//   static constexpr bool kGated;  weight rows are 8 of gate and the same 8 of up in turn; out is
//                                  silu(gate) * up
// One thread of a CTA calls these, before the PDL wait, so that weight loads are issued early.
//
// Layout: weights on M of wgmma, tokens on N. A tile has 128 weight rows, 64 for each of two
// consumer warpgroups, and up to kTokens tokens, multiplied by the next multiple of 32: an expert
// has any number of tokens, and its weight rows are many. kStages stages of weights [128, 64] and
// tokens [kTokens, 64] in bf16 with the 128-byte swizzle. Accumulators hold the result transposed;
// the epilogue transposes it through shared memory, 64 tokens at a time. Four-bit weights are
// stages of four panels (plans/four_bit_tiles.h): each warp converts its 16 rows in registers,
// whence the tensor cores take them, while the stage before is being multiplied.
//
// Algorithm: as ops/linear/many_rows_tile_cuda.cuh: one producer thread issues TMA loads and
// publishes a tile's output descriptor beside its first stage, two warpgroups multiply.
//
// Determinism: an element is summed in order of k by one warpgroup.
//
// Source: the PTX manual.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "base/math_constants.h"
#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/moe/experts_cuda/four_bit_codes_cuda.cuh"
#include "ops/moe/plans/four_bit_tiles.h"

namespace fathom::cuda {

// Destination and valid extent of a tile's results.
struct alignas(16) ExpertTileOut {
  __nv_bfloat16* data = nullptr;  // first element
  int row_stride = 0;             // in elements
  int tokens = 0, columns = 0;
  int k_steps = 0;  // stages; 0: no more tiles
  int blocks = 0;   // of 64 of k; of four-bit weights
};

struct ExpertTile {
  // Boxes of 64 columns, of 128 rows: columns, rows, halves, groups of rows, slabs.
  const CUtensorMap* weights = nullptr;
  const uint8_t* panels = nullptr;      // four-bit weights instead: the first panel
  int num_panels = 0;                   // up to 4
  const CUtensorMap* tokens = nullptr;  // likewise, of token_units units of tokens
  int token_units = 0;
  int first_group = 0;  // group of 8 rows, or of 8 of gate and 8 of up
  int first_token = 0;
  bool weights_are_read_once = false;  // by this launch: evict first from the L2
  ExpertTileOut out;
};

// A stage is kSlabs times 64 of k: issuing a box and waiting for a stage take some hundred clocks
// each, whatever their size.
enum class ExpertWeights { kBf16, kFourBitInteger, kFourBitE2m1 };

template <int kMostTokens, int kStageCount, int kSlabCount,
          ExpertWeights kWeightForm = ExpertWeights::kBf16>
struct ExpertTileShape {
  static constexpr int kTokens = kMostTokens, kStages = kStageCount, kSlabs = kSlabCount;
  static constexpr int kGroups = 2, kWeightRows = 64 * kGroups;
  // Tokens are loaded and multiplied in multiples of this: each multiple has its own tensor map.
  static constexpr int kTokenUnit = 32, kTokenUnits = kTokens / kTokenUnit;
  static constexpr bool kIsFourBit = kWeightForm != ExpertWeights::kBf16;
  static constexpr FourBitCode kCode =
      kWeightForm == ExpertWeights::kFourBitE2m1 ? FourBitCode::kE2m1 : FourBitCode::kInteger;
  static constexpr int kWeightSlabBytes =
      kIsFourBit ? kWeightRows / kFourBitPanelRows * kFourBitBlockBytes : kWeightRows * 128;
  static constexpr int kWeightBytes = kSlabs * kWeightSlabBytes,
                       kTokenBytes = kSlabs * kTokens * 128;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kSums = kTokens / 2;  // of a consumer thread
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
};

template <typename Shape>
struct ExpertTileMemory {
  alignas(1024) uint8_t weights[Shape::kStages][Shape::kWeightBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  alignas(1024) uint8_t out[Shape::kGroups][2][64 * 128];
  // Ring of tile metadata: the tile in its epilogue, those in the pipeline stages, and the next
  // one.
  static constexpr int kTiles = Shape::kStages + 2;
  ExpertTileOut tiles[kTiles];
  uint64_t arrived[Shape::kStages], read[Shape::kStages];
};

// ---- producer: one thread

template <typename Shape, typename Work>
class ExpertTileLoader {
 public:
  __device__ ExpertTileLoader(ExpertTileMemory<Shape>& memory, const Work& work)
      : memory_(memory), work_(work) {
    // Keeps the policies in registers instead of recreating them for each copy.
    asm volatile("" : "+l"(keep_), "+l"(read_once_));
  }

  __device__ void run() {
    const int num_tiles = work_.num_tiles();
    int index = static_cast<int>(blockIdx.x);
    int ahead = 0;  // stages whose weights are in flight
    ExpertTile tile;
    if (index < num_tiles) {
      tile = work_.tile(index, num_tiles);
      announce(tile.out);
      prefetch_map(tile.tokens);
      ahead = min(tile.out.k_steps, Shape::kStages);
      for (int k = 0; k < ahead; ++k) load_weights(tile, k, k);
    }
    wait_for_earlier_launches();
    while (index < num_tiles) {
      const int next = work_.after(index);  // the atomic is in flight while this tile is loaded
      for (int k = 0; k < tile.out.k_steps; ++k) {
        if (ahead > 0) {
          --ahead;
        } else {
          wait_until_read();
          load_weights(tile, stage_, k);
        }
        copy_box(memory_.tokens[stage_], tile.tokens, &memory_.arrived[stage_], 0, tile.first_token,
                 k * Shape::kSlabs);
        if (++stage_ == Shape::kStages) {
          stage_ = 0;
          ++passes_;
        }
      }
      index = next;
      if (index < num_tiles) {
        tile = work_.tile(index, num_tiles);
        announce(tile.out);
      }
    }
    wait_until_read();
    announce({});
    barrier_arrive(&memory_.arrived[stage_]);
  }

 private:
  // Precedes the arrival on the full barrier of the tile's first stage.
  __device__ void announce(const ExpertTileOut& out) {
    memory_.tiles[tile_] = out;
    if (++tile_ == ExpertTileMemory<Shape>::kTiles) tile_ = 0;
  }

  __device__ void wait_until_read() {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }

  __device__ void load_weights(const ExpertTile& tile, int stage, int k) {
    const int token_bytes = tile.token_units * Shape::kTokenUnit * 128 * Shape::kSlabs;
    const uint64_t policy = tile.weights_are_read_once ? read_once_ : keep_;
    if constexpr (Shape::kIsFourBit) {
      const int first = k * Shape::kSlabs;
      const int bytes = min(Shape::kSlabs, tile.out.blocks - first) * kFourBitBlockBytes;
      barrier_expect(&memory_.arrived[stage], tile.num_panels * bytes + token_bytes);
      for (int panel = 0; panel < tile.num_panels; ++panel) {
        const int block = panel * tile.out.blocks + first;  // an expert has fewer than 2^31
        copy_bytes_under(policy,
                         memory_.weights[stage] + panel * Shape::kSlabs * kFourBitBlockBytes,
                         tile.panels + static_cast<int64_t>(block) * kFourBitBlockBytes, bytes,
                         &memory_.arrived[stage]);
      }
    } else {
      barrier_expect(&memory_.arrived[stage], Shape::kWeightBytes + token_bytes);
      copy_box_under(policy, memory_.weights[stage], tile.weights, &memory_.arrived[stage], 0, 0, 0,
                     tile.first_group, k * Shape::kSlabs);
    }
  }

  ExpertTileMemory<Shape>& memory_;
  const Work& work_;
  uint64_t keep_ = keep_policy(), read_once_ = read_once_policy();
  int stage_ = 0, passes_ = 0, tile_ = 0;
};

// ---- consumers: a warpgroup and its 64 weight rows

template <typename Shape, bool kGated>
class ExpertTileMultiplier {
 public:
  __device__ explicit ExpertTileMultiplier(ExpertTileMemory<Shape>& memory)
      : memory_(memory),
        group_(static_cast<int>(threadIdx.x) / 128),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    for (;;) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      const ExpertTileOut& out = memory_.tiles[tile_];
      if (++tile_ == ExpertTileMemory<Shape>::kTiles) tile_ = 0;
      if (out.k_steps == 0) break;
      multiply_as_wide_as<1>(out);
      write(out);
    }
  }

 private:
  // Releases a stage. Each warp arrives for itself: the end of its own wgmmas says nothing about
  // other warps.
  __device__ void give_back(int stage) {
    if (lane_ == 0) barrier_arrive(&memory_.read[stage]);
  }

  template <int kUnits>
  __device__ void multiply_as_wide_as(const ExpertTileOut& out) {
    if constexpr (kUnits < Shape::kTokenUnits) {
      if (out.tokens > kUnits * Shape::kTokenUnit) return multiply_as_wide_as<kUnits + 1>(out);
    }
    if constexpr (Shape::kIsFourBit) {
      multiply_four_bit<kUnits * Shape::kTokenUnit>(out);
    } else {
      multiply<kUnits * Shape::kTokenUnit>(out.k_steps);
    }
  }

  template <int kColumns>
  __device__ void multiply(int k_steps) {
    auto& sums = reinterpret_cast<float(&)[kColumns / 2]>(sums_);
    const uint32_t weights = shared_address(memory_.weights) + group_ * 64 * 128;
    const uint32_t tokens = shared_address(memory_.tokens);
    int add = 0, before = 0;
    for (int k = 0; k < k_steps; ++k) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4 * Shape::kSlabs; ++i) {
        mma_64(
            sums,
            swizzled_matrix(weights + stage_ * Shape::kWeightBytes +
                                i / 4 * Shape::kWeightSlabBytes + i % 4 * 32,
                            1024),
            swizzled_matrix(
                tokens + stage_ * Shape::kTokenBytes + i / 4 * kColumns * 128 + i % 4 * 32, 1024),
            add);
        add = 1;
      }
      mma_commit();
      mma_wait<1>();
      if (k > 0) give_back(before);
      before = stage_;
      if (++stage_ == Shape::kStages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
    mma_wait();
    give_back(before);
  }

  // The warp's 16 rows of 64 columns of a stage: codes, and scales of the upper and the lower row.
  struct FourBitRows {
    uint4 codes;
    uint2 scales;
  };
  __device__ FourBitRows four_bit_rows(int slab) const {
    const uint8_t* const tile =
        memory_.weights[stage_] +
        ((2 * group_ + warp_ / 2) * Shape::kSlabs + slab) * kFourBitBlockBytes +
        warp_ % 2 * kFourBitTileBytes;
    return {*reinterpret_cast<const uint4*>(tile + lane_ * 16),
            *reinterpret_cast<const uint2*>(tile + 512 + lane_ / 4 * 8)};
  }

  // 16 columns in bf16: code times scale, rounded; zeros where nothing was loaded.
  __device__ static void convert(const FourBitRows& rows, int s, bool exists, uint32_t (&a)[4]) {
    const uint32_t word = s == 0   ? rows.codes.x
                          : s == 1 ? rows.codes.y
                          : s == 2 ? rows.codes.z
                                   : rows.codes.w;
    // Both halves the scale of the word's 32 columns.
    const uint32_t half = s < 2 ? 0x1010 : 0x3232;
    const uint32_t scales[2] = {__byte_perm(rows.scales.x, 0, half),
                                __byte_perm(rows.scales.y, 0, half)};
    four_bit_fragment<Shape::kCode>(word, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t value = multiply_bf16x2(a[i], scales[i % 2]);
      a[i] = exists ? value : 0;
    }
  }

  template <int kColumns>
  __device__ void multiply_four_bit(const ExpertTileOut& out) {
    auto& sums = reinterpret_cast<float(&)[kColumns / 2]>(sums_);
    const uint32_t tokens = shared_address(memory_.tokens);
    const int k_steps = out.k_steps, blocks = out.blocks;
    int add = 0, before = 0;
    uint32_t a[2][4];  // the tensor cores read one while the other is being made
    for (int k = 0; k < k_steps; ++k) {
      barrier_wait(&memory_.arrived[stage_], phase_);
#pragma unroll
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        const FourBitRows rows = four_bit_rows(slab);
        const bool exists = slab == 0 || k * Shape::kSlabs + slab < blocks;
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          convert(rows, s, exists, a[s % 2]);
          mma_fence();
          mma_64(sums, a[s % 2][0], a[s % 2][1], a[s % 2][2], a[s % 2][3],
                 swizzled_matrix(
                     tokens + stage_ * Shape::kTokenBytes + slab * kColumns * 128 + s * 32, 1024),
                 add);
          add = 1;
          mma_commit();
          mma_wait<1>();
          if (slab == 0 && s == 0 && k > 0) give_back(before);
        }
      }
      before = stage_;
      if (++stage_ == Shape::kStages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
    mma_wait();
    give_back(before);
  }

  __device__ static float gated(float gate, float up) {
    return __fdividef(gate, 1.0f + exp2_fast(-kLog2E * gate)) * up;
  }

  // Packs sums of the warp's weight rows and 8 tokens from 8 * block on: rows lane / 4 of the upper
  // or the lower 8, tokens 2 * (lane % 4) and the next.
  __device__ uint32_t packed(int block, int lower) const {
    const int j = 4 * block + 2 * lower;
    return pack_bf16(sums_[j], sums_[j + 1]);
  }
  __device__ uint32_t packed_gated(int block) const {
    const int j = 4 * block;
    return pack_bf16(gated(sums_[j], sums_[j + 2]), gated(sums_[j + 1], sums_[j + 3]));
  }

  // Offset of 16 bytes of a token's results in shared memory; the warpgroup has 8 or 4 such chunks
  // a token. Rows of 128 bytes, swizzled.
  static constexpr int kChunks = kGated ? 4 : 8;
  __device__ static int place(int token, int chunk) {
    const int at = token * kChunks + chunk, row = at / 8;
    return row * 128 + ((at % 8 ^ row % 8) * 16);
  }

  __device__ void write(const ExpertTileOut& out) {
    constexpr int kTokensAtOnce = 128 / kChunks;
    const int column = group_ * kChunks * 8 + static_cast<int>(threadIdx.x) % kChunks * 8;
    const bool exists = column < out.columns;
#pragma unroll
    for (int part = 0; part < Shape::kTokens / 64; ++part) {
      if (part * 64 >= out.tokens) break;
      // This staging buffer is free: the barrier of the other buffer, after which it was last read,
      // has passed.
      const uint32_t staging = shared_address(memory_.out[group_][staging_ ^= 1]);
      if constexpr (kGated) {
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
          const int block = part * 8 + quad * 4;
          store_matrices_transposed(staging + place(quad * 32 + lane_, warp_), packed_gated(block),
                                    packed_gated(block + 1), packed_gated(block + 2),
                                    packed_gated(block + 3));
        }
      } else {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int block = part * 8 + pair * 2;
          const int token = pair * 16 + lane_ / 16 * 8 + lane_ % 8;
          store_matrices_transposed(staging + place(token, 2 * warp_ + lane_ / 8 % 2),
                                    packed(block, 0), packed(block, 1), packed(block + 1, 0),
                                    packed(block + 1, 1));
        }
      }
      named_barrier(1 + group_, 128);
#pragma unroll
      for (int i = 0; i < 64 / kTokensAtOnce; ++i) {
        const int token = i * kTokensAtOnce + static_cast<int>(threadIdx.x) % 128 / kChunks;
        if (part * 64 + token < out.tokens && exists) {
          *reinterpret_cast<float4*>(out.data + int64_t{part * 64 + token} * out.row_stride +
                                     column) =
              load_shared(staging + place(token, static_cast<int>(threadIdx.x) % kChunks));
        }
      }
    }
  }

  ExpertTileMemory<Shape>& memory_;
  const int group_, warp_, lane_;
  int stage_ = 0, phase_ = 0, tile_ = 0, staging_ = 0;
  float sums_[Shape::kSums];
};

// ---- CTA: the last warpgroup produces

template <typename Shape, typename Work>
__device__ void run_expert_tiles(const Work& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ExpertTileMemory<Shape>*>(bytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], 1);
      barrier_init(&memory.read[stage], 4 * Shape::kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  let_next_launch_begin();
  if (threadIdx.x >= 128 * Shape::kGroups) {
    give_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 128 * Shape::kGroups) ExpertTileLoader<Shape, Work>(memory, work).run();
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ExpertTileMultiplier<Shape, Work::kGated>(memory).run();
  }
}

}  // namespace fathom::cuda
