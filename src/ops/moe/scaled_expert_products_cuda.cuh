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
// Layout: tokens on M of the tensor core's instruction, weights on N. A tile has up to 128 tokens,
// 64 for each of two warpgroups, of which the second idles where there are no more than 64, and
// 256 rows of weights, in two parts of 128. Of gate and up a part is one of the two, so that both
// values of an activation are one thread's, and a token's 128 activations are four threads'. A box
// brings gate's and up's rows by 16: the even ones, then the odd ones. Then a thread has four
// neighbours of them.
//
// Algorithm: one thread copies and leaves word of where a tile's results belong beside its first
// stage. A warp multiplies tokens' scales with weights', a step's beside its stage. A stage is a
// block of k that has scales: its products end in registers of their own, and fp32 sums take them
// times both scales, while the other warpgroup multiplies. Each warp writes its 16 tokens' results
// by way of shared memory of its own.
// kSplit blocks, a cluster, have the same tile and a share of k each; each finishes one warpgroup's
// tokens, and is sent the other's sums of them.
//
// Determinism: an element is summed in order of k by one warpgroup; of kSplit, the two shares are
// added.
//
// Source: the PTX manual; the quantisation is ops/scaled_linear/quantize_rows.h's.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "device/cuda/cluster.cuh"
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
  int first_k = 0;                     // step
  bool weights_are_read_once = false;  // by this launch: they are to leave the L2 first
  ScaledExpertScales scales;
  ScaledExpertOut out;
};

template <int kStageCount, int kSplitCount = 1>
struct ScaledExpertShape {
  static constexpr int kStages = kStageCount, kSplit = kSplitCount;
  static constexpr int kGroups = 2, kTokens = 64 * kGroups;
  static constexpr int kParts = 2, kPartRows = 128, kWeightRows = kPartRows * kParts;
  static constexpr int kTokenUnit = 16, kTokenUnits = kTokens / kTokenUnit;
  static constexpr int kWeightBytes = kWeightRows * 128, kTokenBytes = kTokens * 128;
  static constexpr int kSums = kPartRows / 2;  // of a thread's, of a part
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  // The launch gives all threads as many, by 8; nobody gets more than others have given.
  static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                (kGroups + 1) * (65536 / kThreads / 8 * 8));
  static_assert(kSplit == 1 || kSplit == kGroups);
};

// Of the groups whose tokens this block finishes.
struct NoSums {};
template <typename Shape>
struct ReceivedSums {
  float4 sums[Shape::kParts * Shape::kSums / 4][128];
  uint64_t received, given_back;  // given back by the other block
};

template <typename Shape>
struct ScaledExpertMemory {
  alignas(1024) uint8_t weights[Shape::kStages][Shape::kWeightBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  // Products of tokens' scales with those of each part of the weights.
  alignas(16) float scales[Shape::kStages][Shape::kParts][Shape::kTokens];
  // 16 tokens' 128 bytes of results: of each warp of the groups that write.
  alignas(1024) uint8_t out[4 * Shape::kGroups / Shape::kSplit][16 * 128];
  alignas(16) std::conditional_t<Shape::kSplit == 1, NoSums, ReceivedSums<Shape>> other;
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
  using Memory = ScaledExpertMemory<Shape>;

 public:
  __device__ ScaledExpertLoader(Memory& memory, const Work& work, int rank)
      : memory_(memory), work_(work), rank_(rank) {
    // Made once, not for each copy.
    asm volatile("" : "+l"(keep_), "+l"(read_once_));
  }

  __device__ void run() {
    const int num_tiles = work_.num_tiles();
    int index = static_cast<int>(blockIdx.x) / Shape::kSplit;
    int ahead = 0;  // stages whose weights are on their way
    ScaledExpertTile tile;
    if (index < num_tiles) {
      tile = find(index, num_tiles, false);
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
        copy_box(memory_.tokens[stage_], tile.tokens, &memory_.arrived[stage_],
                 (tile.first_k + k) * 128, tile.first_token);
        if (++stage_ == Shape::kStages) {
          stage_ = 0;
          ++passes_;
        }
      }
      index = next;
      if (index < num_tiles) {
        tile = find(index, num_tiles, true);
        announce(tile);
      }
    }
    wait_until_read();
    announce({});
    barrier_arrive(&memory_.arrived[stage_]);
  }

 private:
  // This block's share of the steps.
  __device__ ScaledExpertTile find(int index, int num_tiles, bool waited) const {
    ScaledExpertTile tile = work_.tile(index, num_tiles, waited);
    if constexpr (Shape::kSplit > 1) {
      const int k_steps = tile.out.k_steps;
      tile.first_k = k_steps * rank_ / Shape::kSplit;
      tile.out.k_steps = k_steps * (rank_ + 1) / Shape::kSplit - tile.first_k;
      tile.scales.tokens += tile.first_k * tile.scales.tokens_stride;
      tile.scales.weights += tile.first_k;
    }
    return tile;
  }

  // Before the barrier of the tile's first stage is told to expect it.
  __device__ void announce(const ScaledExpertTile& tile) {
    memory_.tiles[tile_] = tile.out;
    memory_.tile_scales[tile_] = tile.scales;
    barrier_arrive(&memory_.announced[tile_]);
    if (++tile_ == Memory::kTiles) tile_ = 0;
  }

  __device__ void wait_until_read() {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }

  __device__ void load_weights(const ScaledExpertTile& tile, int stage, int k) {
    uint64_t* arrived = &memory_.arrived[stage];
    barrier_expect(arrived, Shape::kWeightBytes + tile.token_units * Shape::kTokenUnit * 128);
    const int column = (tile.first_k + k) * 128;
    const uint64_t policy = tile.weights_are_read_once ? read_once_ : keep_;
    if constexpr (Work::kGated) {
      copy_box_under(policy, memory_.weights[stage], tile.weights, arrived, column, 0, 0,
                     tile.first_row, 0);
    } else {
      copy_box_under(policy, memory_.weights[stage], tile.weights, arrived, column, tile.first_row,
                     0);
    }
  }

  Memory& memory_;
  const Work& work_;
  const int rank_;
  uint64_t keep_ = keep_policy(), read_once_ = read_once_policy();
  int stage_ = 0, passes_ = 0, tile_ = 0;
};

// ---- scales: a warp

// Multiplies tokens' scales with weights', so that those who add up products need not; loads them
// two steps before they are wanted.
template <typename Shape>
class ScaledExpertScaler {
  using Memory = ScaledExpertMemory<Shape>;

 public:
  __device__ explicit ScaledExpertScaler(Memory& memory)
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
      if (++tile == Memory::kTiles) {
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
      for (int part = 0; part < Shape::kParts; ++part) {
        const float weight = now.weights[part];
        *reinterpret_cast<float4*>(&memory_.scales[stage_][part][4 * lane_]) = {
            now.tokens.x * weight, now.tokens.y * weight, now.tokens.z * weight,
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

  Memory& memory_;
  const int lane_;
  int stage_ = 0, passes_ = 0;
};

// ---- products: a warpgroup and its 64 tokens

template <typename Shape, bool kGated>
class ScaledExpertMultiplier {
  using Memory = ScaledExpertMemory<Shape>;

 public:
  __device__ ScaledExpertMultiplier(Memory& memory, int rank)
      : memory_(memory),
        rank_(rank),
        group_(uniform(static_cast<int>(threadIdx.x) / 128)),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    for (;;) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      const ScaledExpertOut& out = memory_.tiles[tile_];
      if (++tile_ == Memory::kTiles) tile_ = 0;
      k_steps_ = uniform(out.k_steps);
      if (k_steps_ == 0) break;
      const int tokens = uniform(out.tokens);
      const bool both = tokens > 64;  // else the groups take turns
      if (!both) turn_ ^= 1;
      if (both || turn_ == group_) {
        tokens_at_ = both ? 64 * group_ : 0;
        compute(out, tokens - tokens_at_);
      } else {
        for_each_stage([](int) {});
      }
    }
  }

 private:
  // The same in all lanes, as the compiler is to know: descriptions of matrices are computed once
  // for a warp then.
  __device__ static int uniform(int value) { return __shfl_sync(~0u, value, 0); }

  // Element j: token lane / 4 (+ 8 if j & 2) of the warp's 16, row 8 * (j / 4) + 2 * (lane % 4) +
  // (j & 1) of the part's weights.
  struct Sums {
    float of[Shape::kParts][Shape::kSums];
  };

  __device__ void compute(const ScaledExpertOut& out, int tokens) {
    Sums sums;
#pragma unroll
    for (auto& part : sums.of) {
#pragma unroll
      for (float& sum : part) sum = 0;
    }
    for_each_stage([&](int stage) { multiply(stage, sums); });
    const int warps = min((tokens + 15) / 16, 4);  // that have tokens
    if constexpr (Shape::kSplit > 1) {
      if (group_ != rank_) return send(sums, warps);
      receive(sums, warps);
    }
    if (warp_ >= warps) return;
    if constexpr (kGated) {
      write_activations(out, sums);
    } else {
      write_results(out, sums);
    }
  }

  // Each stage has code of its own: where it lies is known when that is compiled.
  template <typename Body>
  __device__ void for_each_stage(const Body& body) {
    for (int left = k_steps_, first = stage_;; first = 0, phase_ ^= 1) {
#pragma unroll
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        if (stage < first) continue;
        if (left-- == 0) {
          stage_ = stage;
          return;
        }
        barrier_wait(&memory_.arrived[stage], phase_);
        body(stage);
        give_back(stage);
      }
    }
  }

  // Each warp for itself: that its own products have ended says nothing of the other warps'.
  __device__ void give_back(int stage) {
    __syncwarp();  // all have read scales
    if (lane_ == 0) barrier_arrive(&memory_.read[stage]);
  }

  // ---- sums

  __device__ void multiply(int stage, Sums& sums) const {
    float scales[Shape::kParts][2];
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        scales[part][lower] = memory_.scales[stage][part][own_token(lower)];
      }
    }
    const uint64_t tokens =
        swizzled_matrix(shared_address(memory_.tokens[stage]) + tokens_at_ * 128, 1024);
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const uint64_t weights = swizzled_matrix(
          shared_address(memory_.weights[stage]) + part * Shape::kPartRows * 128, 1024);
      float products[Shape::kSums];
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma_64_e4m3(products, moved(tokens, i * 32), moved(weights, i * 32), i > 0);
      }
      mma_commit();
      mma_wait();
      pin(products);
#pragma unroll
      for (int j = 0; j < Shape::kSums; ++j) {
        sums.of[part][j] = fmaf(products[j], scales[part][j / 2 % 2], sums.of[part][j]);
      }
    }
  }

  // Among the tile's.
  __device__ int first_token() const { return tokens_at_ + 16 * warp_; }
  __device__ int own_token(int lower) const { return first_token() + 8 * lower + lane_ / 4; }

  // ---- shares of k: block i of the cluster finishes group i's tokens

  static constexpr int kWarpBytes = Shape::kParts * Shape::kSums * 32 * 4;  // of a warp's sums

  __device__ void send(const Sums& sums, int warps) {
    auto& other = memory_.other;
    const auto peer = static_cast<uint32_t>(1 - rank_);
    if (exchanges_ > 0) barrier_wait(&other.given_back, (exchanges_ - 1) & 1);
    ++exchanges_;
    if (warp_ >= warps) return;
    const uint32_t barrier = address_in_block(shared_address(&other.received), peer);
    const uint32_t to = address_in_block(shared_address(&other.sums[0][32 * warp_ + lane_]), peer);
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (int j = 0; j < Shape::kSums; j += 4) {
        const float* v = sums.of[part] + j;
        const int i = (part * Shape::kSums + j) / 4;
        store_in_block(to + i * static_cast<int>(sizeof(other.sums[0])), barrier,
                       make_float4(v[0], v[1], v[2], v[3]));
      }
    }
  }

  __device__ void receive(Sums& sums, int warps) {
    auto& other = memory_.other;
    if (warp_ == 0 && lane_ == 0) barrier_expect(&other.received, warps * kWarpBytes);
    barrier_wait(&other.received, exchanges_++ & 1);
    if (warp_ < warps) {
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
        for (int j = 0; j < Shape::kSums; j += 4) {
          const float4 more = other.sums[(part * Shape::kSums + j) / 4][32 * warp_ + lane_];
          float* v = sums.of[part] + j;
          v[0] += more.x;
          v[1] += more.y;
          v[2] += more.z;
          v[3] += more.w;
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      barrier_arrive_in_block(
          address_in_block(shared_address(&other.given_back), static_cast<uint32_t>(1 - rank_)));
    }
  }

  // ---- results

  __device__ static float gated(float gate, float up) {
    constexpr float kLog2E = 1.4426950408889634f;
    return __fdividef(gate, 1.0f + exp2_fast(-kLog2E * gate)) * up;
  }

  // A token's 128 activations are four threads'.
  __device__ void write_activations(const ScaledExpertOut& out, Sums& sums) const {
    auto& values = sums.of[0];
    float largest[2] = {kLeastMagnitude, kLeastMagnitude};
#pragma unroll
    for (int j = 0; j < Shape::kSums; ++j) {
      values[j] = gated(values[j], sums.of[1][j]);
      largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(values[j]));
    }
    float inverses[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      float magnitude = largest[lower];
      magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, 1));
      magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, 2));
      const auto [scale, inverse] = block_scale(magnitude, out.form);
      inverses[lower] = inverse;
      if (lane_ % 4 == 0 && own_token(lower) < out.tokens) out.scales[own_token(lower)] = scale;
    }
    // Four neighbours of 16 columns: the even ones are in the first block of 8, the odd ones in the
    // second.
    const auto packed = [&](int sixteen, int lower) {
      const float* v = values + 8 * sixteen + 2 * lower;
      const float by = inverses[lower];
      return pack_fp8<Fp8::kE4M3>(v[0] * by, v[4] * by, v[1] * by, v[5] * by);
    };
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
      for (int first = 0; first < 8; first += 4) {
        store_matrices(staged(8 * lower + lane_ % 8, first + lane_ / 8), packed(first, lower),
                       packed(first + 1, lower), packed(first + 2, lower),
                       packed(first + 3, lower));
      }
    }
    write_staged(out, static_cast<uint8_t*>(out.data), out.row_stride);
  }

  __device__ void write_results(const ScaledExpertOut& out, const Sums& sums) const {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
      for (int first = 0; first < Shape::kPartRows; first += 64) {
        const int column = part * Shape::kPartRows + first;
        if (column >= out.columns) break;
#pragma unroll
        for (int block = 0; block < 8; block += 2) {  // of 8 columns
          const float* v = sums.of[part] + first / 2 + 4 * block;
          store_matrices(staged(lane_ % 16, block + lane_ / 16), pack_bf16(v[0], v[1]),
                         pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        }
        write_staged(out, static_cast<uint8_t*>(out.data) + 2 * column,
                     int64_t{2} * out.row_stride);
      }
    }
  }

  // 16 bytes of one of the warp's 16 tokens in shared memory, swizzled.
  __device__ uint32_t staged(int token, int chunk) const {
    const int warp = Shape::kSplit == 1 ? 4 * group_ + warp_ : warp_;
    return shared_address(memory_.out[warp]) + token * 128 + ((chunk ^ token % 8) * 16);
  }

  // What is staged to where it belongs.
  __device__ void write_staged(const ScaledExpertOut& out, uint8_t* data, int64_t row_bytes) const {
    __syncwarp();
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
      const int row = first + lane_ / 8, token = first_token() + row;
      if (token < out.tokens) {
        *reinterpret_cast<float4*>(data + token * row_bytes + lane_ % 8 * 16) =
            load_shared(staged(row, lane_ % 8));
      }
    }
    __syncwarp();
  }

  Memory& memory_;
  const int rank_, group_, warp_, lane_;
  int stage_ = 0, phase_ = 0, tile_ = 0, k_steps_ = 0, exchanges_ = 0;
  int turn_ = 0;       // whose the last tile of up to 64 tokens was
  int tokens_at_ = 0;  // the group's first token of the tile's
};

// ---- a block: its last warpgroup copies

// All threads of a block, or of all blocks of its cluster.
template <typename Shape>
__device__ inline void meet() {
  if constexpr (Shape::kSplit == 1) {
    __syncthreads();
  } else {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

template <typename Shape, typename Work>
__device__ void run_scaled_expert_tiles(const Work& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ScaledExpertMemory<Shape>*>(bytes);
  static_assert(sizeof(memory) <= 227 * 1024);
  const int rank = Shape::kSplit > 1 ? static_cast<int>(cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], 2);
      barrier_init(&memory.read[stage], 4 * Shape::kGroups);
    }
    for (uint64_t& announced : memory.announced) barrier_init(&announced, 1);
    if constexpr (Shape::kSplit > 1) {
      barrier_init(&memory.other.received, 1);
      barrier_init(&memory.other.given_back, 4);
    }
    fence_barrier_init();
  }
  meet<Shape>();
  let_next_launch_begin();
  if (threadIdx.x >= 128 * Shape::kGroups) {
    give_registers<Shape::kProducerRegisters>();
    constexpr int kFirst = 128 * Shape::kGroups;
    if (threadIdx.x == kFirst) {
      ScaledExpertLoader<Shape, Work>(memory, work, rank).run();
    } else if (threadIdx.x / 32 == kFirst / 32 + 1) {
      ScaledExpertScaler<Shape>(memory).run();
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ScaledExpertMultiplier<Shape, Work::kGated>(memory, rank).run();
  }
  if constexpr (Shape::kSplit > 1) meet<Shape>();  // none is sent anything any more
}

}  // namespace fathom::cuda
