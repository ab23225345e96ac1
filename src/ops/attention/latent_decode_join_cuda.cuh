// The joining of a row tile's parts within the launch that computes them: each block computes an
// equal share of the output from all parts, waiting on the data words themselves. Scratch memory
// holds -0 in every word that is not there yet, and is left so.
//
// Source: joining by log-sum-exp from FlashDecoding (Dao et al., 2023); data words as flags from
// NCCL's LL protocol.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/ptx.cuh"
#include "ops/attention/latent_decode_plan.h"

namespace fathom::cuda {

// Parts have their values in bf16, in vectors of four words: x and z are pairs of neighbouring
// columns of one row, y and w the same columns of another. The rows' largest weights, and the sums
// of 2^(weight - largest).
struct JoinedValues {
  float2 value[4] = {};
  float2 largest = {-1e30f, -1e30f};
  float2 sum = {0, 0};

  // Makes room for a larger weight.
  __device__ void raise(float2 to) {
    scale(exp2_fast(largest.x - to.x), exp2_fast(largest.y - to.y));
    largest = to;
  }
  __device__ void add(uint4 words, float2 weight) {
    const float a = exp2_fast(weight.x - largest.x), b = exp2_fast(weight.y - largest.y);
    sum.x += a, sum.y += b;
    add_pair(value[0], words.x, a), add_pair(value[1], words.y, b);
    add_pair(value[2], words.z, a), add_pair(value[3], words.w, b);
  }
  __device__ void add(JoinedValues other) {
    const float2 most = {fmaxf(largest.x, other.largest.x), fmaxf(largest.y, other.largest.y)};
    raise(most);
    other.raise(most);
    sum.x += other.sum.x, sum.y += other.sum.y;
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i].x += other.value[i].x, value[i].y += other.value[i].y;
  }
  // The row's values; of the second pair of columns.
  __device__ uint32_t packed(bool second_row, bool second_columns) const {
    const float inverse = 1 / (second_row ? sum.y : sum.x);
    const float2 pair = value[2 * second_columns + second_row];
    return pack_bf16(pair.x * inverse, pair.y * inverse);
  }

 private:
  __device__ void scale(float a, float b) {
    sum.x *= a, sum.y *= b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[i].x *= i % 2 ? b : a;
      value[i].y *= i % 2 ? b : a;
    }
  }
  __device__ static void add_pair(float2& to, uint32_t pair, float factor) {
    to.x += factor * __uint_as_float(pair << 16);
    to.y += factor * __uint_as_float(pair & 0xFFFF0000u);
  }
};

constexpr uint32_t kAbsentWord = 0x80000000u;  // -0

// Of two values, never absent: -0 in the upper half would be a value too small for bf16.
__device__ inline float present_pair(float a, float b) {
  const uint32_t word = pack_bf16(a, b);
  return __uint_as_float(word == kAbsentWord ? 0 : word);
}

__device__ inline bool is_absent(float word) { return __float_as_uint(word) == kAbsentWord; }
__device__ inline bool is_absent(float2 v) { return is_absent(v.x) || is_absent(v.y); }
__device__ inline bool is_absent(float4 v) {
  return is_absent(v.x) || is_absent(v.y) || is_absent(v.z) || is_absent(v.w);
}

// How a part's results lie in scratch memory, in vectors: Layout has
//   kRows, kThreads (of the block), kBarrier (a named barrier that all of them may use),
//   kVectors (512 * kRows / 8), row_of(vector), column_of(vector): of its x,
//   kSecondRow, kSecondColumns: how much further its y and its z are (vectors that are kThreads
//   apart have the same rows),
//   weight_at(vector): where the weights of its two rows lie among the kRows of a part.
template <typename Layout>
class JoinedShare {
 public:
  static constexpr int kRows = Layout::kRows, kThreads = Layout::kThreads,
                       kVectors = Layout::kVectors;
  static constexpr int64_t kLatent = 512;

  // sums: the row tile's first part's vectors, parts are `part_words` apart; weights: those that
  // this block reads, of part s at s * num_splits * `weight_words`. out: the tile's first row.
  // exchange: kThreads of them in shared memory.
  __device__ JoinedShare(const LatentDecodePart& part, int rows, float* sums, int64_t part_words,
                         float* weights, int64_t weight_words, __nv_bfloat16* out,
                         JoinedValues* exchange)
      : rows_(rows),
        splits_(part.num_splits),
        begin_(kVectors * part.split / splits_),
        end_(kVectors * (part.split + 1) / splits_),
        sums_(sums),
        part_words_(part_words),
        weights_(weights),
        weight_stride_(weight_words * splits_),
        out_(out),
        exchange_(exchange) {}

  __device__ void run() {
    const int vectors = end_ - begin_, thread = threadIdx.x;
    float first_weights[kWeightsAtOnce];
    load_weights(first_weights, thread);
    if (vectors >= kThreads) {
      // Many vectors, few parts: a thread joins all parts of its vectors.
      if (splits_ > 4) {
        gather_all<2, 8>();
      } else if (splits_ > 2) {
        gather_all<4, 4>();
      } else {
        gather_all<4, 2>();
      }
    } else {
      // Few vectors, many parts: several threads share a vector.
      const int sharers = min(splits_, kThreads / vectors);
      if (thread < vectors * sharers) {
        gather<1, 8>(begin_ + thread % vectors, thread / vectors, sharers);
      }
      named_barrier(Layout::kBarrier, kThreads);
      if (thread < vectors) {
        JoinedValues total = exchange_[thread];
        for (int other = 1; other < sharers; ++other)
          total.add(exchange_[thread + other * vectors]);
        write(begin_ + thread, total);
      }
    }
    named_barrier(Layout::kBarrier, kThreads);  // all have read the weights
    take_back_weights(first_weights, thread);
    for (int i = thread + kWeightsAtOnce * kThreads; i < splits_ * kRows;
         i += kWeightsAtOnce * kThreads) {
      load_weights(first_weights, i);
      take_back_weights(first_weights, i);
    }
  }

 private:
  static constexpr int kWeightsAtOnce = 4;

  template <typename Visit>
  __device__ void for_weights(int first, Visit&& visit) const {
#pragma unroll
    for (int k = 0; k < kWeightsAtOnce; ++k) {
      const int i = first + k * kThreads;
      if (i < splits_ * kRows) visit(k, weights_of(i / kRows) + i % kRows);
    }
  }
  __device__ void load_weights(float (&words)[kWeightsAtOnce], int first) const {
    for_weights(first, [&](int k, const float* at) { words[k] = load_shared_word(at); });
  }
  // The next launch finds them absent. This share may need few of the rows: a weight that nobody
  // has waited for may still be on its way.
  __device__ void take_back_weights(float (&words)[kWeightsAtOnce], int first) const {
    for (bool waiting = true; waiting;) {
      waiting = false;
      for_weights(first, [&](int k, const float* at) {
        if (!is_absent(words[k])) return;
        words[k] = load_shared_word(at);
        waiting = true;
      });
    }
    for_weights(first, [&](int, float* at) { store_shared_word(at, absent()); });
  }

  __device__ static float absent() { return __uint_as_float(kAbsentWord); }
  __device__ float* vector_of(int split, int vector) const {
    return sums_ + split * part_words_ + vector * 4;
  }
  __device__ float* weights_of(int split) const { return weights_ + split * weight_stride_; }

  template <int kVectorsAtOnce, int kPartsAtOnce>
  __device__ void gather_all() {
    for (int v = begin_ + threadIdx.x; v < end_; v += kVectorsAtOnce * kThreads) {
      gather<kVectorsAtOnce, kPartsAtOnce>(v, 0, 1);
    }
  }

  // Of kVectorsAtOnce vectors of the same rows, kThreads apart, every `sharers`-th part from the
  // first, kPartsAtOnce at a time: all that is absent is asked for together until it is there.
  template <int kVectorsAtOnce, int kPartsAtOnce>
  __device__ void gather(int vector, int first, int sharers) {
    JoinedValues joined[kVectorsAtOnce];
    for (int split = first; split < splits_; split += kPartsAtOnce * sharers) {
      float4 value[kVectorsAtOnce][kPartsAtOnce];
      float2 weight[kPartsAtOnce];
      const auto each_part = [&](auto visit) {
#pragma unroll
        for (int s = 0; s < kPartsAtOnce; ++s) visit(s, split + s * sharers);
      };
      const auto each = [&](auto visit) {
#pragma unroll
        for (int v = 0; v < kVectorsAtOnce; ++v) {
          each_part([&](int s, int part) { visit(v, s, vector + v * kThreads, part); });
        }
      };
      const auto weights_at = [&](int part) {
        return weights_of(part) + Layout::weight_at(vector);
      };
      each([&](int v, int s, int at, int part) {
        value[v][s] = at < end_ && part < splits_ ? load_shared_words4(vector_of(part, at))
                                                  : make_float4(0, 0, 0, 0);
      });
      each_part([&](int s, int part) {
        weight[s] =
            part < splits_ ? load_shared_words2(weights_at(part)) : make_float2(-1e30f, -1e30f);
      });
      for (bool waiting = true; waiting;) {
        waiting = false;
        each([&](int v, int s, int at, int part) {
          if (!is_absent(value[v][s])) return;
          value[v][s] = load_shared_words4(vector_of(part, at));
          waiting = true;
        });
        each_part([&](int s, int part) {
          if (!is_absent(weight[s])) return;
          weight[s] = load_shared_words2(weights_at(part));
          waiting = true;
        });
      }
      float2 largest = joined[0].largest;
#pragma unroll
      for (int s = 0; s < kPartsAtOnce; ++s) {
        largest = make_float2(fmaxf(largest.x, weight[s].x), fmaxf(largest.y, weight[s].y));
      }
#pragma unroll
      for (int v = 0; v < kVectorsAtOnce; ++v) joined[v].raise(largest);
      each([&](int v, int s, int at, int part) {
        if (at >= end_ || part >= splits_) return;
        const float4 words = value[v][s];
        joined[v].add(make_uint4(__float_as_uint(words.x), __float_as_uint(words.y),
                                 __float_as_uint(words.z), __float_as_uint(words.w)),
                      weight[s]);
        // Nobody else reads this vector: the next launch finds it absent.
        store_shared_words(vector_of(part, at),
                           make_float4(absent(), absent(), absent(), absent()));
      });
    }
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      if (vector + v * kThreads >= end_) break;
      if (end_ - begin_ < kThreads) {
        exchange_[threadIdx.x] = joined[v];
      } else {
        write(vector + v * kThreads, joined[v]);
      }
    }
  }

  __device__ void write(int vector, const JoinedValues& joined) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Layout::row_of(vector) + (i % 2) * Layout::kSecondRow;
      const int column = Layout::column_of(vector) + i / 2 * Layout::kSecondColumns;
      if (row < rows_) {
        *reinterpret_cast<uint32_t*>(out_ + row * kLatent + column) = joined.packed(i % 2, i / 2);
      }
    }
  }

  const int rows_, splits_, begin_, end_;
  float* sums_;
  const int64_t part_words_;
  float* weights_;
  const int64_t weight_stride_;
  __nv_bfloat16* out_;
  JoinedValues* exchange_;
};

}  // namespace fathom::cuda
