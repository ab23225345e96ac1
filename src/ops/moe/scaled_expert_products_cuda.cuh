// What: the products of experts in e4m3 with scales by blocks: out[token, n] = sum over blocks b of
// 128 of k of token_scales[b, token] * weight_scales[n / 128, b] * (sum over k in b of
// tokens[token, k] * weights[n, k]), tile after tile, one block a multiprocessor.
//
// A work (a struct that a kernel takes by value) says which tiles there are and where they lie:
//   __device__ int num_tiles() const;
//   __device__ ScaledExpertTile tile(int index, int num_tiles) const;
//   __device__ int after(int index) const;  the tile that its block takes next
//   static constexpr bool kGated;  a tile's weights are 128 rows of gate and the same 128 of up;
//   out
//                                  is silu(gate) * up in e4m3, with a scale for the 128
// One thread of a block asks, and before earlier launches have ended: weights are loaded then.
//
// Layout: weights on M of the tensor core's instruction, tokens on N, as in
// expert_products_cuda.cuh. A tile has 256 rows of weights, twice 64 for each of two warpgroups,
// and up to 128 tokens, multiplied by the next multiple of 16. Of gate and up a warpgroup has the
// same 64 rows, so that both values of an activation are one thread's. A box brings gate's and up's
// rows by 16: the even ones, then the odd ones. Then a thread's two rows of an instruction's result
// are neighbours, and two e4m3 of them the 16 bits that stmatrix.trans moves.
//
// Algorithm: one thread copies and leaves word of where a tile's results belong beside its first
// stage. A stage is a block of k that has scales: its products end in registers of their own, and
// fp32 sums take them times both scales, while the other warpgroup multiplies. Activations: each
// token's largest magnitude of the tile's 128 is found by shuffles and by way of shared memory.
//
// Determinism: an element is summed in order of k by one warpgroup.
//
// Source: the PTX manual; the quantisation is ops/scaled_linear/quantize_rows.h's.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/cuda/fp8.cuh"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {

// Where a tile's results belong, and what of it there is.
struct alignas(16) ScaledExpertOut {
  void* data = nullptr;                  // of the first element: e4m3 if gated, else bf16
  float* scales = nullptr;               // of the first token, if gated
  const float* weight_scales = nullptr;  // of the tile's first row, the first k
  int second_scales = 0;  // from there to up's, or to those of the other 128 rows of the tile
  int row_stride = 0;     // in elements
  int tokens = 0, columns = 0;
  int k_steps = 0;  // 0: no more tiles
  ScaleForm form = ScaleForm::kF32;
};

struct ScaledExpertTile {
  const CUtensorMap* weights = nullptr;       // gated: boxes of columns, 8, 2, 8 groups, halves
  const CUtensorMap* tokens = nullptr;        // boxes of token_units units of tokens
  const CUtensorMap* token_scales = nullptr;  // boxes of kTokens tokens
  int token_units = 0;
  int first_row = 0;  // of weights; gated: group of 16 rows of gate
  int first_token = 0;
  bool weights_are_read_once = false;  // by this launch: they are to leave the L2 first
  ScaledExpertOut out;
};

template <int kMostTokens, int kStageCount>
struct ScaledExpertShape {
  static constexpr int kTokens = kMostTokens, kStages = kStageCount;
  static constexpr int kGroups = 2, kParts = 2, kWeightRows = 64 * kGroups * kParts;
  static constexpr int kTokenUnit = 16, kTokenUnits = kTokens / kTokenUnit;
  static constexpr int kWeightBytes = kWeightRows * 128, kTokenBytes = kTokens * 128;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

template <typename Shape>
struct ScaledExpertMemory {
  alignas(1024) uint8_t weights[Shape::kStages][Shape::kWeightBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  alignas(128) float token_scales[Shape::kStages][Shape::kTokens];
  union {
    alignas(1024) uint8_t out[Shape::kGroups][2][64 * 128];
    struct {
      alignas(1024) uint8_t values[Shape::kTokens * 128];
      float largest[4 * Shape::kGroups][Shape::kTokens];  // of each warp's rows
      float inverse[Shape::kTokens];
    } activations;
  };
  // In turn: of the tile whose results are written, those whose stages are filled, and the next.
  static constexpr int kTiles = Shape::kStages + 2;
  ScaledExpertOut tiles[kTiles];
  uint64_t arrived[Shape::kStages], read[Shape::kStages];
};

// ---- copies: one thread

template <typename Shape, typename Work>
class ScaledExpertLoader {
 public:
  __device__ ScaledExpertLoader(ScaledExpertMemory<Shape>& memory, const Work& work)
      : memory_(memory), work_(work) {
    // Made once, not for each copy.
    asm volatile("" : "+l"(keep_), "+l"(read_once_));
  }

  __device__ void run() {
    const int num_tiles = work_.num_tiles();
    int index = static_cast<int>(blockIdx.x);
    int ahead = 0;  // stages whose weights are on their way
    ScaledExpertTile tile;
    if (index < num_tiles) {
      tile = work_.tile(index, num_tiles);
      announce(tile.out);
      prefetch_map(tile.tokens);
      prefetch_map(tile.token_scales);
      ahead = min(tile.out.k_steps, Shape::kStages);
      for (int k = 0; k < ahead; ++k) load_weights(tile, k, k);
    }
    wait_for_earlier_launches();
    while (index < num_tiles) {
      const int next = work_.after(index);  // its answer is on its way while this tile is loaded
      for (int k = 0; k < tile.out.k_steps; ++k) {
        if (ahead > 0) {
          --ahead;
        } else {
          wait_until_read();
          load_weights(tile, stage_, k);
        }
        copy_box(memory_.tokens[stage_], tile.tokens, &memory_.arrived[stage_], k * 128,
                 tile.first_token);
        copy_box(memory_.token_scales[stage_], tile.token_scales, &memory_.arrived[stage_],
                 tile.first_token, k);
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
  // Before the barrier of the tile's first stage is told to expect it.
  __device__ void announce(const ScaledExpertOut& out) {
    memory_.tiles[tile_] = out;
    if (++tile_ == ScaledExpertMemory<Shape>::kTiles) tile_ = 0;
  }

  __device__ void wait_until_read() {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }

  __device__ void load_weights(const ScaledExpertTile& tile, int stage, int k) {
    uint64_t* arrived = &memory_.arrived[stage];
    barrier_expect(arrived, Shape::kWeightBytes + tile.token_units * Shape::kTokenUnit * 128 +
                                Shape::kTokens * static_cast<int>(sizeof(float)));
    const uint64_t policy = tile.weights_are_read_once ? read_once_ : keep_;
    if constexpr (Work::kGated) {
      copy_box_under(policy, memory_.weights[stage], tile.weights, arrived, k * 128, 0, 0,
                     tile.first_row, 0);
    } else {
      copy_box_under(policy, memory_.weights[stage], tile.weights, arrived, k * 128, tile.first_row,
                     0);
    }
  }

  ScaledExpertMemory<Shape>& memory_;
  const Work& work_;
  uint64_t keep_ = keep_policy(), read_once_ = read_once_policy();
  int stage_ = 0, passes_ = 0, tile_ = 0;
};

// ---- products: a warpgroup and twice its 64 rows of weights

template <typename Shape, bool kGated>
class ScaledExpertMultiplier {
 public:
  __device__ explicit ScaledExpertMultiplier(ScaledExpertMemory<Shape>& memory)
      : memory_(memory),
        thread_(static_cast<int>(threadIdx.x)),
        group_(thread_ / 128),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ void run() {
    for (;;) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      const ScaledExpertOut& out = memory_.tiles[tile_];
      if (++tile_ == ScaledExpertMemory<Shape>::kTiles) tile_ = 0;
      if (out.k_steps == 0) break;
      compute_as_wide_as<1>(out);
    }
  }

 private:
  // Of a tile of kUnits units of tokens.
  template <int kUnits>
  struct Sums {
    static constexpr int kColumns = kUnits * Shape::kTokenUnit, kBlocks = kColumns / 8,
                         kCount = kColumns / 2;
    float of[Shape::kParts][kCount];
  };

  template <int kUnits>
  __device__ void compute_as_wide_as(const ScaledExpertOut& out) {
    if constexpr (kUnits < Shape::kTokenUnits) {
      if (out.tokens > kUnits * Shape::kTokenUnit) return compute_as_wide_as<kUnits + 1>(out);
    }
    Sums<kUnits> sums;
    multiply(out, sums);
    if constexpr (kGated) {
      write_activations(out, sums);
    } else {
      write_results(out, sums);
    }
  }

  // Each warp for itself: that its own products have ended says nothing of the other warps'.
  __device__ void give_back(int stage) {
    __syncwarp();  // all have read scales
    if (lane_ == 0) barrier_arrive(&memory_.read[stage]);
  }

  // ---- sums

  // Where registers hold both parts' products they are under way together.
  template <int kUnits>
  __device__ void multiply(const ScaledExpertOut& out, Sums<kUnits>& sums) {
    constexpr int kCount = Sums<kUnits>::kCount;
    constexpr int kSets = 2 * Shape::kParts * kCount <= 192 ? Shape::kParts : 1;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (float& sum : sums.of[part]) sum = 0;
    }
    // The weights' of a step, asked for a step before. Of down a warpgroup's rows have the same.
    constexpr int kScales = kGated ? 2 : 1;
    const bool other_rows = !kGated && group_ > 0 && out.columns > 128;
    const float* scales = out.weight_scales + (other_rows ? out.second_scales : 0);
    const int second = out.second_scales;
    float ahead[kScales], now[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) ahead[i] = __ldg(scales + i * second);
    for (int left = out.k_steps; left > 0; --left) {
      if (left > 1) ++scales;
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        now[i] = ahead[i];
        ahead[i] = __ldg(scales + i * second);
      }
      barrier_wait(&memory_.arrived[stage_], phase_);
      float products[kSets][kCount];
      if constexpr (kSets == 1) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          begin_products(part, products[0]);
          mma_wait();
          pin(products[0]);
          promote(products[0], now[part % kScales], sums.of[part]);
        }
      } else {
        begin_products(0, products[0]);
        begin_products(1, products[1]);
        mma_wait<1>();
        pin(products[0]);
        promote(products[0], now[0], sums.of[0]);
        mma_wait();
        pin(products[1]);
        promote(products[1], now[1 % kScales], sums.of[1]);
      }
      give_back(stage_);
      if (++stage_ == Shape::kStages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
  }

  template <int kCount>
  __device__ void begin_products(int part, float (&products)[kCount]) const {
    const int row = kGated ? part * 128 + group_ * 64 : group_ * 128 + part * 64;
    const uint32_t weights = shared_address(memory_.weights[stage_]) + row * 128;
    const uint32_t tokens = shared_address(memory_.tokens[stage_]);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma_64_e4m3(products, swizzled_matrix(weights + i * 32, 1024),
                  swizzled_matrix(tokens + i * 32, 1024), i > 0);
    }
    mma_commit();
  }

  template <int kCount>
  __device__ void promote(const float (&products)[kCount], float weight_scale,
                          float (&sums)[kCount]) const {
    const float* scales = memory_.token_scales[stage_] + 2 * (lane_ % 4);
#pragma unroll
    for (int block = 0; block < kCount / 4; ++block) {
      const float2 two = *reinterpret_cast<const float2*>(scales + 8 * block);
      const float scale[2] = {two.x * weight_scale, two.y * weight_scale};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 4 * block + i;
        sums[j] = fmaf(products[j], scale[i % 2], sums[j]);
      }
    }
  }

  // ---- activations

  __device__ static float gated(float gate, float up) {
    constexpr float kLog2E = 1.4426950408889634f;
    return __fdividef(gate, 1.0f + exp2_fast(-kLog2E * gate)) * up;
  }

  template <int kUnits>
  __device__ void write_activations(const ScaledExpertOut& out, Sums<kUnits>& sums) {
    constexpr int kColumns = Sums<kUnits>::kColumns, kBlocks = Sums<kUnits>::kBlocks;
    auto& staging = memory_.activations;
    auto& values = sums.of[0];
#pragma unroll
    for (int j = 0; j < Sums<kUnits>::kCount; ++j) values[j] = gated(values[j], sums.of[1][j]);
    find_largest<kUnits>(values);
    named_barrier(kBoth, 256);
    if (thread_ < kColumns) {
      float magnitude = kLeastMagnitude;
#pragma unroll
      for (int warp = 0; warp < 4 * Shape::kGroups; ++warp) {
        magnitude = fmaxf(magnitude, staging.largest[warp][thread_]);
      }
      const auto [scale, inverse] = block_scale(magnitude, out.form);
      staging.inverse[thread_] = inverse;
      if (thread_ < out.tokens) out.scales[thread_] = scale;
    }
    named_barrier(kBoth, 256);
    const auto packed = [&](int block) -> uint32_t {
      if (block >= kBlocks) return 0;
      const float* v = values + 4 * block;
      const float2 by =
          *reinterpret_cast<const float2*>(staging.inverse + 8 * block + 2 * (lane_ % 4));
      return pack_fp8<Fp8::kE4M3>(v[0] * by.x, v[2] * by.x, v[1] * by.y, v[3] * by.y);
    };
    const uint32_t to = shared_address(staging.values);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 4) {
      store_matrices_transposed(to + place(8 * block + lane_, warp_), packed(block),
                                packed(block + 1), packed(block + 2), packed(block + 3));
    }
    named_barrier(kBoth, 256);
    auto* data = static_cast<uint8_t*>(out.data) + thread_ % 8 * 16;
#pragma unroll
    for (int first = 0; first < kColumns; first += 32) {
      const int token = first + thread_ / 8;
      if (token < out.tokens) {
        *reinterpret_cast<float4*>(data + int64_t{token} * out.row_stride) =
            load_shared(to + place(token, thread_ % 8));
      }
    }
  }

  // Each token's of the warp's 16 rows. A thread has two rows and two tokens of each block of 8; of
  // the eight threads with the same tokens each ends up with an eighth or a quarter of the blocks.
  template <int kUnits>
  __device__ void find_largest(const float (&values)[Sums<kUnits>::kCount]) {
    const bool upper = lane_ & 16, odd = lane_ & 8;
#pragma unroll
    for (int b = 0; b < kUnits; ++b) {
      float of[2][2];  // half of the blocks, token
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float* v = values + 4 * (half * kUnits + b) + i;
          of[half][i] = fmaxf(fabsf(v[0]), fabsf(v[2]));
        }
      }
      float two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(~0u, upper ? of[0][i] : of[1][i], 16);
        two[i] = fmaxf(upper ? of[1][i] : of[0][i], other);
      }
      const float other = __shfl_xor_sync(~0u, odd ? two[0] : two[1], 8);
      float one = fmaxf(odd ? two[1] : two[0], other);
      one = fmaxf(one, __shfl_xor_sync(~0u, one, 4));
      if ((lane_ & 4) == 0) {
        const int token = 8 * ((upper ? kUnits : 0) + b) + 2 * (lane_ % 4) + (odd ? 1 : 0);
        memory_.activations.largest[warp_][token] = one;
      }
    }
  }

  // A token's 128 bytes in shared memory, by 16, swizzled.
  __device__ static int place(int token, int chunk) {
    return token * 128 + ((chunk ^ token % 8) * 16);
  }

  // ---- results of down

  template <int kUnits>
  __device__ void write_results(const ScaledExpertOut& out, const Sums<kUnits>& sums) {
    constexpr int kBlocks = Sums<kUnits>::kBlocks;
    const int chunk = thread_ % 8;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const int column = group_ * 128 + part * 64 + chunk * 8;
#pragma unroll
      for (int first = 0; first < kBlocks; first += 8) {  // 64 tokens
        // What lay there has been read: all have met since, when its successor was there.
        const uint32_t staging = shared_address(memory_.out[group_][staging_ ^= 1]);
#pragma unroll
        for (int block = first; block < kBlocks && block < first + 8; block += 2) {
          const float* v = sums.of[part] + 4 * block;
          const int token = (block - first) * 8 + lane_ / 16 * 8 + lane_ % 8;
          store_matrices_transposed(staging + place(token, 2 * (warp_ % 4) + lane_ / 8 % 2),
                                    pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                    pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        }
        named_barrier(kOwn + group_, 128);
#pragma unroll
        for (int i = 0; i < 4 && first * 8 + i * 16 < kBlocks * 8; ++i) {
          const int token = i * 16 + thread_ % 128 / 8;
          if (first * 8 + token < out.tokens && column < out.columns) {
            *reinterpret_cast<float4*>(static_cast<__nv_bfloat16*>(out.data) +
                                       int64_t{first * 8 + token} * out.row_stride + column) =
                load_shared(staging + place(token, chunk));
          }
        }
      }
    }
  }

  static constexpr int kOwn = 1, kBoth = 3;  // named barriers: a group's, of which there are two

  ScaledExpertMemory<Shape>& memory_;
  const int thread_, group_, warp_, lane_;
  int stage_ = 0, phase_ = 0, tile_ = 0, staging_ = 0;
};

// ---- a block: its last warpgroup copies

template <typename Shape, typename Work>
__device__ void run_scaled_expert_tiles(const Work& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ScaledExpertMemory<Shape>*>(bytes);
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
    if (threadIdx.x == 128 * Shape::kGroups) ScaledExpertLoader<Shape, Work>(memory, work).run();
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ScaledExpertMultiplier<Shape, Work::kGated>(memory).run();
  }
}

}  // namespace fathom::cuda
