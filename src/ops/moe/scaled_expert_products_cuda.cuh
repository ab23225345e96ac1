// What: the products of experts in e4m3 with scales by blocks: out[token, n] = sum over blocks b of
// 128 of k of token_scales[b, token] * weight_scales[n / 128, b] * (sum over k in b of
// tokens[token, k] * weights[n, k]), tile after tile, one block a multiprocessor.
//
// A work (a struct that a kernel takes by value) says which tiles there are and where they lie:
//   __device__ int num_tiles() const;
//   __device__ ScaledExpertTile tile(int index, int num_tiles, bool waited) const;
//   __device__ int after(int index) const;  the tile that its block takes next
//   static constexpr bool kGated;  a tile's weights are 128 rows of gate and the same 128 of up,
//                                  out is silu(gate) * up in e4m3, with a scale for the 128
// One thread of a block asks, at first (not waited) before earlier launches have ended: weights are
// loaded then.
//
// Layout: weights on M of the tensor core's instruction, tokens on N, as in
// expert_products_cuda.cuh. A tile has 256 rows of weights, twice 64 for each of two warpgroups,
// and up to 128 tokens, multiplied by the next multiple of 16. Of gate and up a warpgroup has the
// same 64 rows, so that both values of an activation are one thread's. A box brings gate's and up's
// rows by 16: the even ones, then the odd ones. Then a thread's two rows of an instruction's result
// are neighbours, and two e4m3 of them the 16 bits that stmatrix.trans moves.
//
// Algorithm: one thread copies and leaves word of where a tile's results belong beside its first
// stage. A warp multiplies tokens' scales with weights', a step's beside its stage. A stage is a
// block of k that has scales: its products end in registers of their own, and fp32 sums take them
// times both scales, while the other warpgroup multiplies. Activations: each token's largest
// magnitude of the tile's 128 is found by shuffles and by way of shared memory.
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
  void* data = nullptr;     // of the first element: e4m3 if gated, else bf16
  float* scales = nullptr;  // of the first token, if gated
  int row_stride = 0;       // in elements
  int tokens = 0, columns = 0;
  int k_steps = 0;  // 0: no more tiles
  ScaleForm form = ScaleForm::kF32;
};

// Of a tile's scales.
struct ScaledExpertScales {
  const float* tokens = nullptr;   // of the first token, the first k
  int64_t tokens_stride = 0;       // to the next block of k
  const float* weights = nullptr;  // of the tile's first row, the first k
  int second = 0;  // from there to up's, or to those of the other 128 rows of the tile
};

struct ScaledExpertTile {
  const CUtensorMap* weights = nullptr;  // gated: boxes of columns, 8, 2, 8 groups, halves
  const CUtensorMap* tokens = nullptr;   // boxes of token_units units of tokens
  int token_units = 0;
  int first_row = 0;  // of weights; gated: group of 16 rows of gate
  int first_token = 0;
  bool weights_are_read_once = false;  // by this launch: they are to leave the L2 first
  ScaledExpertScales scales;
  ScaledExpertOut out;
};

template <int kMostTokens, int kStageCount>
struct ScaledExpertShape {
  static constexpr int kTokens = kMostTokens, kStages = kStageCount;
  static constexpr int kGroups = 2, kParts = 2, kWeightRows = 64 * kGroups * kParts;
  static constexpr int kTokenUnit = 16, kTokenUnits = kTokens / kTokenUnit;
  static constexpr int kWeightBytes = kWeightRows * 128, kTokenBytes = kTokens * 128;
  // Products of tokens' scales with weights', of both parts or groups: a consumer's lane wants two
  // tokens of each 8. Words of padding send lanes to different banks.
  static constexpr int kScalesALane = kTokens / 4 + 4;
  static constexpr int kOutTokens = 48;  // of down that a group writes at a time
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};

template <typename Shape>
struct ScaledExpertMemory {
  alignas(1024) uint8_t weights[Shape::kStages][Shape::kWeightBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  alignas(16) float scales[Shape::kStages][2][4][Shape::kScalesALane];
  union {
    alignas(1024) uint8_t out[Shape::kGroups][2][Shape::kOutTokens * 128];
    struct {
      alignas(1024) uint8_t values[Shape::kTokens * 128];
      float largest[4 * Shape::kGroups][Shape::kTokens];  // of each warp's rows
      float inverse[Shape::kTokens];
    } activations;
  };
  // In turn: of the tile whose results are written, those whose stages are filled, and the next.
  static constexpr int kTiles = Shape::kStages + 2;
  ScaledExpertOut tiles[kTiles];
  ScaledExpertScales tile_scales[kTiles];
  uint64_t announced[kTiles];
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
      tile = work_.tile(index, num_tiles, false);
      announce(tile);
      prefetch_map(tile.tokens);
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
        if (++stage_ == Shape::kStages) {
          stage_ = 0;
          ++passes_;
        }
      }
      index = next;
      if (index < num_tiles) {
        tile = work_.tile(index, num_tiles, true);
        announce(tile);
      }
    }
    wait_until_read();
    announce({});
    barrier_arrive(&memory_.arrived[stage_]);
  }

 private:
  // Before the barrier of the tile's first stage is told to expect it.
  __device__ void announce(const ScaledExpertTile& tile) {
    memory_.tiles[tile_] = tile.out;
    memory_.tile_scales[tile_] = tile.scales;
    barrier_arrive(&memory_.announced[tile_]);
    if (++tile_ == ScaledExpertMemory<Shape>::kTiles) tile_ = 0;
  }

  __device__ void wait_until_read() {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }

  __device__ void load_weights(const ScaledExpertTile& tile, int stage, int k) {
    uint64_t* arrived = &memory_.arrived[stage];
    barrier_expect(arrived, Shape::kWeightBytes + tile.token_units * Shape::kTokenUnit * 128);
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

// ---- scales: a warp

// Multiplies tokens' scales with weights', so that those who add up products need not; loads them
// two steps before they are wanted.
template <typename Shape>
class ScaledExpertScaler {
 public:
  __device__ explicit ScaledExpertScaler(ScaledExpertMemory<Shape>& memory)
      : memory_(memory), lane_(static_cast<int>(threadIdx.x) % 32) {
    static_assert(Shape::kTokens == 4 * 32);
  }

  __device__ void run() {
    wait_for_earlier_launches();
    for (int tile = 0, parity = 0;;) {
      barrier_wait(&memory_.announced[tile], parity);
      const int k_steps = memory_.tiles[tile].k_steps;
      if (k_steps == 0) break;
      scale(memory_.tile_scales[tile], k_steps, 4 * lane_ < memory_.tiles[tile].tokens);
      if (++tile == ScaledExpertMemory<Shape>::kTiles) {
        tile = 0;
        parity ^= 1;
      }
    }
    if (lane_ == 0) barrier_arrive(&memory_.arrived[stage_]);
  }

 private:
  struct Step {
    float4 tokens;
    float weights[2];
  };

  __device__ void scale(const ScaledExpertScales& from, int k_steps, bool has_tokens) {
    const float* tokens = from.tokens + 4 * lane_;
    const float* weights = from.weights;
    const int64_t stride = from.tokens_stride;
    const int second = from.second;
    const auto load = [&](int k) {
      Step step = {};
      if (k < k_steps) {
        if (has_tokens) step.tokens = *reinterpret_cast<const float4*>(tokens + k * stride);
        step.weights[0] = __ldg(weights + k);
        step.weights[1] = __ldg(weights + second + k);
      }
      return step;
    };
    Step now = load(0), next = load(1);
    for (int k = 0; k < k_steps; ++k) {
      const Step later = load(k + 2);
      if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Tokens 4 lane to 4 lane + 3, of a block of 8.
        float* to = memory_.scales[stage_][i][lane_ % 2 * 2] + lane_ / 2 * 2;
        const float weight = now.weights[i];
        *reinterpret_cast<float2*>(to) = {now.tokens.x * weight, now.tokens.y * weight};
        *reinterpret_cast<float2*>(to + Shape::kScalesALane) = {now.tokens.z * weight,
                                                                now.tokens.w * weight};
      }
      __syncwarp();
      if (lane_ == 0) barrier_arrive(&memory_.arrived[stage_]);
      if (++stage_ == Shape::kStages) {
        stage_ = 0;
        ++passes_;
      }
      now = next;
      next = later;
    }
  }

  ScaledExpertMemory<Shape>& memory_;
  const int lane_;
  int stage_ = 0, passes_ = 0;
};

// ---- products: a warpgroup and twice its 64 rows of weights

template <typename Shape, bool kGated>
class ScaledExpertMultiplier {
 public:
  __device__ explicit ScaledExpertMultiplier(ScaledExpertMemory<Shape>& memory)
      : memory_(memory),
        thread_(static_cast<int>(threadIdx.x)),
        group_(uniform(thread_ / 128)),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ void run() {
    for (;;) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      const ScaledExpertOut& out = memory_.tiles[tile_];
      if (++tile_ == ScaledExpertMemory<Shape>::kTiles) tile_ = 0;
      k_steps_ = uniform(out.k_steps);
      if (k_steps_ == 0) break;
      compute_as_wide_as<1>(out, uniform(out.tokens));
    }
  }

 private:
  // The same in all lanes, as the compiler is to know: descriptions of matrices are computed once
  // for a warp then.
  __device__ static int uniform(int value) { return __shfl_sync(~0u, value, 0); }

  // Of a tile of kUnits units of tokens.
  template <int kUnits>
  struct Sums {
    static constexpr int kColumns = kUnits * Shape::kTokenUnit, kBlocks = kColumns / 8,
                         kCount = kColumns / 2;
    float of[Shape::kParts][kCount];
  };

  template <int kUnits>
  __device__ void compute_as_wide_as(const ScaledExpertOut& out, int tokens) {
    if constexpr (kUnits < Shape::kTokenUnits) {
      if (tokens > kUnits * Shape::kTokenUnit) return compute_as_wide_as<kUnits + 1>(out, tokens);
    }
    Sums<kUnits> sums;
    multiply(sums);
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

  template <int kUnits>
  __device__ void multiply(Sums<kUnits>& sums) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (float& sum : sums.of[part]) sum = 0;
    }
    // Each stage has code of its own: where it lies is known when that is compiled.
    for (int left = k_steps_, first = stage_;; first = 0, phase_ ^= 1) {
#pragma unroll
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        if (stage < first) continue;
        if (left-- == 0) {
          stage_ = stage;
          return;
        }
        multiply_stage(stage, sums);
      }
    }
  }

  template <int kUnits>
  __device__ void multiply_stage(int stage, Sums<kUnits>& sums) {
    barrier_wait(&memory_.arrived[stage], phase_);
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      float products[Sums<kUnits>::kCount];
      begin_products(stage, part, products);
      mma_wait();
      pin(products);
      promote(products, stage, part, sums.of[part]);
    }
    give_back(stage);
  }

  template <int kCount>
  __device__ void begin_products(int stage, int part, float (&products)[kCount]) const {
    const int row = kGated ? part * 128 + group_ * 64 : group_ * 128 + part * 64;
    const uint64_t weights =
        swizzled_matrix(shared_address(memory_.weights[stage]) + row * 128, 1024);
    const uint64_t tokens = swizzled_matrix(shared_address(memory_.tokens[stage]), 1024);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma_64_e4m3(products, moved(weights, i * 32), moved(tokens, i * 32), i > 0);
    }
    mma_commit();
  }

  template <int kCount>
  __device__ void promote(const float (&products)[kCount], int stage, int part,
                          float (&sums)[kCount]) const {
    const float* scales = memory_.scales[stage][kGated ? part : group_][lane_ % 4];
#pragma unroll
    for (int pair = 0; pair < kCount / 8; ++pair) {  // of blocks of 8 tokens
      const float4 four = *reinterpret_cast<const float4*>(scales + 4 * pair);
      const float scale[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int j = 8 * pair + i;
        sums[j] = fmaf(products[j], scale[i / 4][i % 2], sums[j]);
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
    constexpr int kBlocks = Sums<kUnits>::kBlocks, kBlocksAtOnce = Shape::kOutTokens / 8;
    const int chunk = thread_ % 8;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const int column = group_ * 128 + part * 64 + chunk * 8;
#pragma unroll
      for (int first = 0; first < kBlocks; first += kBlocksAtOnce) {
        // What lay there has been read: all have met since, when its successor was there.
        const uint32_t staging = shared_address(memory_.out[group_][staging_ ^= 1]);
#pragma unroll
        for (int block = first; block < kBlocks && block < first + kBlocksAtOnce; block += 2) {
          const float* v = sums.of[part] + 4 * block;
          const int token = (block - first) * 8 + lane_ / 16 * 8 + lane_ % 8;
          store_matrices_transposed(staging + place(token, 2 * (warp_ % 4) + lane_ / 8 % 2),
                                    pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                    pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        }
        named_barrier(kOwn + group_, 128);
#pragma unroll
        for (int i = 0; 2 * i < kBlocksAtOnce && first + 2 * i < kBlocks; ++i) {
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

  static constexpr int kOwn = 1, kBoth = 3;  // named barriers; a group's are two

  ScaledExpertMemory<Shape>& memory_;
  const int thread_, group_, warp_, lane_;
  int stage_ = 0, phase_ = 0, tile_ = 0, staging_ = 0, k_steps_ = 0;
};

// ---- a block: its last warpgroup copies

template <typename Shape, typename Work>
__device__ void run_scaled_expert_tiles(const Work& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ScaledExpertMemory<Shape>*>(bytes);
  static_assert(sizeof(memory) <= 227 * 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], 2);
      barrier_init(&memory.read[stage], 4 * Shape::kGroups);
    }
    for (uint64_t& announced : memory.announced) barrier_init(&announced, 1);
    fence_barrier_init();
  }
  __syncthreads();
  let_next_launch_begin();
  if (threadIdx.x >= 128 * Shape::kGroups) {
    give_registers<Shape::kProducerRegisters>();
    constexpr int kFirst = 128 * Shape::kGroups;
    if (threadIdx.x == kFirst) {
      ScaledExpertLoader<Shape, Work>(memory, work).run();
    } else if (threadIdx.x / 32 == kFirst / 32 + 1) {
      ScaledExpertScaler<Shape>(memory).run();
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ScaledExpertMultiplier<Shape, Work::kGated>(memory).run();
  }
}

}  // namespace fathom::cuda
