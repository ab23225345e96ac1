// The router's GEMM and selection: eight warps, of one CTA or of several, compute logits of
// kExpertTiles * 16 experts and kRowTiles * 8 rows, the CTAs of a cluster exchange them, and a warp
// selects for a row. The layout is described in gate_cuda.cu.
#pragma once

#include <cstdint>

#include "device/cuda/cluster_memory.cuh"
#include "device/cuda/rows.cuh"
#include "device/cuda/warp_mma.cuh"
#include "ops/gate/gate_choice_cuda.cuh"
#include "ops/gate/gate_options.h"

namespace fathom::cuda {

inline constexpr int kGateWarps = 8;     // which share the columns
inline constexpr int kGateColumns = 32;  // per step: eight a lane, four lanes a row

struct GateShape {
  const __nv_bfloat16* x;
  const void* weight;
  const float* bias;
  const int32_t* num_valid_rows;
  int32_t* expert_ids;
  float* expert_weights;
  GateOptions options;
  int64_t rows, hidden;
  int32_t experts;
};

// ---- eight columns of one expert's weights, as the sum of kTerms bf16 numbers

struct NarrowWeights {
  using Element = __nv_bfloat16;
  static constexpr int kTerms = 1;
  uint4 packed;

  __device__ void load(const Element* from) { packed = load_weights_16(from); }
  __device__ uint4 term(int) { return packed; }
};

struct WideWeights {
  using Element = float;
  static constexpr int kTerms = 3;
  Eight rest;

  __device__ void load(const Element* from) { rest = load_eight_weights(from); }
  // The upper 16 bits of the remainder, exactly; called for terms 0, 1 and 2 in turn.
  __device__ uint4 term(int) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = __float_as_uint(rest.v[2 * i]) & 0xFFFF0000;
      const uint32_t high = __float_as_uint(rest.v[2 * i + 1]) & 0xFFFF0000;
      rest.v[2 * i] -= __uint_as_float(low);
      rest.v[2 * i + 1] -= __uint_as_float(high);
      pairs[i] = low >> 16 | high;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

// ---- a warp's k-slice of the sums

template <typename Weights, int kExpertTiles, int kRowTiles, int kAhead>
class GateProduct {
 public:
  using Element = typename Weights::Element;

  // share: index of the column share.
  __device__ GateProduct(const GateShape& shape, int first_expert, int share, int shares)
      : lane_(threadIdx.x % kWarp), hidden_(static_cast<int>(shape.hidden)) {
    const int steps = static_cast<int>(shape.hidden / kGateColumns);
    const int each = (steps + shares - 1) / shares;
    const int first_step = min(share * each, steps);
    num_steps_ = min(each, steps - first_step);
    first_column_ = first_step * kGateColumns + lane_ % 4 * 8;
    weight_ = static_cast<const Element*>(shape.weight) +
              (first_expert + lane_ / 4) * shape.hidden + first_column_;
    experts_left_ = shape.experts - first_expert - lane_ / 4;
  }

  // Before further rows: weights that fit the registers are still there.
  __device__ void begin_rows() {
    if (num_steps_ > kAhead) prefetch();
#pragma unroll
    for (auto& of_expert : sums_) {
#pragma unroll
      for (auto& of_row : of_expert) {
#pragma unroll
        for (float& sum : of_row) sum = 0;
      }
    }
  }

  // Loads weights only: nothing that an earlier launch writes.
  __device__ void prefetch() {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) load_weights(slot, slot);
  }

  // Issues the loads of kAhead steps at once, then multiplies: in a ring, the wait for the oldest
  // of so many loads would wait for younger ones too, as a warp has six scoreboards for them. x:
  // `rows` rows.
  __device__ void run(const __nv_bfloat16* x, int rows) {
    x += lane_ / 4 * hidden_ + first_column_;
    rows -= lane_ / 4;
    for (int first = 0; first < num_steps_; first += kAhead) {
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        if (first > 0) load_weights(slot, first + slot);
        load_x(slot, first + slot, x, rows);
      }
      // Both operands are zero beyond the end.
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) multiply(slot);
    }
  }

  // sums [experts of the CTA, rows of the tile]
  __device__ void store(float* sums) const {
#pragma unroll
    for (int e = 0; e < kExpertTiles; ++e) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        float* const to = sums + (e * 16 + lane_ / 4) * (kRowTiles * 8) + r * 8 + lane_ % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sums_[e][r][0], sums_[e][r][1]);
        *reinterpret_cast<float2*>(to + 8 * kRowTiles * 8) =
            make_float2(sums_[e][r][2], sums_[e][r][3]);
      }
    }
  }

  // sums [rows of the tile, stride]: per row, experts of the CTA
  __device__ void store_by_row(float* sums, int stride) const {
#pragma unroll
    for (int e = 0; e < kExpertTiles; ++e) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        float* const to = sums + (r * 8 + lane_ % 4 * 2) * stride + e * 16 + lane_ / 4;
        to[0] = sums_[e][r][0];
        to[stride] = sums_[e][r][1];
        to[8] = sums_[e][r][2];
        to[stride + 8] = sums_[e][r][3];
      }
    }
  }

 private:
  __device__ void load_weights(int slot, int step) {
#pragma unroll
    for (int e = 0; e < kExpertTiles * 2; ++e) {
      weights_[slot][e] = {};
      if (step < num_steps_ && e * 8 < experts_left_) {
        weights_[slot][e].load(weight_ + (e * 8 * hidden_ + step * kGateColumns));
      }
    }
  }

  __device__ void load_x(int slot, int step, const __nv_bfloat16* x, int rows) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      x_values_[slot][r] = make_uint4(0, 0, 0, 0);
      if (step < num_steps_ && r * 8 < rows) {
        x_values_[slot][r] =
            *reinterpret_cast<const uint4*>(x + (r * 8 * hidden_ + step * kGateColumns));
      }
    }
  }

  __device__ void multiply(int slot) {
#pragma unroll
    for (int e = 0; e < kExpertTiles; ++e) {
#pragma unroll
      for (int term = 0; term < Weights::kTerms; ++term) {
        const uint4 upper = weights_[slot][2 * e].term(term);
        const uint4 lower = weights_[slot][2 * e + 1].term(term);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          const uint4 x = x_values_[slot][r];
          warp_mma_16x8x16(sums_[e][r], {upper.x, lower.x, upper.y, lower.y}, {x.x, x.y});
          warp_mma_16x8x16(sums_[e][r], {upper.z, lower.z, upper.w, lower.w}, {x.z, x.w});
        }
      }
    }
  }

  const int lane_;
  const int hidden_;
  int num_steps_, first_column_;
  int experts_left_;  // from the lane's first expert on
  const Element* weight_;
  Weights weights_[kAhead][kExpertTiles * 2];
  uint4 x_values_[kAhead][kRowTiles];
  float sums_[kExpertTiles][kRowTiles][4] = {};
};

// ---- selection

__device__ inline void write_no_experts(const GateShape& shape, int64_t row, int lane) {
  const int64_t k = shape.options.experts_per_token;
  if (lane >= k) return;
  shape.expert_ids[row * k + lane] = -1;
  shape.expert_weights[row * k + lane] = 0;
}

__device__ inline void choose_experts(const GateShape& shape, int64_t row, float* logits) {
  const int64_t at = row * shape.options.experts_per_token;
  int32_t* const ids = shape.expert_ids + at;
  float* const weights = shape.expert_weights + at;
  const int experts = shape.experts;
  if (experts <= 2 * kWarp) {
    ExpertChoice<2>(shape.options, experts, logits).run(shape.bias, ids, weights);
  } else if (experts <= 8 * kWarp) {
    ExpertChoice<8>(shape.options, experts, logits).run(shape.bias, ids, weights);
  } else {
    ExpertChoice<16>(shape.options, experts, logits).run(shape.bias, ids, weights);
  }
}

// The work of a cluster's CTAs: kParts CTAs share a tile of experts, and each of their warps takes
// an eighth of the columns.
template <int kExperts, int kRows, int kParts>
struct GateBlock {
  static constexpr int kWarps = kGateWarps / kParts, kThreads = kWarps * kWarp;
  // Values sent per logit: one sum, or, where its warps are in several CTAs, one for each warp.
  static constexpr int kSums = kParts == 1 ? 1 : kGateWarps;

  int blocks = static_cast<int>(cluster_blocks()), rank = static_cast<int>(cluster_rank());
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  __device__ int first_expert() const { return rank / kParts * kExperts; }
  __device__ int first_warp() const { return rank % kParts * kWarps; }
};

// Sends the warps' `sums` [kWarps, kExperts, kRows] of each row to the CTA of the cluster that
// selects for it (row % blocks: its row / blocks-th), which adds them up in the order of the
// columns and selects. `logits` [rows of a CTA, kSums, experts] and `sums` are shared memory; rows
// are [first_row, first_row + num_rows). The cluster's CTAs have arrived at the cluster barrier
// once before and synchronise once here: on return, all have read their inputs.
template <int kExperts, int kRows, int kParts>
__device__ void exchange_and_choose(const GateShape& shape,
                                    const GateBlock<kExperts, kRows, kParts>& block,
                                    const float* sums, float* logits, int64_t first_row,
                                    int num_rows) {
  using Block = GateBlock<kExperts, kRows, kParts>;
  constexpr int kCells = kExperts * kRows;
  __syncthreads();
  cluster_wait();
  const uint32_t logits_address = shared_address(logits);
  for (int i = threadIdx.x; i < kCells; i += Block::kThreads) {
    const int expert = block.first_expert() + i / kRows, row = i % kRows;
    if (expert >= shape.experts || row >= num_rows) continue;
    const int first = row / block.blocks * Block::kSums * shape.experts + expert;
    const auto send = [&](int sum, float value) {
      store_word_in_block(address_in_block(logits_address + (first + sum * shape.experts) *
                                                                static_cast<int>(sizeof(float)),
                                           static_cast<uint32_t>(row % block.blocks)),
                          value);
    };
    if constexpr (kParts == 1) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < Block::kWarps; ++w) sum += sums[w * kCells + i];
      send(0, sum);
    } else {
#pragma unroll
      for (int w = 0; w < Block::kWarps; ++w) send(block.first_warp() + w, sums[w * kCells + i]);
    }
  }
  cluster_arrive();
  cluster_wait();
  const int64_t valid = shape.num_valid_rows == nullptr ? shape.rows : *shape.num_valid_rows;
  for (int own = block.warp; own * block.blocks + block.rank < num_rows; own += Block::kWarps) {
    const int64_t row = first_row + own * block.blocks + block.rank;
    if (row >= valid) {
      write_no_experts(shape, row, block.lane);
      continue;
    }
    float* const row_logits = logits + own * Block::kSums * shape.experts;
    if constexpr (kParts > 1) {
      for (int expert = block.lane; expert < shape.experts; expert += kWarp) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kGateWarps; ++w) sum += row_logits[w * shape.experts + expert];
        row_logits[expert] = sum;
      }
      __syncwarp();
    }
    choose_experts(shape, row, row_logits);
  }
}

}  // namespace fathom::cuda
