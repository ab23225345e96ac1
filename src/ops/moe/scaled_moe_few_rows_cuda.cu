// What: scaled_moe for few tokens, at the rate at which the weights of the experts that have tokens
// can be read. One launch.
//
// Inputs/outputs: scaled_moe_cuda.h. Which block takes what: moe_few_rows_plan.h.
//
// Layout and algorithm: those of moe_few_rows_cuda.cu, in e4m3. A ring of stages of 256 columns,
// two blocks that have scales: up to 64 tokens, up to 64 * kRowGroups rows of weights; beside each
// the scales of its tokens and its rows. Between the phases activations are quantised, by blocks of
// 128 intermediate columns, of which a block may have computed only some: they go to the workspace
// in fp32, and who adds the last of a block's columns to its counter reads all of them again and
// quantises them (the warpgroup that has made the lists). An expert's weight is put into the scale.
//
// Determinism: as moe_few_rows_cuda.cu. Who quantises does not change what.
//
// Limits: 192 rows (their sums), 256 experts, 4,096 pairs; a counter for each 128 intermediate
// columns of each tile of tokens. Blocks wait for one another: all of them must be able to run at
// once.
//
// Measured: docs/kernels/scaled_moe.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "base/math.h"
#include "device/cuda/cluster.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/weight_stream_cuda.cuh"
#include "ops/moe/expert_tiles_cuda.cuh"
#include "ops/moe/moe_few_rows_cuda.h"
#include "ops/moe/scaled_moe_few_rows_cuda.h"
#include "ops/scaled_linear/quantize_four_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarpgroupThreads = 128;
constexpr int kMaxStages = 16;
constexpr int kRowBytes = kStageHalves * kGroupBytes;  // of 8 rows, in a stage
constexpr int kPairBytes = 2 * kRowBytes;              // of 8 rows of gate and 8 of up
constexpr int kWarpgroupPairs = 4;
constexpr int kPairMaps = 4;                   // boxes of 1, 2, 4 or 8 pairs of 8 rows
constexpr int kWholeTile = 1 << 20;            // a piece may be as long as its tile
constexpr int kStageBytes = 256;               // of k, which e4m3's columns are
constexpr int kScaleUnits = 128 / kGroupRows;  // 8 columns that have a scale in common
constexpr int kCounters = kScaledMoeProgressWords - 2;
enum NamedBarrier { kAll, kMultiplying, kExchange, kCopying, kGrouping };
enum Phase { kShared, kRouted, kNumPhases };  // of activations

struct Arguments {
  const uint8_t* x;
  const float* x_scales;
  int64_t x_scales_stride;
  const int32_t* expert_ids;
  const float* expert_weights;
  const float *gate_up_scales[kNumPhases], *down_scales[kNumPhases];
  void* out;
  uint64_t* progress;  // [kNumPhases], then [kCounters]
  // Each [rows, shared_inter] and [pairs, inter], of scales inter / 128.
  float* wide[kNumPhases];
  uint8_t* activations[kNumPhases];
  float* activation_scales[kNumPhases];
  int32_t rows, hidden, experts_per_token, inter, shared_inter;
  int32_t splits, clusters, hidden_groups;  // hidden_groups: of a cluster, at most
  int32_t stages, stage_bytes, sum_bytes, token_groups;
  ScaleForm form;
  bool f32;

  __device__ int num_pairs() const { return rows * experts_per_token; }
  __device__ int token_bytes() const { return token_groups * kRowBytes; }
  __device__ int num_shared_tiles() const {
    return shared_inter == 0 ? 0 : (rows + kTileTokens - 1) / kTileTokens;
  }
  __device__ int inter_of(Phase phase) const { return phase == kShared ? shared_inter : inter; }
};

// Of a stage's two blocks of columns: its tokens', and those of its first and second rows of
// weights (gate and up, or two blocks of 128 rows).
struct StageScalesMemory {
  float tokens[kStageHalves][kTileTokens];
  float rows[kStageHalves][2];
};

struct Maps {
  CUtensorMap gate_up[kNumPhases][kPairMaps];
  CUtensorMap down[kNumPhases][2];  // boxes of hidden_groups groups of rows, and of one less
};

__device__ constexpr int stages_of(int columns) {
  return (columns + kStageBytes - 1) / kStageBytes;
}

struct Tables {
  StageScalesMemory scales[kMaxStages];
  uint64_t arrived[kMaxStages], read[kMaxStages];
  uint64_t piece_done, piece_taken;  // by those who multiply, by those who quantise
  uint64_t listed[2];                // the lists are made that the first, the second phase wants
  uint64_t computed[kNumPhases];     // this block's activations; `awaited` is then known
  uint64_t awaited[kNumPhases];      // what progress is when all blocks' are
  bool is_last;                      // the piece that completes what has a scale in common
  ExpertTiles experts;

  __device__ int16_t* ids() { return reinterpret_cast<int16_t*>(this + 1); }
  __device__ uint16_t* sorted(int num_pairs) {
    return reinterpret_cast<uint16_t*>(ids() + num_pairs);
  }
};

// A block's part in the second phase.
struct DownShare {
  int rank, first_group, num_groups;  // of 8 hidden columns; num_groups 0: none

  __device__ explicit DownShare(const Arguments& a) {
    const int cluster = blockIdx.x / a.splits, groups = a.hidden / kGroupRows;
    rank = blockIdx.x % a.splits;
    first_group = groups * cluster / a.clusters;
    num_groups = cluster < a.clusters ? groups * (cluster + 1) / a.clusters - first_group : 0;
  }
};

// The work in the order in which all of a block's warps go through it.
class Work {
 public:
  __device__ Work(const Arguments& a, Tables& tables, int most_pairs)
      : a_(a), tables_(tables), most_pairs_(most_pairs), share_(a) {}

  // Routed: only when the lists are made.
  __device__ Walk gate_up(Phase phase) const {
    const int units = max(a_.inter_of(phase) / kGroupRows, kScaleUnits);
    const int parts = static_cast<int>(gridDim.x);
    return {num_tiles(phase),
            units,
            most_pairs_,
            static_cast<int>(blockIdx.x),
            parts,
            kScaleUnits,
            granule(num_tiles(phase) * units, parts)};
  }
  __device__ Walk down(Phase phase) const {
    return {share_.num_groups == 0 ? 0 : num_tiles(phase), max(stages_of(a_.inter_of(phase)), 1),
            kWholeTile, share_.rank, a_.splits};
  }
  __device__ TokenTile tile(Phase phase, const Piece& piece) const {
    if (phase == kRouted) return tables_.experts.tiles[piece.tile];
    const int first = piece.tile * kTileTokens;
    return {first, 0, static_cast<int16_t>(min(kTileTokens, a_.rows - first))};
  }
  __device__ void wait_for_lists(int of) const { barrier_wait(&tables_.listed[of], 0); }
  __device__ const DownShare& share() const { return share_; }

 private:
  // Whole pieces for all blocks, if that gives none much more than an even share: a smaller piece's
  // stages take longer than they take to arrive.
  __device__ int granule(int units, int parts) const {
    int granule = most_pairs_;
    for (; granule > 1; granule /= 2) {
      const int most = (units / granule + parts - 1) / parts * granule;
      if (most * parts <= units + units / 16) break;
    }
    return granule;
  }
  __device__ int num_tiles(Phase phase) const {
    return phase == kShared ? a_.num_shared_tiles() : tables_.experts.num_tiles;
  }

  const Arguments& a_;
  Tables& tables_;
  const int most_pairs_;
  const DownShare share_;
};

// ---- weights: one thread

class WeightCopies {
 public:
  __device__ WeightCopies(uint8_t* ring, Tables& tables, const Work& work, const Arguments& a)
      : ring_(ring), tables_(tables), work_(work), a_(a) {}

  __device__ void gate_up(Phase phase, const CUtensorMap* maps) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const int first = work_.tile(phase, piece).expert * (2 * a_.inter / kGroupRows) + piece.first;
      for (int k = 0; k < stages_of(a_.hidden); ++k) {
        uint64_t* arrived = begin_stage(piece.count * kPairBytes);
        int done = 0;
        for (int size = kPairMaps - 1; size >= 0; --size) {
          if ((piece.count >> size & 1) == 0) continue;
          copy_box_under(policy_, weights() + done * kPairBytes, &maps[size], arrived, 0, 0,
                         k * kStageHalves, 0, first + done);
          done += 1 << size;
        }
        end_stage();
      }
    }
  }

  __device__ void down(Phase phase, const CUtensorMap* maps) {
    const DownShare& share = work_.share();
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const int row = work_.tile(phase, piece).expert * a_.hidden + share.first_group * kGroupRows;
      for (int k = 0; k < piece.count; ++k) {
        uint64_t* arrived = begin_stage(share.num_groups * kRowBytes);
        copy_box_under(policy_, weights(), &maps[share.num_groups == a_.hidden_groups ? 0 : 1],
                       arrived, 0, row, (piece.first + k) * kStageHalves);
        end_stage();
      }
    }
  }

 private:
  __device__ uint64_t* begin_stage(int bytes) {
    if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
    barrier_expect(&tables_.arrived[at_.stage], bytes);
    return &tables_.arrived[at_.stage];
  }
  __device__ uint8_t* weights() const {
    return ring_ + at_.stage * a_.stage_bytes + a_.token_bytes();
  }
  __device__ void end_stage() {
    ++done_;
    at_.advance(a_.stages);
  }

  uint8_t* const ring_;
  Tables& tables_;
  const Work& work_;
  const Arguments& a_;
  const uint64_t policy_ = read_once_policy();
  RingPosition at_;
  int done_ = 0;
};

// ---- tokens: one warpgroup
//
// A thread copies the same 16 bytes of 128 columns of every eighth row.

class TokenCopies {
 public:
  __device__ TokenCopies(uint8_t* ring, Tables& tables, const Work& work, const Arguments& a)
      : ring_(shared_address(ring)),
        tables_(tables),
        work_(work),
        a_(a),
        chunk_(threadIdx.x % 16),
        row_(threadIdx.x % kWarpgroupThreads / 16),
        scale_half_(threadIdx.x % kWarpgroupThreads / kTileTokens),
        scale_row_(threadIdx.x % kTileTokens) {}

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      const uint16_t* sorted = tables_.sorted(a_.num_pairs());
      const auto token = [&](int row) {
        const int place = tile.first + row;
        return phase == kShared ? place : sorted[place] / a_.experts_per_token;
      };
      const int blocks = a_.hidden / 128, inter = a_.inter_of(phase);
      const int row_block = tile.expert * (2 * inter / 128) + piece.first / kScaleUnits;
      copy(
          tile.count, 0, stages_of(a_.hidden), blocks,
          [&](int row) { return a_.x + static_cast<int64_t>(token(row)) * a_.hidden; },
          {scale_row_ < tile.count ? a_.x_scales + token(scale_row_) : nullptr, a_.x_scales_stride},
          a_.gate_up_scales[phase] + (row_block + scale_row_ % 2 * (inter / 128)) * blocks);
    }
  }

  __device__ void down(Phase phase) {
    const int inter = a_.inter_of(phase);
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      const int blocks = inter / 128, row_blocks = a_.hidden / 128;
      const int row_block =
          min(work_.share().first_group / kScaleUnits + scale_row_ % 2, row_blocks - 1);
      copy(
          tile.count, piece.first * kStageHalves, piece.count, blocks,
          [&](int row) {
            return a_.activations[phase] + static_cast<int64_t>(tile.first + row) * inter;
          },
          {scale_row_ < tile.count
               ? a_.activation_scales[phase] + (tile.first + scale_row_) * blocks
               : nullptr,
           1},
          a_.down_scales[phase] + (tile.expert * row_blocks + row_block) * blocks);
    }
  }

  // For all blocks' activations.
  __device__ void wait_for(Phase phase) const {
    if (threadIdx.x % kWarpgroupThreads == 0) {
      barrier_wait(&tables_.computed[phase], 0);
      while (load_acquire(&a_.progress[phase]) < tables_.awaited[phase]) {
      }
    }
    named_barrier(kCopying, kWarpgroupThreads);
  }

 private:
  static constexpr int kEach = kTileTokens / kGroupRows;

  // One row's scales, by blocks of columns.
  struct Scales {
    const float* first;
    int64_t stride;
  };

  // From first_block on of row_at(0 … rows), each of `blocks` blocks of 128 columns; this thread's
  // token's scales, and one of two rows' of weights, dense.
  template <typename RowAt>
  __device__ void copy(int rows, int first_block, int num_stages, int blocks, RowAt row_at,
                       const Scales& token_scales, const float* row_scales) {
    const uint8_t* from[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * kGroupRows + row_;
      from[i] = row < rows ? row_at(row) : nullptr;
    }
    const uint32_t to =
        ring_ + chunk_ / 8 * (a_.token_groups * kGroupBytes) + swizzled_chunk(row_, chunk_ % 8);
    for (int k = 0; k < num_stages; ++k) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      const int block = first_block + k * kStageHalves, column = block * 128 + chunk_ * 16;
      const bool exists = column < blocks * 128;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (from[i] == nullptr) continue;
        copy_16_or_zero(to + at_.stage * a_.stage_bytes + i * kGroupBytes,
                        from[i] + (exists ? column : 0), exists ? 16 : 0);
      }
      // What is beyond the last block is multiplied by 0: any scale but NaN will do.
      const int scaled_block = min(block + scale_half_, blocks - 1);
      StageScalesMemory& scales = tables_.scales[at_.stage];
      if (token_scales.first != nullptr) {
        copy_4(shared_address(&scales.tokens[scale_half_][scale_row_]),
               token_scales.first + scaled_block * token_scales.stride);
      }
      if (scale_row_ < 2) {
        copy_4(shared_address(&scales.rows[scale_half_][scale_row_]), row_scales + scaled_block);
      }
      barrier_arrive_after_copies(&tables_.arrived[at_.stage]);
      ++done_;
      at_.advance(a_.stages);
    }
  }

  const uint32_t ring_;
  Tables& tables_;
  const Work& work_;
  const Arguments& a_;
  const int chunk_, row_;
  const int scale_half_, scale_row_;  // whose scale this thread copies
  RingPosition at_;
  int done_ = 0;
};

// ---- products

__device__ float swiglu(float gate, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

// Calls f with the number of columns of the smallest instruction that takes so many tokens.
template <typename F>
__device__ void with_columns(int tokens, F&& f) {
  if (tokens <= 8) {
    f.template operator()<8>();
  } else if (tokens <= 16) {
    f.template operator()<16>();
  } else if (tokens <= 32) {
    f.template operator()<32>();
  } else {
    f.template operator()<64>();
  }
}

constexpr int kMultiplyGroups = 2;  // warpgroups

// kRowGroups 2: each warpgroup has 64 rows of weights. 1: both have the same 64 rows and take
// stages in turn; then each has sums of its own, and what gate and up gave the second goes to the
// first.
template <int kRowGroups>
class Products {
 public:
  static constexpr bool kInTurn = kRowGroups == 1;
  static constexpr int kThreads = kMultiplyGroups * kWarpgroupThreads;
  static constexpr int kStride = moe_sum_bytes(kRowGroups) / 4;  // of a row of sums
  // Of the warps that multiply one stage.
  static constexpr int kWarps = kRowGroups * kWarpgroupThreads / 32;

  __device__ Products(const uint8_t* ring, float* sums, Tables& tables, const Work& work,
                      const Arguments& a)
      : ring_(shared_address(ring)),
        all_sums_(sums),
        tables_(tables),
        work_(work),
        a_(a),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % kWarps),
        turn_(kInTurn ? threadIdx.x / kWarpgroupThreads : 0) {
    const int vectors = (kInTurn ? kMultiplyGroups : 1) * a.rows * kStride / 4;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      reinterpret_cast<float4*>(sums)[i] = make_float4(0, 0, 0, 0);
    }
    named_barrier(kMultiplying, kThreads);
  }

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      with_columns(tile.count, [&]<int kColumns>() { gate_up<kColumns>(phase, piece, tile); });
    }
  }

  __device__ void down(Phase phase) {
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      if (kInTurn && piece.count == 1 && !is_my_turn()) {
        pass();
        continue;
      }
      const TokenTile tile = work_.tile(phase, piece);
      with_columns(tile.count, [&]<int kColumns>() { down<kColumns>(phase, piece, tile); });
    }
  }

  // Nobody has come to a barrier that others are still to come to.
  __device__ void end_exchange() const {
    if (kInTurn && turn_ == 1 && pieces_ > 0) named_barrier(kExchange, kThreads);
  }

  // This block's share of the cluster's rows and columns, when all blocks of the cluster have
  // their sums.
  __device__ void write_out() const {
    const DownShare& share = work_.share();
    const int vectors = 2 * share.num_groups;  // of four columns, in a row
    const int all = a_.rows * vectors, end = all * (share.rank + 1) / a_.splits;
    for (int i = all * share.rank / a_.splits + threadIdx.x; i < end; i += kThreads) {
      const int row = i / vectors, column = i % vectors * 4;
      const uint32_t address = shared_address(all_sums_ + row * kStride + column);
      float4 sum = make_float4(0, 0, 0, 0);
      for (int block = 0; block < a_.splits; ++block) {
        for (int turn = 0; turn < (kInTurn ? kMultiplyGroups : 1); ++turn) {
          const float4 part =
              load_from_block(address_in_block(address + turn * a_.rows * (kStride * 4), block));
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
      }
      const int64_t at = static_cast<int64_t>(row) * a_.hidden + share.first_group * 8 + column;
      if (a_.f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(a_.out) + at) = sum;
      } else {
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a_.out) + at) =
            make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
      }
    }
  }

 private:
  // Of this block's two blocks of 128 hidden columns, which its group of 8 belongs to.
  __device__ int scale_of_group(int group) const {
    const int first = work_.share().first_group;
    return min((first + group) / kScaleUnits - first / kScaleUnits, 1);
  }
  // Stages in turn.
  __device__ bool is_my_turn() const { return !kInTurn || (done_ & 1) == turn_; }
  __device__ void pass() {
    ++done_;
    at_.advance(a_.stages);
  }
  // The token of a thread's i-th column.
  __device__ int column_of(int i) const { return i / 2 * 8 + 2 * (lane_ % 4) + i % 2; }

  // upper, lower: which of the stage's two rows' scales the warp's first 8 rows have, and its
  // second.
  template <int kColumns>
  __device__ void multiply(float (&d)[kColumns / 2], int num_stages, const StageOperand& weights,
                           int upper, int lower) {
    // Two blocks' products at a time; of 64 tokens, for which there are no registers, 32 tokens' of
    // one block.
    constexpr int kPart = kColumns < 32 ? kColumns : 32, kParts = kColumns / kPart;
    constexpr int kTogether = kParts == 1 ? 2 : 1;
#pragma unroll
    for (float& value : d) value = 0;
    for (int i = 0; i < num_stages; ++i, pass()) {
      if (!is_my_turn()) continue;
      barrier_wait(&tables_.arrived[at_.stage], at_.parity);
      fence_async_proxy();
      const uint32_t stage = ring_ + at_.stage * a_.stage_bytes;
      const StageScalesMemory& scales = tables_.scales[at_.stage];
#pragma unroll
      for (int first = 0; first < kStageHalves * kParts; first += kTogether) {
        float products[kTogether][kPart / 2];
        mma_fence();
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const int half = (first + j) / kParts, part = (first + j) % kParts;
          const uint32_t tokens = stage + (half * a_.token_groups + part * 4) * kGroupBytes;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            mma_64_e4m3(products[j],
                        swizzled_matrix(stage + weights.begin + half * weights.half_stride + k * 32,
                                        weights.group_stride),
                        swizzled_matrix(tokens + k * 32, kGroupBytes), k > 0);
          }
          mma_commit();
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (j + 1 < kTogether) {
            mma_wait<1>();
          } else {
            mma_wait<0>();
          }
          pin(products[j]);
          const int half = (first + j) / kParts, part = (first + j) % kParts;
          add_scaled<kPart>(d + part * (kPart / 2), products[j], &scales.tokens[half][part * kPart],
                            scales.rows[half][upper], scales.rows[half][lower]);
        }
      }
      __syncwarp();
      if (lane_ == 0) barrier_arrive(&tables_.read[at_.stage]);
    }
  }

  template <int kColumns>
  __device__ void add_scaled(float* d, const float (&products)[kColumns / 2],
                             const float* of_tokens, float of_upper, float of_lower) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; j += 4) {
      const float2 pair = *reinterpret_cast<const float2*>(of_tokens + 2 * j + 2 * (lane_ % 4));
      d[j] = fmaf(products[j], pair.x * of_upper, d[j]);
      d[j + 1] = fmaf(products[j + 1], pair.y * of_upper, d[j + 1]);
      d[j + 2] = fmaf(products[j + 2], pair.x * of_lower, d[j + 2]);
      d[j + 3] = fmaf(products[j + 3], pair.y * of_lower, d[j + 3]);
    }
  }

  template <int kColumns>
  __device__ void gate_up(Phase phase, const Piece& piece, const TokenTile& tile) {
    float d[kColumns / 2];
    multiply<kColumns>(d, stages_of(a_.hidden),
                       {.begin = a_.token_bytes() + warp_ / 4 * (kWarpgroupPairs * kPairBytes),
                        .half_stride = kGroupBytes,
                        .group_stride = kRowBytes},
                       0, 1);
    if constexpr (kInTurn) {
      if (!join(d)) return;
    }
    if (warp_ < piece.count) {  // a warp has the 16 rows of one pair
      const int inter = a_.inter_of(phase);
      float* out = a_.wide[phase] + static_cast<int64_t>(tile.first) * inter +
                   (piece.first + warp_) * kGroupRows + lane_ / 4;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int j = i / 2 * 4 + i % 2;
        if (column_of(i) < tile.count) {
          out[static_cast<int64_t>(column_of(i)) * inter] = swiglu(d[j], d[j + 2]);
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      if (pieces_ > 0) barrier_wait(&tables_.piece_taken, (pieces_ - 1) & 1);
      barrier_arrive(&tables_.piece_done);
    }
    ++pieces_;
  }

  // What the second warpgroup has is added to what the first has; whether this is the first.
  template <int kCount>
  __device__ bool join(float (&d)[kCount]) {
    auto* const exchange =
        reinterpret_cast<float4*>(all_sums_ + kMultiplyGroups * a_.rows * kStride) +
        threadIdx.x % kWarpgroupThreads;
    if (turn_ == 1) {
      if (pieces_ > 0) named_barrier(kExchange, kThreads);  // it has been read
      ++pieces_;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        exchange[i / 4 * kWarpgroupThreads] = make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]);
      }
      named_barrier_arrive(kMultiplying, kThreads);
      return false;
    }
    named_barrier(kMultiplying, kThreads);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 more = exchange[i / 4 * kWarpgroupThreads];
      d[i] += more.x, d[i + 1] += more.y, d[i + 2] += more.z, d[i + 3] += more.w;
    }
    named_barrier_arrive(kExchange, kThreads);
    return true;
  }

  template <int kColumns>
  __device__ void down(Phase phase, const Piece& piece, const TokenTile& tile) {
    // Where sums belong is found out while weights are waited for, if there are registers.
    constexpr bool kEarly = kColumns <= 16;
    int token[kColumns / 4];
    const auto find_tokens = [&] {
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        token[i] = -1;
        if (column_of(i) >= tile.count) continue;
        const int place = tile.first + column_of(i);
        token[i] =
            phase == kShared ? place : tables_.sorted(a_.num_pairs())[place] / a_.experts_per_token;
      }
    };
    if constexpr (kEarly) find_tokens();
    float d[kColumns / 2];
    multiply<kColumns>(d, piece.count,
                       {.begin = a_.token_bytes() + warp_ / 4 * (kWarpgroupGroups * kGroupBytes),
                        .half_stride = work_.share().num_groups * kGroupBytes,
                        .group_stride = kGroupBytes},
                       scale_of_group(2 * warp_), scale_of_group(2 * warp_ + 1));
    if constexpr (!kEarly) find_tokens();
    // A warp alone has these columns of all rows.
    float* sums = all_sums_ + turn_ * a_.rows * kStride + warp_ * 16 + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int j = i / 2 * 4 + i % 2;
      if (token[i] < 0) continue;
      sums[token[i] * kStride] += d[j];
      sums[token[i] * kStride + 8] += d[j + 2];
    }
    __syncwarp();
  }

  const uint32_t ring_;
  float* const all_sums_;
  Tables& tables_;
  const Work& work_;
  const Arguments& a_;
  const int lane_, warp_;
  const int turn_;
  RingPosition at_;
  int done_ = 0;    // stages
  int pieces_ = 0;  // of gate and up, done
};

// ---- lists: one warpgroup

__device__ void make_lists(Tables& tables, const Work& work, const Arguments& a) {
  ExpertTiles& experts = tables.experts;
  const int num_pairs = a.num_pairs();
  find_tiles(experts, tables.ids(), a.expert_ids, num_pairs, kGrouping);
  const int warp = threadIdx.x % kGroupingThreads / 32;
  const auto list = [&](const Walk& walk, const auto& is_listed) {
    for (int i = walk.first_tile() + warp; i < walk.end_tile(); i += kGroupingThreads / 32) {
      if (is_listed(i)) continue;
      list_pairs(experts, tables.ids(), num_pairs, experts.tiles[i], tables.sorted(num_pairs));
    }
  };
  const Walk up = work.gate_up(kRouted);
  list(up, [](int) { return false; });
  barrier_arrive(&tables.listed[0]);
  list(work.down(kRouted), [&](int i) { return i >= up.first_tile() && i < up.end_tile(); });
  barrier_arrive(&tables.listed[1]);
}

// ---- quantisation: the same warpgroup

class Quantization {
 public:
  __device__ Quantization(Tables& tables, const Work& work, const Arguments& a)
      : tables_(tables), work_(work), a_(a), thread_(threadIdx.x % kWarpgroupThreads) {}

  __device__ void run(Phase phase) {
    const int blocks = a_.inter_of(phase) / 128;
    const int first_counter =
        kNumPhases + (phase == kShared ? 0 : a_.num_shared_tiles() * (a_.shared_inter / 128));
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const int block = piece.first / kScaleUnits;
      barrier_wait(&tables_.piece_done, parity_);
      parity_ ^= 1;
      named_barrier(kGrouping, kWarpgroupThreads);
      if (thread_ == 0) {
        barrier_arrive(&tables_.piece_taken);
        __threadfence();
        // It only grows: a launch adds kScaleUnits to it, or nothing.
        const uint64_t before =
            add_release(&a_.progress[first_counter + piece.tile * blocks + block], piece.count);
        tables_.is_last = (before + piece.count) % kScaleUnits == 0;
        __threadfence();
      }
      named_barrier(kGrouping, kWarpgroupThreads);
      if (tables_.is_last) quantize(phase, work_.tile(phase, piece), block);
    }
    named_barrier(kGrouping, kWarpgroupThreads);
    if (thread_ == 0) {
      const uint64_t before = add_release(&a_.progress[phase], 1);
      tables_.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
      barrier_arrive(&tables_.computed[phase]);
    }
  }

 private:
  // A warp takes a token, four columns a lane.
  __device__ void quantize(Phase phase, const TokenTile& tile, int block) const {
    constexpr int kWarps = kWarpgroupThreads / 32, kTogether = 4;
    const int inter = a_.inter_of(phase), lane = thread_ % 32;
    const uint16_t* sorted = tables_.sorted(a_.num_pairs());
    for (int first = thread_ / 32; first < tile.count; first += kWarps * kTogether) {
      float4 values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = min(first + i * kWarps, tile.count - 1);
        values[i] = __ldcg(reinterpret_cast<const float4*>(
            a_.wide[phase] + static_cast<int64_t>(tile.first + row) * inter + block * 128 +
            lane * 4));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int place = tile.first + first + i * kWarps;
        if (place >= tile.first + tile.count) break;
        const BlockScale scale = block_scale(warp_magnitude(values[i]), a_.form);
        *reinterpret_cast<uint32_t*>(a_.activations[phase] + static_cast<int64_t>(place) * inter +
                                     block * 128 + lane * 4) = pack_four(values[i], scale.inverse);
        if (lane == 0) {
          const float weight = phase == kShared ? 1.0f : a_.expert_weights[sorted[place]];
          a_.activation_scales[phase][place * (inter / 128) + block] = scale.scale * weight;
        }
      }
    }
  }

  Tables& tables_;
  const Work& work_;
  const Arguments& a_;
  const int thread_;
  int parity_ = 0;
};

// ---- the kernel

constexpr int kKernelThreads = (kMultiplyGroups + 2) * kWarpgroupThreads + 32;

template <int kRowGroups>
__global__ void __launch_bounds__(kKernelThreads, 1)
    scaled_moe_few_rows_kernel(const __grid_constant__ Maps maps,
                               const __grid_constant__ Arguments a) {
  constexpr int kMultiply = kMultiplyGroups * kWarpgroupThreads;
  constexpr int kCopy = kMultiply + kWarpgroupThreads, kGroup = kCopy + kWarpgroupThreads;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto* const sums = reinterpret_cast<float*>(memory + a.stages * a.stage_bytes);
  Tables& tables = *reinterpret_cast<Tables*>(reinterpret_cast<uint8_t*>(sums) + a.sum_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&tables.arrived[i], kWarpgroupThreads + 1);
      barrier_init(&tables.read[i], kRowGroups * 4);
    }
    for (uint64_t& listed : tables.listed) barrier_init(&listed, kGroupingThreads);
    for (uint64_t& computed : tables.computed) barrier_init(&computed, 1);
    barrier_init(&tables.piece_done, kRowGroups * 4);
    barrier_init(&tables.piece_taken, 1);
    fence_barrier_init();
    let_next_launch_begin();
  }
  __syncthreads();

  const Work work(a, tables, kRowGroups * kWarpgroupPairs);
  if (threadIdx.x < kMultiply) {
    wait_for_earlier_launches();
    Products<kRowGroups> products(memory, sums, tables, work, a);
    products.gate_up(kShared);
    work.wait_for_lists(0);
    products.gate_up(kRouted);
    products.end_exchange();
    products.down(kShared);
    work.wait_for_lists(1);
    products.down(kRouted);
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      named_barrier(kMultiplying, kMultiply);
    }
    products.write_out();
  } else {
    if (threadIdx.x < kCopy) {
      wait_for_earlier_launches();
      TokenCopies copies(memory, tables, work, a);
      copies.gate_up(kShared);
      work.wait_for_lists(0);
      copies.gate_up(kRouted);
      copies.wait_for(kShared);
      copies.down(kShared);
      copies.wait_for(kRouted);
      copies.down(kRouted);
    } else if (threadIdx.x < kGroup) {
      wait_for_earlier_launches();
      make_lists(tables, work, a);
      Quantization quantization(tables, work, a);
      quantization.run(kShared);
      quantization.run(kRouted);
    } else if (threadIdx.x == kGroup) {
      WeightCopies copies(memory, tables, work, a);
      copies.gate_up(kShared, maps.gate_up[kShared]);
      work.wait_for_lists(0);
      copies.gate_up(kRouted, maps.gate_up[kRouted]);
      copies.down(kShared, maps.down[kShared]);
      copies.down(kRouted, maps.down[kRouted]);
    }
    __syncwarp();
    if (a.splits > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }
  if (a.splits > 1) {  // the others have read this block's sums
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// Boxes of 1, 2, 4 and 8 times 8 rows of gate and the same of up, 256 columns.
void make_pair_maps(CUtensorMap* maps, const void* matrix, int64_t experts, int64_t inter,
                    int64_t hidden) {
  for (int size = 0; size < kPairMaps; ++size) {
    const Axis axes[] = {{128, 1, 128},
                         {8, hidden, 8},
                         {hidden / 128, 128, kStageHalves},
                         {2, inter * hidden, 2},
                         // The last up's rows are the first one's, `inter` further: no box begins
                         // there.
                         {(2 * experts - 1) * inter / 8, 8 * hidden, 1 << size}};
    maps[size] = e4m3_map(matrix, axes);
  }
}

void make_row_maps(CUtensorMap* maps, const void* matrix, int64_t rows, int64_t columns,
                   int groups) {
  for (int i = 0; i < 2; ++i) {
    const Axis axes[] = {{128, 1, 128},
                         {rows, columns, std::max(groups - i, 1) * kGroupRows},
                         {columns / 128, 128, kStageHalves}};
    maps[i] = e4m3_map(matrix, axes);
  }
}

Maps make_maps(const ScaledMoeArguments& arguments, int groups) {
  const MoeShape& s = arguments.shape;
  Maps maps;
  make_pair_maps(maps.gate_up[kRouted], arguments.gate_up, s.num_experts, s.inter, s.hidden);
  make_row_maps(maps.down[kRouted], arguments.down, int64_t{s.num_experts} * s.hidden, s.inter,
                groups);
  if (s.shared_inter > 0) {
    make_pair_maps(maps.gate_up[kShared], arguments.shared_gate_up, 1, s.shared_inter, s.hidden);
    make_row_maps(maps.down[kShared], arguments.shared_down, s.hidden, s.shared_inter, groups);
  }
  return maps;
}

template <int kRowGroups>
void launch_for(const MoeFewRowsPlan& plan, const Maps& maps, Arguments a, cudaStream_t stream) {
  const auto kernel = scaled_moe_few_rows_kernel<kRowGroups>;
  static const bool prepared = (allow_shared_memory(kernel, kMoeSharedBytes), true);
  static_cast<void>(prepared);
  const int pairs = a.rows * a.experts_per_token;
  static_assert(sizeof(Tables) <= scaled_moe_table_bytes(0));
  a.sum_bytes = static_cast<int32_t>(scaled_moe_sum_bytes(a.rows, kRowGroups));
  const int behind = a.sum_bytes + scaled_moe_table_bytes(pairs);
  a.stage_bytes = moe_stage_bytes(a.rows, kRowGroups);
  a.stages = std::clamp(plan.ring_bytes / a.stage_bytes, 2, kMaxStages);
  // A warpgroup whose turn it is must not take a stage's last filling for the one it waits for:
  // each stage is always the same warpgroup's.
  if (kRowGroups == 1) a.stages &= ~1;
  launch(kernel,
         {.blocks = static_cast<unsigned>(plan.blocks),
          .threads = kKernelThreads,
          .shared_bytes = static_cast<unsigned>(a.stages * a.stage_bytes + behind),
          .cluster = static_cast<unsigned>(plan.splits)},
         stream, maps, a);
}

const ClusterCounts& cluster_counts() {
  static const ClusterCounts counts = count_clusters();
  return counts;
}

// Byte offsets into the workspace.
struct Workspace {
  int64_t wide[kNumPhases], activations[kNumPhases], scales[kNumPhases];
  int64_t bytes = 0;

  Workspace(const MoeShape& shape, int64_t rows) {
    const int64_t counts[kNumPhases] = {rows * shape.shared_inter,
                                        rows * shape.experts_per_token * shape.inter};
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += round_up(size, 256);
      return at;
    };
    for (const int phase : {kShared, kRouted}) {
      wide[phase] = take(counts[phase] * 4);
      activations[phase] = take(counts[phase]);
      scales[phase] = take(counts[phase] / 128 * 4);
    }
  }
};

MoeFewRowsShape plan_shape(const MoeShape& shape, int64_t rows) {
  return {.rows = rows,
          .hidden = shape.hidden,
          .num_experts = shape.num_experts,
          .experts_per_token = shape.experts_per_token,
          .inter = shape.inter,
          .shared_inter = shape.shared_inter,
          .scaled = true};
}

}  // namespace

bool scaled_moe_few_rows_takes(const MoeShape& shape, int32_t rows) {
  constexpr int64_t kMostRows = 192;
  const int64_t pairs = int64_t{rows} * shape.experts_per_token;
  const int64_t tiles = std::min<int64_t>(pairs, shape.num_experts) + pairs / kTileTokens;
  const int64_t counters =
      tiles * (shape.inter / 128) + ceil_div(rows, kTileTokens) * (shape.shared_inter / 128);
  return rows <= kMostRows && pairs <= kMaxPairs && counters <= kCounters;
}

int64_t scaled_moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return Workspace(shape, rows).bytes;
}

void scaled_moe_few_rows(const MoeFewRowsPlan& plan, const ScaledMoeArguments& arguments,
                         cudaStream_t stream) {
  const MoeShape& shape = arguments.shape;
  const Workspace workspace(shape, arguments.rows);
  auto* const memory = static_cast<uint8_t*>(arguments.workspace);
  Arguments a = {};
  a.x = static_cast<const uint8_t*>(arguments.x);
  a.x_scales = arguments.x_scales;
  a.x_scales_stride = arguments.x_scales_stride;
  a.expert_ids = arguments.expert_ids;
  a.expert_weights = arguments.expert_weights;
  a.gate_up_scales[kShared] = arguments.shared_gate_up_scales;
  a.gate_up_scales[kRouted] = arguments.gate_up_scales;
  a.down_scales[kShared] = arguments.shared_down_scales;
  a.down_scales[kRouted] = arguments.down_scales;
  a.out = arguments.out;
  a.progress = arguments.progress;
  for (const int phase : {kShared, kRouted}) {
    a.wide[phase] = reinterpret_cast<float*>(memory + workspace.wide[phase]);
    a.activations[phase] = memory + workspace.activations[phase];
    a.activation_scales[phase] = reinterpret_cast<float*>(memory + workspace.scales[phase]);
  }
  a.rows = arguments.rows;
  a.hidden = shape.hidden;
  a.experts_per_token = shape.experts_per_token;
  a.inter = shape.inter;
  a.shared_inter = shape.shared_inter;
  a.splits = plan.splits;
  a.clusters = plan.clusters;
  a.hidden_groups = plan.hidden_groups(shape.hidden);
  a.token_groups =
      std::min((arguments.rows + kGroupRows - 1) / kGroupRows, kTileTokens / kGroupRows);
  a.form = arguments.form;
  a.f32 = arguments.out_type == DType::kF32;
  const Maps maps = make_maps(arguments, a.hidden_groups);
  if (plan.warpgroups == 1) {
    launch_for<1>(plan, maps, a, stream);
  } else {
    launch_for<2>(plan, maps, a, stream);
  }
}

void scaled_moe_few_rows(const ScaledMoeArguments& arguments, cudaStream_t stream) {
  scaled_moe_few_rows(
      plan_moe_few_rows(plan_shape(arguments.shape, arguments.rows), cluster_counts()), arguments,
      stream);
}

}  // namespace fathom::cuda
