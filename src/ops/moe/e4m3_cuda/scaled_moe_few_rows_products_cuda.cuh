// Both GEMMs of few-token MoE in e4m3, on two warpgroups: SwiGLU's results go to the workspace in
// fp32, down's to the sums in shared memory.
#pragma once

#include "device/cuda/wgmma.cuh"
#include "ops/moe/bf16_cuda/moe_few_rows_products_cuda.cuh"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_tables_cuda.cuh"

namespace fathom::cuda::scaled_few_tokens {

// kRowGroups 2: each warpgroup has 64 weight rows. 1: both have the same 64 rows and alternate over
// stages; then each has its own sums, and the second's gate and up sums are added to the first's.
template <int kRowGroups>
class Products {
 public:
  static constexpr bool kInTurn = kRowGroups == 1;
  static constexpr int kTurns = kInTurn ? kMultiplyGroups : 1;
  static constexpr int kThreads = kMultiplyGroups * kWarpgroupThreads;
  static constexpr int kStride = moe_sum_bytes(kRowGroups) / 4;  // row stride of the sums
  // Warps that multiply one stage.
  static constexpr int kWarps = kRowGroups * kWarpgroupThreads / 32;

  __device__ Products(const uint8_t* ring, float* sums, Tables& tables, const ScaledWork& work,
                      const Arguments& a)
      : ring_(shared_address(ring)),
        all_sums_(sums),
        tables_(tables),
        work_(work),
        a_(a),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % kWarps),
        turn_(kInTurn ? threadIdx.x / kWarpgroupThreads : 0) {
    const int vectors = kTurns * a.rows * kStride / 4;
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

  // Balances the named barrier: no thread may be left waiting at the end.
  __device__ void end_exchange() const {
    if (kInTurn && turn_ == 1 && pieces_ > 0) named_barrier(kExchange, kThreads);
  }

 private:
  // Which of this CTA's two blocks of 128 hidden columns a group of 8 belongs to.
  __device__ int scale_of_group(int group) const {
    const int first = work_.share().first_group;
    return min((first + group) / kScaleUnits - first / kScaleUnits, 1);
  }
  // Warpgroups alternate over stages.
  __device__ bool is_my_turn() const { return !kInTurn || (done_ & 1) == turn_; }
  __device__ void pass() {
    ++done_;
    at_.advance(a_.stages);
  }

  // upper, lower: which of the stage's two weight scales applies to the warp's first 8 rows, and to
  // its second.
  template <int kColumns>
  __device__ void multiply(float (&d)[kColumns / 2], int num_stages, const StageOperand& weights,
                           int upper, int lower) {
    // Two scale blocks' wgmmas at a time; with 64 tokens, for lack of registers, 32 tokens of one
    // block.
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
    multiply<kColumns>(d, stages_of<Arguments>(a_.hidden),
                       {.begin = token_bytes(a_) + warp_ / 4 * (kWarpgroupPairs * kPairBytes),
                        .half_stride = kGroupBytes,
                        .group_stride = kRowBytes},
                       0, 1);
    if constexpr (kInTurn) {
      if (!join(d)) return;
    }
    if (warp_ < piece.count) {  // one warp has the 16 rows of a pair
      const int inter = inter_of(a_, phase);
      float* out = a_.wide[phase] + static_cast<int64_t>(tile.first) * inter +
                   (piece.first + warp_) * kGroupRows + lane_ / 4;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int j = i / 2 * 4 + i % 2;
        if (column_of(lane_, i) < tile.count) {
          out[static_cast<int64_t>(column_of(lane_, i)) * inter] = swiglu(d[j], d[j + 2]);
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

  // Adds the second warpgroup's sums to the first's; true in the first.
  template <int kCount>
  __device__ bool join(float (&d)[kCount]) {
    auto* const exchange =
        reinterpret_cast<float4*>(all_sums_ + kMultiplyGroups * a_.rows * kStride) +
        threadIdx.x % kWarpgroupThreads;
    if (turn_ == 1) {
      if (pieces_ > 0) named_barrier(kExchange, kThreads);  // the previous sums have been read
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
    // If registers suffice, the destinations of the sums are computed while weights are in flight.
    constexpr bool kEarly = kColumns <= 16;
    int token[kColumns / 4];
    const auto find_tokens = [&] {
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        token[i] = -1;
        if (column_of(lane_, i) >= tile.count) continue;
        const int place = tile.first + column_of(lane_, i);
        token[i] =
            phase == kShared ? place : tables_.sorted(num_pairs(a_))[place] / a_.experts_per_token;
      }
    };
    if constexpr (kEarly) find_tokens();
    float d[kColumns / 2];
    multiply<kColumns>(d, piece.count,
                       {.begin = token_bytes(a_) + warp_ / 4 * (kWarpgroupGroups * kGroupBytes),
                        .half_stride = work_.share().num_groups * kGroupBytes,
                        .group_stride = kGroupBytes},
                       scale_of_group(2 * warp_), scale_of_group(2 * warp_ + 1));
    if constexpr (!kEarly) find_tokens();
    // Only this warp updates these columns of all rows.
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
  const ScaledWork& work_;
  const Arguments& a_;
  const int lane_, warp_;
  const int turn_;
  RingPosition at_;
  int done_ = 0;    // stages
  int pieces_ = 0;  // pieces of gate and up done
};

}  // namespace fathom::cuda::scaled_few_tokens
