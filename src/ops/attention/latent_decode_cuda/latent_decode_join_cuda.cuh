// Combine of a row tile's splits within the launch that computes them: each CTA computes an equal
// share of the output from all splits, waiting on the data words themselves. Scratch memory holds
// -0 in every word that has not been written, and is left so. No counters, no fences; CTAs wait for
// one another, so all of them must be co-resident.
//
// This code runs once a launch, on one or two warps of each scheduler with a cold instruction
// cache: it is kept short, and the number of splits selects the variant.
//
// Source: combine by log-sum-exp from FlashDecoding (Dao et al., 2023); data words as flags from
// NCCL's LL protocol.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/ptx.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"

namespace fathom::cuda {

// Marks a scratch word that has not been written.
constexpr float kMissing = -0.0f;
__device__ inline bool is_missing(float word) { return __float_as_uint(word) == 0x80000000u; }
__device__ inline bool is_missing(float4 v) {
  return is_missing(v.x) || is_missing(v.y) || is_missing(v.z) || is_missing(v.w);
}

// Makes a word differ from the missing mark: adding +0 turns a weight's -0 into +0; in a pair of
// bf16, -0 in the upper half and +0 in the lower would be a value too small for bf16.
__device__ inline float present(float weight) { return weight + 0.0f; }
__device__ inline float present_pair(float low, float high) {
  const uint32_t word = pack_bf16(low, high);
  return __uint_as_float(word == 0x80000000u ? 0 : word);
}

// a / b rounded down, from 1 / b, for 0 <= a < 2^21: an integer division takes a hundred clocks.
__device__ inline int quotient(int a, float inverse_of_b) {
  return static_cast<int>((static_cast<float>(a) + 0.5f) * inverse_of_b);
}

// Combines a CTA's share. Partial results lie in scratch memory as vectors of four words of two
// bf16 values (rounded as the result is; fp32 takes twice the words, and longer). Layout has
//   kRows, kThreads (of the CTA, that combine), kBarrier (a named barrier for them),
//   kVectors (512 * kRows / 8), row_of(vector), column_of(vector): of its first value,
//   kPairColumn: column offset of a word's second value, kSecondRow: row offset of the second and
//   fourth word, kSecondColumn: column offset of the third and fourth,
//   weight_at(vector): where the weights of its two rows lie side by side among the kRows of a
//   split.
// A weight is log2 of the sum of the row's exponentials; each split stores its weights once for
// each CTA that reads them.
//
// A thread has every kThreads-th vector of the share; where the share has fewer vectors than there
// are threads, several threads divide the splits of one.
template <typename Layout>
class JoinedShare {
 public:
  static constexpr int kRows = Layout::kRows, kThreads = Layout::kThreads;
  static constexpr int kVectors = Layout::kVectors, kValues = 8;  // values of a vector
  static constexpr int64_t kLatent = 512;

  // Adjacent threads that compute a row's weights together.
  static constexpr int kRowThreads = kThreads / kRows;
  static constexpr int kWeights = kMostLatentDecodeBlocks / kRowThreads + 1;
  // Words from one split's factors to the next's, free of bank conflicts between a warp's rows.
  static constexpr int kStride = kRows + 32 / kRowThreads;

  struct Memory {
    alignas(16) float sums[kVectors / 2][kValues];    // [sharers, vectors of the share]
    float factors[kWeights * kRowThreads * kStride];  // [splits and zeros, kStride]
  };

  // sums: vectors of the row tile's first split, splits are `part_vectors` apart; weights: those
  // that this CTA reads, splits are `part_weights` apart. rows: of the tile, from `out` on.
  __device__ JoinedShare(const LatentDecodePart& part, int rows, float* sums, int part_vectors,
                         float* weights, int part_weights, __nv_bfloat16* out, Memory& memory)
      : rows_(rows),
        splits_(part.num_splits),
        begin_(quotient(kVectors * part.split, reciprocal_fast(splits_))),
        vectors_(quotient(kVectors * (part.split + 1), reciprocal_fast(splits_)) - begin_),
        sharers_(max(1, min(splits_, quotient(kThreads, reciprocal_fast(vectors_))))),
        sums_(sums + begin_ * 4),
        part_vectors_(part_vectors),
        weights_(weights),
        part_weights_(part_weights),
        out_(out),
        memory_(memory) {}

  __device__ void run() const {
    const int each = quotient(splits_ - 1, reciprocal_fast(sharers_)) + 1;  // splits of a thread
    if (each > 16) {
      gather<18, 1>();
    } else if (splits_ > 8) {
      gather<16, 1>();
    } else if (splits_ > 4) {
      gather<8, 2>();
    } else if (splits_ > 2) {
      gather<4, 4>();
    } else {
      gather<2, 8>();
    }
    named_barrier(Layout::kBarrier, kThreads);
    for (int v = threadIdx.x; v < vectors_; v += kThreads) {
      float total[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) total[i] = memory_.sums[v][i];
#pragma unroll 4
      for (int other = 1; other < sharers_; ++other) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) total[i] += memory_.sums[v + other * vectors_][i];
      }
      write(begin_ + v, total);
    }
  }

 private:
  // Loads kParts splits of kVectorsAtOnce vectors together and reloads the missing words until all
  // have arrived. Beyond the thread's last split it repeats that one with weight zero.
  template <int kParts, int kVectorsAtOnce>
  __device__ void gather() const {
    constexpr int kAtOnce = kParts * kVectorsAtOnce;
    const int thread = threadIdx.x;
    const int first = sharers_ > 1 ? quotient(thread, reciprocal_fast(vectors_)) : 0;
    const int last = first + quotient(splits_ - 1 - first, reciprocal_fast(sharers_)) * sharers_;
    int v = thread - first * vectors_;
    if (first >= sharers_) v = vectors_;
    bool begun = false;
    do {
      float sum[kVectorsAtOnce][kValues] = {};
      for (int s = first; s == first || s <= last; s += kParts * sharers_) {
        const auto exists = [&](int k) { return v + k / kParts * kThreads < vectors_; };
        const auto address = [&](int k) {
          const int part = min(s + k % kParts * sharers_, last);
          return sums_ + (part * part_vectors_ + v + k / kParts * kThreads) * 4;
        };
        float4 value[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          value[k] = make_float4(0, 0, 0, 0);
          if (exists(k)) value[k] = load_shared_words4(address(k));
        }
        if (!begun) find_factors();
        begun = true;
        for (bool waiting = true; waiting;) {
          waiting = false;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            if (!is_missing(value[k])) continue;
            value[k] = load_shared_words4(address(k));
            waiting = true;
          }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int part = s + k % kParts * sharers_;
          const int at = Layout::weight_at(begin_ + v + k / kParts * kThreads);
          const float2 factor = *reinterpret_cast<const float2*>(
              memory_.factors + (part <= last ? part : splits_) * kStride + at);
          add(sum[k / kParts], value[k], factor);
          // This thread is the only reader of the vector: it resets it to missing for the next
          // launch.
          if (exists(k)) {
            store_shared_words(address(k), make_float4(kMissing, kMissing, kMissing, kMissing));
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kVectorsAtOnce; ++k) {
        if (v + k * kThreads >= vectors_) continue;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          memory_.sums[first * vectors_ + v + k * kThreads][i] = sum[k][i];
        }
      }
      v += kVectorsAtOnce * kThreads;
    } while (v < vectors_);
  }

  // For each split and row, 2^(weight - largest) over the sum of these; zeros for splits beyond the
  // last. Collective.
  __device__ void find_factors() const {
    constexpr int kFew = 2, kSome = kWeights / 2 + 1;
    if (splits_ < kFew * kRowThreads) {
      find_factors<kFew>();
    } else if (splits_ < kSome * kRowThreads) {
      find_factors<kSome>();
    } else {
      find_factors<kWeights>();
    }
    named_barrier(Layout::kBarrier, kThreads);
  }

  // Requires fewer than kCount * kRowThreads splits.
  template <int kCount>
  __device__ void find_factors() const {
    const int row = threadIdx.x / kRowThreads, first = threadIdx.x % kRowThreads;
    const auto address = [&](int k) {
      return weights_ + (first + k * kRowThreads) * part_weights_ + row;
    };
    float word[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      word[k] = -INFINITY;
      if (first + k * kRowThreads < splits_) word[k] = load_shared_word(address(k));
    }
    for (bool waiting = true; waiting;) {
      waiting = false;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (!is_missing(word[k])) continue;
        word[k] = load_shared_word(address(k));
        waiting = true;
      }
    }
    float largest = -1e30f, sum = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (first + k * kRowThreads < splits_) store_shared_word(address(k), kMissing);
      largest = fmaxf(largest, word[k]);
    }
#pragma unroll
    for (int distance = 1; distance < kRowThreads; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      word[k] = exp2_fast(word[k] - largest);
      sum += word[k];
    }
#pragma unroll
    for (int distance = 1; distance < kRowThreads; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    const float inverse = reciprocal_fast(sum);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      memory_.factors[(first + k * kRowThreads) * kStride + row] = word[k] * inverse;
    }
  }

  __device__ static void add(float (&sum)[kValues], float4 words, float2 factor) {
    add_pair(sum[0], sum[1], words.x, factor.x);
    add_pair(sum[2], sum[3], words.y, factor.y);
    add_pair(sum[4], sum[5], words.z, factor.x);
    add_pair(sum[6], sum[7], words.w, factor.y);
  }
  __device__ static void add_pair(float& low, float& high, float word, float factor) {
    low += factor * __uint_as_float(__float_as_uint(word) << 16);
    high += factor * __uint_as_float(__float_as_uint(word) & 0xFFFF0000u);
  }

  __device__ void write(int vector, const float (&value)[kValues]) const {
    const int first_row = Layout::row_of(vector), first_column = Layout::column_of(vector);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int row = first_row + word % 2 * Layout::kSecondRow;
      if (row >= rows_) continue;
      __nv_bfloat16* const to =
          out_ + row * kLatent + first_column + word / 2 * Layout::kSecondColumn;
      if constexpr (Layout::kPairColumn == 1) {
        *reinterpret_cast<uint32_t*>(to) = pack_bf16(value[2 * word], value[2 * word + 1]);
      } else {
        to[0] = __float2bfloat16(value[2 * word]);
        to[Layout::kPairColumn] = __float2bfloat16(value[2 * word + 1]);
      }
    }
  }

  const int rows_, splits_, begin_, vectors_, sharers_;
  float* const sums_;
  const int part_vectors_;
  float* const weights_;
  const int part_weights_;
  __nv_bfloat16* const out_;
  Memory& memory_;
};

}  // namespace fathom::cuda
