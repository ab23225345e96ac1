// The last tokens of an expert's tile, at most kTailTokens, in scaled_expert_products_cuda.cuh:
// 64 of them on M of wgmma would be mostly padding. Weights are on M here and tokens on N: a
// quarter of the tensor cores' work for the same results, bit by bit (the same terms in the same
// order).
//
// Layout: a warpgroup has all 128 weight rows of its CTA, in two halves of 64. A thread's element j
// of half h is weight row 64 h + 16 warp + lane / 4 (+ 8 if j & 2) and token 8 (j / 4) + 2 (lane %
// 4)
// + (j & 1). Gated: half 0 is gate, half 1 up, and rows of 16 lie with the even ones first, so that
// elements j and j + 2 are neighbouring columns.
//
// Quantized output: a token's columns lie in the four warps of both CTAs. The warps find their
// largest magnitude through the memory of their results, the CTAs through each other's.
#pragma once

#include <cstdint>

#include "device/cuda/cluster.cuh"
#include "device/cuda/fp8.cuh"
#include "device/cuda/planted_fault.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/moe/e4m3_cuda/scaled_expert_memory_cuda.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {

// A warpgroup's; all of its threads call together.
template <typename Shape, typename Work>
class ScaledExpertTail {
  using Memory = ScaledExpertMemory<Shape>;
  static constexpr int kHalves = 2;
  static constexpr int kElements = kTailTokens / 2;  // of a thread, in a half
  static constexpr int kOwn = kTailTokens / 4;       // tokens of a thread

 public:
  using Sums = float[kHalves][kElements];

  __device__ ScaledExpertTail(Memory& memory, const Work& work, int rank, int group)
      : memory_(memory),
        work_(work),
        rank_(rank),
        group_(group),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // tokens: matrix descriptor of the tail's tokens in stage 0; tokens_at: the first of them in the
  // tile.
  __device__ void multiply(int stage, uint64_t tokens, int tokens_at, Sums& sums) const {
    float2 scales[Shape::kScales][kOwn / 2];
#pragma unroll
    for (int i = 0; i < Shape::kScales; ++i) {
#pragma unroll
      for (int pair = 0; pair < kOwn / 2; ++pair) {
        scales[i][pair] = *reinterpret_cast<const float2*>(
            &memory_.scales[stage][i][tokens_at + 8 * pair + 2 * (lane_ % 4)]);
      }
    }
    const uint64_t weights = swizzled_matrix(shared_address(memory_.weights[stage]), 1024);
    const uint64_t its = moved(tokens, stage * Shape::kTokenBytes);
    float products[kHalves][kElements];
    mma_fence();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma_64_e4m3(products[half], moved(weights, half * 64 * 128 + i * 32), moved(its, i * 32),
                    i > 0);
      }
    }
    mma_commit();
    mma_wait();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      pin(products[half]);
      const int its_scales =
          FATHOM_PLANTED(work_, kGateScale) ? 0 : half * Shape::kScales / kHalves;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float2 two = scales[its_scales][j / 4];
        sums[half][j] = fmaf(products[half][j], j & 1 ? two.y : two.x, sums[half][j]);
      }
    }
  }

  __device__ void write_activations(const ScaledExpertOut& out, int tokens_at, Sums& sums) {
    auto& values = sums[0];
    float largest[kOwn];
#pragma unroll
    for (float& magnitude : largest) magnitude = kLeastMagnitude;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      values[j] = gated_activation(values[j], sums[1][j]);
      float& magnitude = largest[j / 4 * 2 + (j & 1)];
      magnitude = fmaxf(magnitude, fabsf(values[j]));
    }
#pragma unroll
    for (float& magnitude : largest) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
      }
    }
    const auto [scale, inverse] = block_scale(exchange(largest), out.form);
    const int token = tokens_at + token_of(lane_);
    if (rank_ == 0 && warp_ == 0 && token < out.tokens) out.scales[token] = scale;
    float inverses[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) inverses[i] = __shfl_sync(~0u, inverse, 4 * i + lane_ % 4);
    // A pair of columns of two tokens; the transposition brings a token's pairs together.
    const auto packed = [&](int four) {
      const float* v = values + 4 * four;
      const float first = inverses[2 * four], second = inverses[2 * four + 1];
      return pack_fp8<Fp8::kE4M3>(v[0] * first, v[2] * first, v[1] * second, v[3] * second);
    };
    static_assert(kTailTokens == 32);  // a lane has a token
    const uint32_t staged = shared_address(memory_.out[4 * group_ + warp_]) + lane_ * 16;
    store_matrices_transposed(staged, packed(0), packed(1), packed(2), packed(3));
    __syncwarp();
    const int own = tokens_at + lane_;
    if (own < out.tokens) {
      *reinterpret_cast<float4*>(static_cast<uint8_t*>(out.data) + int64_t{own} * out.row_stride +
                                 16 * warp_) = load_shared(staged);
    }
    __syncwarp();
  }

  __device__ void write_results(const ScaledExpertOut& out, int tokens_at, const Sums& sums) const {
    if (out.columns <= 0) return;
    // A token's 16 columns of the warp are two pieces of 16 bytes, swizzled.
    const auto staged = [&](int token, int piece) {
      return shared_address(memory_.out[4 * group_ + warp_]) + token * 32 +
             ((piece ^ (token / 4 & 1)) * 16);
    };
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {  // 8 columns
        const auto packed = [&](int four) {
          const float* v = sums[half] + 4 * four + 2 * piece;
          return pack_bf16(v[0], v[1]);
        };
        store_matrices_transposed(staged(lane_, piece), packed(0), packed(1), packed(2), packed(3));
      }
      __syncwarp();
#pragma unroll
      for (int first = 0; first < kTailTokens; first += 16) {
        const int token = first + lane_ / 2, piece = lane_ % 2;
        if (tokens_at + token < out.tokens) {
          uint8_t* const row =
              static_cast<uint8_t*>(out.data) + int64_t{2} * (tokens_at + token) * out.row_stride;
          *reinterpret_cast<float4*>(row + 2 * (64 * half + 16 * warp_) + 16 * piece) =
              load_shared(staged(token, piece));
        }
      }
      __syncwarp();
    }
  }

 private:
  // The token of which a lane knows the magnitude, and lane 4 i + lane % 4 for element i of a
  // thread's own.
  __device__ static int token_of(int lane) {
    return lane / 8 * 8 + 2 * (lane % 4) + (lane / 4 & 1);
  }

  // Returns the largest magnitude of the lane's token in all warps of both CTAs, given the warp's
  // of each of the thread's tokens. Double buffering is safe: the peer sends those of the tile
  // after the next one when it has received the next one's, which this CTA sends after it has read
  // this one's.
  __device__ float exchange(const float (&largest)[kOwn]) {
    const int turn = exchanges_ & 1, parity = exchanges_ >> 1 & 1;
    ++exchanges_;
    float own = largest[0];
#pragma unroll
    for (int i = 1; i < kOwn; ++i) own = lane_ / 4 == i ? largest[i] : own;
    *magnitude_in(warp_) = own;
    meet_group();
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) own = fmaxf(own, *magnitude_in(warp));
    auto& tail = memory_.tail;
    float& of_peer = tail.of[turn][group_][lane_];
    uint64_t* received = &tail.received[turn][group_];
    if (warp_ == 0) {
      if (lane_ == 0) barrier_expect(received, kTailTokens * sizeof(float));
      const auto peer = static_cast<uint32_t>(1 - rank_);
      store_in_block(address_in_block(shared_address(&of_peer), peer),
                     address_in_block(shared_address(received), peer), __float_as_uint(own));
    }
    barrier_wait(received, parity);
    if (!FATHOM_PLANTED(work_, kOwnMagnitude)) own = fmaxf(own, of_peer);
    meet_group();  // all have read: the memory of results is free, and of_peer, too
    return own;
  }

  // The lane's, where the warp's results will lie.
  __device__ float* magnitude_in(int warp) const {
    return reinterpret_cast<float*>(memory_.out[4 * group_ + warp]) + lane_;
  }

  __device__ void meet_group() const { named_barrier(1 + group_, 128); }

  Memory& memory_;
  const Work& work_;
  const int rank_, group_, warp_, lane_;
  int exchanges_ = 0;
};

}  // namespace fathom::cuda
