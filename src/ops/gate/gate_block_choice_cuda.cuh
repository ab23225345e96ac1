// A CTA selects a token's experts by the rules of gate() (ops/gate/gate.h), for more experts than a
// warp handles quickly.
//
// Thread t has experts t and t + kChoiceThreads. Experts are ordered by a key, larger is better; 0
// means excluded. Selection has no serial loop: each warp ranks its own keys by counting the larger
// ones (in short loops: with one row the instruction cache is cold), its first k become candidates,
// and candidates are ranked in the same way. Where a warp's experts are a group (V3's 32), its
// first two give the group's score, so that groups and experts are selected after the same CTA
// barrier.
#pragma once

#include <cstdint>

#include "device/cuda/rows.cuh"
#include "ops/gate/gate_choice_cuda.cuh"
#include "ops/gate/gate_options.h"

namespace fathom::cuda {

inline constexpr int kChoiceThreads = 256, kChoiceWarps = kChoiceThreads / kWarp;

template <int kPerThread>
struct BlockChoiceMemory {
  float values[kPerThread * kChoiceThreads];  // logits, then selection scores of groups
  float scores[kPerThread * kChoiceThreads];  // for the expert weights
  float2 group_values[kChoiceWarps];          // where a warp is a group: its two best
  alignas(16) uint32_t keys[kChoiceWarps][kPerThread * kWarp];
  alignas(16) uint64_t
      first_keys[kChoiceWarps * kMostChosenExperts];  // key, complement of the expert's index
  uint32_t group_keys[kMostGateGroups];
  int32_t ids[kMostChosenExperts];
  float weights[kMostChosenExperts];
};

template <int kPerThread>
class BlockChoice {
 public:
  using Memory = BlockChoiceMemory<kPerThread>;

  // Loads the bias [experts] at once: no launch writes it. Null: none.
  __device__ BlockChoice(const GateOptions& options, int experts, const float* bias, Memory& memory)
      : options_(options),
        experts_(experts),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        memory_(memory) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      bias_[j] = 0;
      if (bias != nullptr && has(j)) bias_[j] = load_weight(bias + expert(j));
    }
  }

  __device__ int expert(int j) const { return static_cast<int>(threadIdx.x) + j * kChoiceThreads; }
  __device__ bool has(int j) const { return expert(j) < experts_; }

  // Called by all threads, each with its experts' logits. ids, weights [k] in device memory.
  __device__ __forceinline__ void run(const float (&logits)[kPerThread], int32_t* ids,
                                      float* weights) {
    if (options_.scoring == GateScoring::kSigmoidBias) {
      score_by_sigmoid(logits);
    } else {
      score_by_softmax(logits);
    }
    const bool grouped = options_.scoring != GateScoring::kSoftmaxGreedy && options_.num_groups > 1;
    const bool warps_are_groups = grouped && kPerThread == 1 &&
                                  options_.scoring == GateScoring::kSigmoidBias &&
                                  experts_ == options_.num_groups * kWarp;
    if (grouped && !warps_are_groups) drop_groups();
    choose(warps_are_groups);
    write(ids, weights);
  }

 private:
  __device__ static float load_weight(const float* from) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
  }

  __device__ void score_by_sigmoid(const float (&logits)[kPerThread]) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      keys_[j] = 0;
      if (!has(j)) continue;
      const float score = 1 / (1 + expf(-logits[j])), choice = score + bias_[j];
      memory_.scores[expert(j)] = score;
      memory_.values[expert(j)] = choice;
      keys_[j] = order_key(choice);
    }
  }

  // A bit for each warp (a group of experts) that is kept.
  __device__ uint32_t kept_warps() const {
    const int groups = static_cast<int>(options_.num_groups);
    const float2 best = memory_.group_values[lane_ % kChoiceWarps];
    const uint32_t key = lane_ < groups ? order_key(best.x + best.y) : 0;
    int better = 0;
#pragma unroll
    for (int group = 0; group < kChoiceWarps; ++group) {
      const uint32_t other = __shfl_sync(~0u, key, group);
      better += (other > key) | ((other == key) & (group < lane_));
    }
    return __ballot_sync(~0u, lane_ < groups && better < options_.groups_per_token);
  }

  // Every warp computes the sum over all experts.
  __device__ void score_by_softmax(const float (&logits)[kPerThread]) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (has(j)) memory_.values[expert(j)] = logits[j];
    }
    __syncthreads();
    float most = -INFINITY, sum = 0;
    for (int i = lane_; i < experts_; i += kWarp) most = fmaxf(most, memory_.values[i]);
    most = warp_max(most);
    for (int i = lane_; i < experts_; i += kWarp) sum += expf(memory_.values[i] - most);
    sum = warp_sum(sum);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      keys_[j] = 0;
      if (!has(j)) continue;
      const float score = expf(logits[j] - most) / sum;
      memory_.scores[expert(j)] = score;
      memory_.values[expert(j)] = score;
      keys_[j] = order_key(score);
    }
  }

  // V2: a group's score is that of its best expert. V3: the sum of its best two.
  __device__ void drop_groups() {
    const bool sigmoid = options_.scoring == GateScoring::kSigmoidBias;
    const int groups = static_cast<int>(options_.num_groups), size = experts_ / groups;
    __syncthreads();  // all values have been written
    for (int group = warp_; group < groups; group += kChoiceWarps) {
      float first = -INFINITY, second = -INFINITY;
      for (int i = lane_; i < size; i += kWarp) {
        const float value = memory_.values[group * size + i];
        second = fmaxf(second, fminf(first, value));
        first = fmaxf(first, value);
      }
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const float other_first = __shfl_xor_sync(~0u, first, distance);
        const float other_second = __shfl_xor_sync(~0u, second, distance);
        second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
        first = fmaxf(first, other_first);
      }
      if (lane_ == 0) memory_.group_keys[group] = order_key(sigmoid ? first + second : first);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (!has(j)) continue;
      const int own = expert(j) / size;
      const uint32_t key = memory_.group_keys[own];
      int better = 0;
#pragma unroll 8
      for (int group = 0; group < groups; ++group) {
        const uint32_t other = memory_.group_keys[group];
        better += (other > key) | ((other == key) & (group < own));
      }
      if (better < options_.groups_per_token) continue;
      // V3's can never be selected. V2 keeps them as candidates, with score 0.
      if (!sigmoid) memory_.scores[expert(j)] = 0;
      keys_[j] = sigmoid ? 0 : order_key(0);
    }
  }

  __device__ void choose(bool warps_are_groups) {
    const int k = static_cast<int>(options_.experts_per_token);
    uint32_t* const keys = memory_.keys[warp_];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) keys[j * kWarp + lane_] = keys_[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int own = j * kWarp + lane_;
      int better = 0;  // of equals the lower index is
#pragma unroll
      for (int i = 0; i < kPerThread * kWarp; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
        better += (four.x > keys_[j]) | ((four.x == keys_[j]) & (i < own));
        better += (four.y > keys_[j]) | ((four.y == keys_[j]) & (i + 1 < own));
        better += (four.z > keys_[j]) | ((four.z == keys_[j]) & (i + 2 < own));
        better += (four.w > keys_[j]) | ((four.w == keys_[j]) & (i + 3 < own));
      }
      if (better < k) {
        memory_.first_keys[warp_ * k + better] =
            uint64_t{keys_[j]} << 32 | (~static_cast<uint32_t>(expert(j)));
      }
      if (warps_are_groups && better < 2) {
        const float value = has(j) ? memory_.values[expert(j)] : 0;
        (better == 0 ? memory_.group_values[warp_].x : memory_.group_values[warp_].y) =
            value == value ? value : -INFINITY;
      }
    }
    __syncthreads();
    const uint32_t kept = warps_are_groups ? kept_warps() : ~0u;
    // Threads per candidate: a power of two.
    const int count = kChoiceWarps * k, sharers = k <= 8 ? 4 : k <= 16 ? 2 : 1;
    const int candidate = static_cast<int>(threadIdx.x) / sharers;
    const auto id_of = [](uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); };
    const auto runs = [&](uint64_t key) { return kept >> (id_of(key) / kWarp % kChoiceWarps) & 1; };
    const uint64_t key = memory_.first_keys[min(candidate, count - 1)];
    int better = 0;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) % sharers; i < count; i += sharers) {
      const uint64_t other = memory_.first_keys[i];
      better += static_cast<int>(other > key) & static_cast<int>(runs(other));
    }
    for (int distance = 1; distance < sharers; distance *= 2) {
      better += __shfl_xor_sync(~0u, better, distance);
    }
    const bool chosen = (candidate < count) & runs(key) & (better < k);
    if (chosen && static_cast<int>(threadIdx.x) % sharers == 0) {
      const int id = id_of(key);
      memory_.ids[better] = id;
      memory_.weights[better] = memory_.scores[id];
    }
    __syncthreads();
  }

  __device__ void write(int32_t* ids, float* weights) const {
    const int k = static_cast<int>(options_.experts_per_token);
    if (static_cast<int>(threadIdx.x) >= k) return;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < k; ++i) sum += memory_.weights[i];
    float weight = memory_.weights[threadIdx.x];
    // V2's code normalises only for k > 1, and does not scale then.
    const bool sigmoid = options_.scoring == GateScoring::kSigmoidBias;
    const bool normalize = options_.normalize && (sigmoid || k > 1);
    if (normalize) weight /= sum + 1e-20f;
    if (sigmoid || !normalize) weight *= options_.scaling;
    ids[threadIdx.x] = memory_.ids[threadIdx.x];
    weights[threadIdx.x] = weight;
  }

  const GateOptions& options_;
  const int experts_, warp_, lane_;
  Memory& memory_;
  float bias_[kPerThread];
  uint32_t keys_[kPerThread];
};

}  // namespace fathom::cuda
