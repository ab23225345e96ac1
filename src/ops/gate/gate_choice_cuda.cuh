// A warp selects a token's experts by the rules of gate() (ops/gate/gate.h).
//
// Lane l has experts l, l + 32, …: a score each (for the weights) and a key, which orders the
// selection: larger is better, 0 means excluded.
#pragma once

#include <cstdint>

#include "device/cuda/rows.cuh"
#include "ops/gate/gate_options.h"

namespace fathom::cuda {

// A key with the order of the numbers; a NaN is below all of them, and still above 0: it can be
// selected when nothing else is left, so that a token always has k experts.
__device__ inline uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 is 0
  const uint32_t key =
      bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000);
  return value != value ? 1 : key;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

template <int kPerLane>
class ExpertChoice {
 public:
  // `values` [experts] in shared memory: the logits, then values shared between the lanes.
  __device__ ExpertChoice(const GateOptions& options, int experts, float* values)
      : options_(options), experts_(experts), values_(values), lane_(threadIdx.x % kWarp) {}

  // ids, weights [k] in device memory.
  __device__ __forceinline__ void run(const float* bias, int32_t* ids, float* weights) {
    if (options_.scoring == GateScoring::kSigmoidBias) {
      score_by_sigmoid(bias);
    } else {
      score_by_softmax();
    }
    if (options_.scoring != GateScoring::kSoftmaxGreedy && options_.num_groups > 1) drop_groups();
    choose(ids, weights);
  }

 private:
  __device__ bool has(int j) const { return lane_ + j * kWarp < experts_; }

  __device__ __forceinline__ void score_by_sigmoid(const float* bias) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int expert = lane_ + j * kWarp;
      keys_[j] = 0;
      if (!has(j)) continue;
      scores_[j] = 1 / (1 + expf(-values_[expert]));
      const float choice = scores_[j] + bias[expert];
      values_[expert] = choice;
      keys_[j] = order_key(choice);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void score_by_softmax() {
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) most = fmaxf(most, values_[lane_ + j * kWarp]);
    }
    most = warp_max(most);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      scores_[j] = has(j) ? expf(values_[lane_ + j * kWarp] - most) : 0;
      sum += scores_[j];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      keys_[j] = 0;
      if (!has(j)) continue;
      scores_[j] /= sum;
      values_[lane_ + j * kWarp] = scores_[j];
      keys_[j] = order_key(scores_[j]);
    }
    __syncwarp();
  }

  // V2: a group's score is that of its best expert. V3: the sum of its best two.
  __device__ __forceinline__ void drop_groups() {
    const bool sigmoid = options_.scoring == GateScoring::kSigmoidBias;
    const int groups = static_cast<int>(options_.num_groups), size = experts_ / groups;
    // Lanes per group: a power of two.
    const int lanes = 1 << (31 - __clz(kWarp / groups));
    const int group = lane_ / lanes;
    float first = -INFINITY, second = -INFINITY;
    if (group < groups) {
      for (int i = lane_ % lanes; i < size; i += lanes) {
        const float value = values_[group * size + i];
        if (value > first) {
          second = first;
          first = value;
        } else if (value > second) {
          second = value;
        }
      }
    }
    for (int distance = 1; distance < lanes; distance *= 2) {
      const float other_first = __shfl_xor_sync(~0u, first, distance);
      const float other_second = __shfl_xor_sync(~0u, second, distance);
      second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
      first = fmaxf(first, other_first);
    }
    uint32_t key = 0, kept = 0;
    if (group < groups && lane_ % lanes == 0) key = order_key(sigmoid ? first + second : first);
    for (int i = 0; i < options_.groups_per_token; ++i) {
      const uint32_t best = __reduce_max_sync(~0u, key);
      const int best_lane = __ffs(__ballot_sync(~0u, key == best)) - 1;
      kept |= 1u << (best_lane / lanes);
      if (lane_ == best_lane) key = 0;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (!has(j) || kept >> ((lane_ + j * kWarp) / size) & 1) continue;
      // V3's can never be selected. V2 keeps them as candidates, with score 0.
      if (!sigmoid) scores_[j] = 0;
      keys_[j] = sigmoid ? 0 : order_key(0);
    }
  }

  __device__ __forceinline__ void choose(int32_t* ids, float* weights) {
    const int k = static_cast<int>(options_.experts_per_token);
    const bool sigmoid = options_.scoring == GateScoring::kSigmoidBias;
    __syncwarp();  // the groups' scores have been written
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) values_[lane_ + j * kWarp] = scores_[j];
    }
    __syncwarp();
    int own_id = 0;
    float own_weight = 0, sum = 0;
    for (int i = 0; i < k; ++i) {
      uint32_t key = keys_[0];
      int at = 0;
#pragma unroll
      for (int j = 1; j < kPerLane; ++j) {
        if (keys_[j] > key) {
          key = keys_[j];
          at = j;
        }
      }
      const uint32_t best = __reduce_max_sync(~0u, key);
      const uint32_t id =
          __reduce_min_sync(~0u, key == best ? static_cast<uint32_t>(lane_ + at * kWarp) : ~0u);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        keys_[j] = id == static_cast<uint32_t>(lane_ + j * kWarp) ? 0 : keys_[j];
      }
      const float weight = values_[id];
      sum += weight;
      if (lane_ == i) {
        own_id = static_cast<int>(id);
        own_weight = weight;
      }
    }
    if (lane_ >= k) return;
    // V2's code normalises only for k > 1, and does not scale then.
    const bool normalize = options_.normalize && (sigmoid || k > 1);
    if (normalize) own_weight /= sum + 1e-20f;
    if (sigmoid || !normalize) own_weight *= options_.scaling;
    ids[lane_] = own_id;
    weights[lane_] = own_weight;
  }

  const GateOptions& options_;
  const int experts_;
  float* const values_;
  const int lane_;
  float scores_[kPerLane];
  uint32_t keys_[kPerLane];
};

}  // namespace fathom::cuda
