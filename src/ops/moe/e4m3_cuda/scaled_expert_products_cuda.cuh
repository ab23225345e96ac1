// What: grouped GEMM of experts in e4m3 with block-wise scales: out[token, n] = sum over blocks b
// of 128 of k of token_scales[b, token] * weight_scales[n / 128, b] * (sum over k in b of
// tokens[token, k] * weights[n, k]), tile after tile, one persistent CTA per SM, a cluster of two
// CTAs a tile.
//
// A work (a struct that a kernel takes by value) says which tiles there are and where they lie:
//   __device__ int num_tiles() const;
//   __device__ ScaledExpertTile tile(int index, int num_tiles, bool waited, int rank) const;
//                                  a CTA's half
//   __device__ bool in_fixed_order() const;
//   __device__ int in_pass(int pass) const;  if fixed: the tiles that the cluster takes
//   __device__ int next() const;   otherwise: the cluster's next tile; one of its CTAs calls it and
//                                  passes the result to the other
// One warp of a CTA calls these, at first (waited == false) before the PDL wait, so that weight
// loads are issued early.
//
// Layout: tokens on M of wgmma, weights on N. A tile has up to Shape::kTokens tokens, 64 for each
// consumer warpgroup; warpgroups alternate over tiles with fewer. It has 256 weight rows, 128 for
// each CTA. With gate and up, these are 64 of gate and the same 64 of up, so that both values of an
// activation are in one thread, and a token's 128 activations in four threads of either CTA. A TMA
// box brings 16 rows of gate or up, the even ones first, then the odd ones, so that a thread has
// four adjacent ones.
//
// Algorithm: a producer warp loads weights and publishes each tile's metadata. A thread of each CTA
// multicasts half of a stage's tokens to both CTAs, so the L2 is read once. A token stage is
// therefore free when both CTAs have read it, a weight stage when its own CTA has. Two warps
// multiply tokens' scales with weights', one k step's beside its stage. A stage is one scale block
// of k: its wgmma accumulates in separate registers, which are promoted to fp32 sums times both
// scales while the other warpgroups multiply. Each warp writes its 16 tokens' results through its
// own shared memory. Quantized output has one scale for the 128 columns of both CTAs, which
// exchange their largest magnitudes.
//
// Determinism: an element is summed in order of k by one warpgroup.
//
// Source: the PTX manual; the quantization is ops/scaled_linear/quantize_rows.h's.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "base/math_constants.h"
#include "device/cuda/cluster.cuh"
#include "device/cuda/fp8.cuh"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {

// Destination and valid extent of a CTA's half of a tile's results.
struct alignas(16) ScaledExpertOut {
  void* data = nullptr;     // first element: e4m3 if gated, else bf16
  float* scales = nullptr;  // of the first token, if gated; one of the two CTAs writes them
  int row_stride = 0;       // in elements
  int tokens = 0, columns = 0;
  int k_steps = 0;  // 0: no more tiles
  ScaleForm form = ScaleForm::kF32;
};

// Scales of a tile, for its shared-memory slot.
struct ScaledExpertScales {
  const float* tokens = nullptr;   // of the first token, the first k
  int64_t tokens_stride = 0;       // to the next 128-column block of k
  const float* weights = nullptr;  // of the CTA's first row, the first k
  int second = 0;                  // gated: offset from gate's to up's
};

// Tokens of a tile, for its shared-memory slot.
struct alignas(16) ScaledExpertTokens {
  const CUtensorMap* map = nullptr;  // boxes of half of a tile's tokens
  int first = 0;
  int units = 0;  // units of Shape::kTokenUnit tokens in a box
};

struct ScaledExpertTile {
  const CUtensorMap* weights = nullptr;  // gated: boxes of columns, 8, 2, 4 groups, halves
  int first_row = 0;                     // of weights; gated: group of 16 rows of gate
  bool weights_are_read_once = false;    // by this launch: evict first from the L2
  ScaledExpertTokens tokens;
  ScaledExpertScales scales;
  ScaledExpertOut out;
};

template <bool kGatedRows, int kTokenCount, int kGroupCount, int kStageCount>
struct ScaledExpertShape {
  static constexpr bool kGated = kGatedRows;
  static constexpr int kTokens = kTokenCount, kGroups = kGroupCount, kStages = kStageCount;
  static constexpr int kBlocks = 2;  // CTAs of a cluster
  static constexpr int kTileRows = 256, kWeightRows = kTileRows / kBlocks;
  static constexpr int kScales = kGated ? 2 : 1;  // scales of a CTA's weights in a k step
  // Each CTA loads half of the tokens, in boxes of up to kTokenUnits units.
  static constexpr int kTokenUnit = 16, kTokenUnits = kTokens / kTokenUnit / kBlocks;
  static constexpr int kWeightBytes = kWeightRows * 128, kTokenBytes = kTokens * 128;
  static constexpr int kSums = kWeightRows / 2;  // sums of a thread for 64 tokens
  static constexpr int kUnits = (kTokens / 64 + kGroups - 1) / kGroups;  // of 64 tokens a group
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kScalers = 2;  // warps
  // Scaler warps alternate over tiles, or share the tokens of each tile.
  static constexpr int kScalerTurns = kTokens == 64 ? 2 : 1;
  static constexpr int kProducerRegisters = kGroups == 3 ? 56 : 56;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 152 : 224;
  // Registers a thread at launch, a multiple of 8; setmaxnreg may only redistribute them.
  static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                (kGroups + 1) * (65536 / kThreads / 8 * 8));
  static_assert(kTokens % 64 == 0);
};

// Magnitudes from the other CTA of the cluster: the largest of each warp's 16 tokens, for this tile
// and the next.
struct NoMagnitudes {};
template <typename Shape>
struct OtherMagnitudes {
  float of[2][4 * Shape::kGroups][16];
  uint64_t received[2][4 * Shape::kGroups];
};

template <typename Shape>
struct ScaledExpertMemory {
  alignas(1024) uint8_t weights[Shape::kStages][Shape::kWeightBytes];
  alignas(1024) uint8_t tokens[Shape::kStages][Shape::kTokenBytes];
  // Token scales times weight scales.
  alignas(16) float scales[Shape::kStages][Shape::kScales][Shape::kTokens];
  // 64 bytes of results for each of 16 tokens, per consumer warp.
  alignas(1024) uint8_t out[4 * Shape::kGroups][16 * 64];
  alignas(16) std::conditional_t<Shape::kGated, OtherMagnitudes<Shape>, NoMagnitudes> other;
  // Ring of tile metadata: the tile in its epilogue, those in the pipeline stages, the next one,
  // and those that an idle scaler may not have read yet.
  static constexpr int kTiles = Shape::kStages + 1 + Shape::kScalerTurns;
  // Tiles planned at a time in a fixed order: tiles of few tokens end soonest.
  static constexpr int kPlanned = Shape::kTokens <= 128 ? 32 : 1;
  ScaledExpertTile planned[kPlanned];
  ScaledExpertOut tiles[kTiles];
  ScaledExpertTokens tile_tokens[kTiles];
  ScaledExpertScales tile_scales[kTiles];
  int next[kTiles];  // tile index, in the cluster's second CTA
  uint64_t announced[kTiles], told[kTiles];
  uint64_t arrived[Shape::kStages];
  // Empty barriers: consumers of this CTA, and of both CTAs.
  uint64_t read[Shape::kStages], read_by_both[Shape::kStages];
};

// ---- producers: a warp for weights, which leads, and a thread for tokens

template <typename Shape, typename Work>
class ScaledExpertWeightLoader {
  using Memory = ScaledExpertMemory<Shape>;

 public:
  __device__ ScaledExpertWeightLoader(Memory& memory, const Work& work, int rank)
      : memory_(memory), work_(work), rank_(rank), lane_(static_cast<int>(threadIdx.x) % 32) {
    // Keeps the policies in registers instead of recreating them for each copy.
    asm volatile("" : "+l"(keep_), "+l"(read_once_));
  }

  __device__ void run() {
    const int num_tiles = work_.num_tiles();
    const bool fixed = work_.in_fixed_order();
    int index = work_.in_pass(lane_);
    if (lane_ >= (fixed ? Memory::kPlanned : 1)) index = num_tiles;
    bool waited = false;
    for (int pass = lane_;;) {
      // In a fixed order each lane plans one tile, so that short tiles do not wait for the
      // planning.
      if (index < num_tiles) memory_.planned[lane_] = work_.tile(index, num_tiles, waited, rank_);
      const int count = __popc(__ballot_sync(~0u, index < num_tiles));
      if (count == 0) break;
      if (lane_ == 0) {
        for (int i = 0; i < count; ++i) {
          const ScaledExpertTile tile = memory_.planned[i];
          announce(tile);
          int next = 0, k = 0;
          if (!waited) {
            for (; k < min(tile.out.k_steps, Shape::kStages); ++k) load(tile, k);
            wait_for_earlier_launches();
            waited = true;
          }
          // The atomic is in flight while this tile is loaded.
          if (!fixed && rank_ == 0) next = work_.next();
          for (; k < tile.out.k_steps; ++k) load(tile, k);
          if (!fixed) index = rank_ == 0 ? tell(next) : told();
        }
      }
      waited = true;
      __syncwarp();
      pass += Memory::kPlanned;
      if (fixed && lane_ < Memory::kPlanned) index = work_.in_pass(pass);
    }
    if (lane_ > 0) return;
    if (!waited) wait_for_earlier_launches();
    wait_until_read();
    announce({});
    barrier_arrive(&memory_.arrived[stage_]);
  }

 private:
  // Precedes the arrival on the full barrier of the tile's first stage.
  __device__ void announce(const ScaledExpertTile& tile) {
    memory_.tiles[tile_] = tile.out;
    memory_.tile_tokens[tile_] = tile.tokens;
    memory_.tile_scales[tile_] = tile.scales;
    barrier_arrive(&memory_.announced[tile_]);
    if (++tile_ == Memory::kTiles) {
      tile_ = 0;
      ++rounds_;
    }
  }

  // The other CTA has read the word sent kTiles tiles ago: it could not have filled the stages
  // since otherwise.
  __device__ int tell(int next) {
    const uint32_t to = shared_address(&memory_.next[tile_]);
    const uint32_t barrier = shared_address(&memory_.told[tile_]);
    store_in_block(address_in_block(to, 1), address_in_block(barrier, 1),
                   static_cast<uint32_t>(next));
    return next;
  }

  __device__ int told() {
    barrier_expect(&memory_.told[tile_], sizeof(int));
    barrier_wait(&memory_.told[tile_], (tile_ == 0 ? rounds_ - 1 : rounds_) & 1);
    return *static_cast<volatile int*>(&memory_.next[tile_]);
  }

  __device__ void wait_until_read() {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
  }

  __device__ void load(const ScaledExpertTile& tile, int k) {
    wait_until_read();
    uint64_t* arrived = &memory_.arrived[stage_];
    barrier_expect(arrived, Shape::kWeightBytes +
                                Shape::kBlocks * tile.tokens.units * Shape::kTokenUnit * 128);
    const int column = k * 128;
    const uint64_t policy = tile.weights_are_read_once ? read_once_ : keep_;
    if constexpr (Shape::kGated) {
      copy_box_under(policy, memory_.weights[stage_], tile.weights, arrived, column, 0, 0,
                     tile.first_row, 0);
    } else {
      copy_box_under(policy, memory_.weights[stage_], tile.weights, arrived, column, tile.first_row,
                     0);
    }
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      ++passes_;
    }
  }

  Memory& memory_;
  const Work& work_;
  const int rank_, lane_;
  uint64_t keep_ = keep_policy(), read_once_ = read_once_policy();
  int stage_ = 0, passes_ = 0, tile_ = 0, rounds_ = 0;
};

// Multicasts this CTA's half of the tokens to both CTAs.
template <typename Shape>
__device__ void load_scaled_expert_tokens(ScaledExpertMemory<Shape>& memory, int rank) {
  constexpr uint16_t kBoth = (1 << Shape::kBlocks) - 1;
  wait_for_earlier_launches();
  int stage = 0, passes = 0;
  for (int tile = 0, parity = 0;;) {
    barrier_wait(&memory.announced[tile], parity);
    const int k_steps = memory.tiles[tile].k_steps;
    if (k_steps == 0) break;
    const ScaledExpertTokens tokens = memory.tile_tokens[tile];
    const int half = tokens.units * Shape::kTokenUnit * rank;
    for (int k = 0; k < k_steps; ++k) {
      if (passes > 0) barrier_wait(&memory.read_by_both[stage], (passes - 1) & 1);
      copy_box_to_blocks(kBoth, memory.tokens[stage] + half * 128, tokens.map,
                         &memory.arrived[stage], k * 128, tokens.first + half);
      if (++stage == Shape::kStages) {
        stage = 0;
        ++passes;
      }
    }
    if (++tile == ScaledExpertMemory<Shape>::kTiles) {
      tile = 0;
      parity ^= 1;
    }
  }
}

// ---- scales: two warps

// Multiplies tokens' scales with weights', so that the consumers need not. Prefetches tokens'
// scales kAhead steps ahead, weights' 32 steps at a time.
template <typename Shape>
class ScaledExpertScaler {
  using Memory = ScaledExpertMemory<Shape>;

 public:
  __device__ ScaledExpertScaler(Memory& memory, int warp)
      : memory_(memory),
        turn_(warp % Shape::kScalerTurns),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_token_(32 * kLaneTokens * (warp / Shape::kScalerTurns) + lane_) {}

  __device__ void run() {
    wait_for_earlier_launches();
    int turn = 0;
    for (int tile = 0, parity = 0;;) {
      barrier_wait(&memory_.announced[tile], parity);
      const int k_steps = memory_.tiles[tile].k_steps;
      if (k_steps == 0) break;
      if (turn != turn_) {
        const int stage = stage_ + k_steps;
        passes_ += stage / Shape::kStages;
        stage_ = stage % Shape::kStages;
      } else {
        scale(memory_.tile_scales[tile], k_steps, memory_.tiles[tile].tokens - first_token_);
      }
      if (++turn == Shape::kScalerTurns) turn = 0;
      if (++tile == Memory::kTiles) {
        tile = 0;
        parity ^= 1;
      }
    }
    if (turn == turn_) arrive();
  }

 private:
  static constexpr int kAhead = Shape::kTokens <= 128 ? 4 : 2;
  static constexpr int kLaneTokens = Shape::kTokens * Shape::kScalerTurns / Shape::kScalers / 32;
  struct Tokens {
    float of[kLaneTokens];
  };
  struct Weights {
    float of[Shape::kScales];
  };

  __device__ void scale(const ScaledExpertScales& from, int k_steps, int num_tokens) {
    const float* tokens = from.tokens + first_token_;
    const float* weights = from.weights;
    const int64_t stride = from.tokens_stride;
    const int second = from.second;
    const auto load_tokens = [&](int k) {
      Tokens loaded = {};
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        if (k < k_steps && 32 * i < num_tokens) loaded.of[i] = tokens[k * stride + 32 * i];
      }
      return loaded;
    };
    // A lane loads the scales of one of 32 steps.
    const auto load_weights = [&](int k) {
      Weights loaded = {};
#pragma unroll
      for (int i = 0; i < Shape::kScales; ++i) {
        if (k < k_steps) loaded.of[i] = __ldg(weights + i * second + k);
      }
      return loaded;
    };
    Weights now = load_weights(lane_), next = load_weights(32 + lane_);
    Tokens ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = load_tokens(i);
    static_assert(32 % kAhead == 0);
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i == k_steps) return;
        const Tokens step = ahead[i];
        ahead[i] = load_tokens(first + i + kAhead);
        write(step, now, first + i);
      }
      first += kAhead;
      if (first % 32 == 0) {
        now = next;
        next = load_weights(first + 32 + lane_);
      }
    }
  }

  __device__ void write(const Tokens& tokens, const Weights& weights, int k) {
    if (passes_ > 0) barrier_wait(&memory_.read[stage_], (passes_ - 1) & 1);
#pragma unroll
    for (int i = 0; i < Shape::kScales; ++i) {
      const float weight = __shfl_sync(~0u, weights.of[i], k % 32);
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) {
        memory_.scales[stage_][i][first_token_ + 32 * j] = tokens.of[j] * weight;
      }
    }
    arrive();
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      ++passes_;
    }
  }

  __device__ void arrive() {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(&memory_.arrived[stage_]);
  }

  Memory& memory_;
  const int turn_, lane_, first_token_;
  int stage_ = 0, passes_ = 0;
};

// ---- consumers: a warpgroup and its 64 tokens

template <typename Shape>
class ScaledExpertMultiplier {
  using Memory = ScaledExpertMemory<Shape>;

 public:
  __device__ ScaledExpertMultiplier(Memory& memory, int rank)
      : memory_(memory),
        rank_(rank),
        group_(uniform(static_cast<int>(threadIdx.x) / 128)),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32),
        read_(lane_ < Shape::kBlocks ? address_in_block(shared_address(memory.read_by_both), lane_)
                                     : address_in_block(shared_address(memory.read), rank)) {}

  __device__ void run() {
    for (;;) {
      barrier_wait(&memory_.arrived[stage_], phase_);
      const ScaledExpertOut& out = memory_.tiles[tile_];
      if (++tile_ == Memory::kTiles) tile_ = 0;
      k_steps_ = uniform(out.k_steps);
      if (k_steps_ == 0) break;
      const int tokens = uniform(out.tokens);
      // Warpgroups alternate: one without work in this tile starts the next tile while the others
      // run this one's epilogue.
      int share = group_ - first_group_;
      if (share < 0) share += Shape::kGroups;
      const int units = (tokens + 63) / 64;
      first_group_ = (first_group_ + units) % Shape::kGroups;
      if (share < units) {
        tokens_at_ = 64 * share;
        compute(out, Shape::kUnits > 1 && units - share > Shape::kGroups);
      } else {
        for_each_stage([](int) {});
      }
    }
  }

 private:
  // Makes a value warp-uniform for the compiler, which then computes matrix descriptors once a
  // warp.
  __device__ static int uniform(int value) { return __shfl_sync(~0u, value, 0); }

  // Element j: token lane / 4 (+ 8 if j & 2) of the warp's 16, row 8 * (j / 4) + 2 * (lane % 4) +
  // (j & 1) of the CTA's weights.
  using Sums = float[Shape::kSums];

  // Multiplies 64 tokens; with `both` also the 64 that are kDistance further.
  __device__ void compute(const ScaledExpertOut& out, bool both) {
    Sums sums[Shape::kUnits];
#pragma unroll
    for (Sums& of_unit : sums) {
#pragma unroll
      for (float& sum : of_unit) sum = 0;
    }
    const uint64_t first =
        uniform_matrix(swizzled_matrix(shared_address(memory_.tokens[0]) + tokens_at_ * 128, 1024));
    if (both) {
      for_each_stage([&](int stage) { multiply<Shape::kUnits>(stage, first, sums); });
    } else {
      for_each_stage([&](int stage) { multiply<1>(stage, first, sums); });
    }
#pragma unroll
    for (Sums& of_unit : sums) {
      if (first_token() >= out.tokens) return;
      if constexpr (Shape::kGated) {
        write_activations(out, of_unit);
      } else {
        write_results(out, of_unit);
      }
      tokens_at_ += kDistance;
    }
  }

  // Unrolled by stage, so that stage addresses are compile-time constants.
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

  // Releases a stage to the producers of both CTAs. Each warp arrives for itself: the end of its
  // own wgmmas says nothing about other warps.
  __device__ void give_back(int stage) {
    __syncwarp();  // all lanes have read scales
    if (lane_ <= Shape::kBlocks) {
      barrier_give_back_in_block(read_ + stage * static_cast<int>(sizeof(uint64_t)));
    }
  }

  // ---- sums

  // first: matrix descriptor of the tokens in stage 0.
  template <int kUnits>
  __device__ void multiply(int stage, uint64_t first, Sums (&sums)[Shape::kUnits]) const {
    float scales[kUnits][Shape::kScales][2];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < Shape::kScales; ++i) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          scales[unit][i][lower] = memory_.scales[stage][i][kDistance * unit + own_token(lower)];
        }
      }
    }
    const uint64_t weights = swizzled_matrix(shared_address(memory_.weights[stage]), 1024);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint64_t tokens = moved(first, stage * Shape::kTokenBytes + unit * kDistance * 128);
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
        const float scale = scales[unit][j * Shape::kScales / Shape::kSums][j / 2 % 2];
        sums[unit][j] = fmaf(products[j], scale, sums[unit][j]);
      }
    }
  }

  static constexpr int kDistance = 64 * Shape::kGroups;

  // Index within the tile.
  __device__ int first_token() const { return tokens_at_ + 16 * warp_; }
  __device__ int own_token(int lower) const { return first_token() + 8 * lower + lane_ / 4; }

  // ---- epilogue

  __device__ static float gated(float gate, float up) {
    return __fdividef(gate, 1.0f + exp2_fast(-kLog2E * gate)) * up;
  }

  // A token's 128 activations lie in four threads of either CTA.
  __device__ void write_activations(const ScaledExpertOut& out, Sums& sums) {
    constexpr int kValues = Shape::kSums / 2;
    float largest[2] = {kLeastMagnitude, kLeastMagnitude};
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      sums[j] = gated(sums[j], sums[kValues + j]);
      largest[j / 2 % 2] = fmaxf(largest[j / 2 % 2], fabsf(sums[j]));
    }
#pragma unroll
    for (float& magnitude : largest) {
      magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, 1));
      magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, 2));
    }
    exchange(largest);
    float inverses[2];
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const auto [scale, inverse] = block_scale(largest[lower], out.form);
      inverses[lower] = inverse;
      if (rank_ == 0 && lane_ % 4 == 0 && own_token(lower) < out.tokens) {
        out.scales[own_token(lower)] = scale;
      }
    }
    // Four adjacent columns of 16: the even ones are in the first block of 8, the odd ones in the
    // second.
    const auto packed = [&](int sixteen, int lower) {
      const float* v = sums + 8 * sixteen + 2 * lower;
      const float by = inverses[lower];
      return pack_fp8<Fp8::kE4M3>(v[0] * by, v[4] * by, v[1] * by, v[5] * by);
    };
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      store_matrices(staged(8 * lower + lane_ % 8, lane_ / 8), packed(0, lower), packed(1, lower),
                     packed(2, lower), packed(3, lower));
    }
    write_staged(out, static_cast<uint8_t*>(out.data), out.row_stride);
  }

  // Takes the larger magnitudes of both CTAs. Double buffering is safe: the peer has read the
  // values of two tiles ago, because it sent those of the last tile, which this CTA has received,
  // after that.
  __device__ void exchange(float (&largest)[2]) {
    const int turn = exchanges_ & 1, parity = exchanges_ >> 1 & 1, warp = 4 * group_ + warp_;
    ++exchanges_;
    auto& other = memory_.other;
    uint64_t* received = &other.received[turn][warp];
    if (lane_ == 0) barrier_expect(received, sizeof(other.of[turn][warp]));
    if (lane_ % 4 == 0) {
      const auto peer = static_cast<uint32_t>(1 - rank_);
      const uint32_t barrier = address_in_block(shared_address(received), peer);
      const uint32_t to = address_in_block(shared_address(&other.of[turn][warp][lane_ / 4]), peer);
      store_in_block(to, barrier, __float_as_uint(largest[0]));
      store_in_block(to + 8 * sizeof(float), barrier, __float_as_uint(largest[1]));
    }
    barrier_wait(received, parity);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      largest[lower] = fmaxf(largest[lower], other.of[turn][warp][8 * lower + lane_ / 4]);
    }
  }

  __device__ void write_results(const ScaledExpertOut& out, const Sums& sums) const {
    constexpr int kColumns = 32;  // at a time
    if (out.columns <= 0) return;
#pragma unroll
    for (int column = 0; column < Shape::kWeightRows; column += kColumns) {
#pragma unroll
      for (int block = 0; block < kColumns / 8; block += 2) {  // blocks of 8 columns
        const float* v = sums + column / 2 + 4 * block;
        store_matrices(staged(lane_ % 16, block + lane_ / 16), pack_bf16(v[0], v[1]),
                       pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
      }
      write_staged(out, static_cast<uint8_t*>(out.data) + 2 * column, int64_t{2} * out.row_stride);
    }
  }

  // Address of 16 bytes of one of the warp's 16 tokens in shared memory, swizzled.
  __device__ uint32_t staged(int token, int chunk) const {
    return shared_address(memory_.out[4 * group_ + warp_]) + token * 64 +
           ((chunk ^ token / 2 % 4) * 16);
  }

  // Copies staged results to global memory.
  __device__ void write_staged(const ScaledExpertOut& out, uint8_t* data, int64_t row_bytes) const {
    __syncwarp();
#pragma unroll
    for (int first = 0; first < 16; first += 8) {
      const int row = first + lane_ / 4, token = first_token() + row;
      if (token < out.tokens) {
        *reinterpret_cast<float4*>(data + token * row_bytes + lane_ % 4 * 16) =
            load_shared(staged(row, lane_ % 4));
      }
    }
    __syncwarp();
  }

  Memory& memory_;
  const int rank_, group_, warp_, lane_;
  const uint32_t read_;  // by lane: barrier address in one of the CTAs
  int stage_ = 0, phase_ = 0, tile_ = 0, k_steps_ = 0, exchanges_ = 0;
  int first_group_ = 0;  // warpgroup that has the tile's first 64 tokens
  int tokens_at_ = 0;    // the warpgroup's first token in the tile, or the one that it writes
};

// ---- CTA: the last warpgroup produces

// Cluster barrier: all threads of both CTAs.
__device__ inline void meet() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

template <typename Shape, typename Work>
__device__ void run_scaled_expert_tiles(const Work& work) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<ScaledExpertMemory<Shape>*>(bytes);
  static_assert(sizeof(memory) <= 227 * 1024);
  const int rank = static_cast<int>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], 1 + Shape::kScalers / Shape::kScalerTurns);
      barrier_init(&memory.read[stage], 4 * Shape::kGroups);
      barrier_init(&memory.read_by_both[stage], 4 * Shape::kGroups * Shape::kBlocks);
    }
    for (uint64_t& announced : memory.announced) barrier_init(&announced, 1);
    for (uint64_t& told : memory.told) barrier_init(&told, 1);
    if constexpr (Shape::kGated) {
      for (auto& turn : memory.other.received) {
        for (uint64_t& received : turn) barrier_init(&received, 1);
      }
    }
    fence_barrier_init();
  }
  meet();
  let_next_launch_begin();
  if (threadIdx.x >= 128 * Shape::kGroups) {
    give_registers<Shape::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4 * Shape::kGroups;
    if (warp >= 2) {
      ScaledExpertScaler<Shape>(memory, warp - 2).run();
    } else if (warp == 0) {
      ScaledExpertWeightLoader<Shape, Work>(memory, work, rank).run();
    } else if (threadIdx.x % 32 == 0) {
      load_scaled_expert_tokens<Shape>(memory, rank);
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ScaledExpertMultiplier<Shape>(memory, rank).run();
  }
  meet();  // no remote store or arrival is in flight after this
}

}  // namespace fathom::cuda
