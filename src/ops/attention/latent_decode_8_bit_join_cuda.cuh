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

// Four values of two rows (x and z: the first; y and w: the second), the rows' largest weights, and
// the sums of 2^(weight - largest).
struct ExactValues {
  float4 value = {0, 0, 0, 0};
  float2 largest = {-1e30f, -1e30f};
  float2 sum = {0, 0};

  // Makes room for a larger weight.
  __device__ void raise(float2 to) {
    const float a = exp2_fast(largest.x - to.x), b = exp2_fast(largest.y - to.y);
    largest = to;
    sum.x *= a, value.x *= a, value.z *= a;
    sum.y *= b, value.y *= b, value.w *= b;
  }
  __device__ void add(float4 other, float2 weight, float2 count) {
    const float a = exp2_fast(weight.x - largest.x), b = exp2_fast(weight.y - largest.y);
    sum.x += a * count.x, value.x += a * other.x, value.z += a * other.z;
    sum.y += b * count.y, value.y += b * other.y, value.w += b * other.w;
  }
};

__device__ inline bool is_absent(float word) { return __float_as_uint(word) == 0x80000000u; }
__device__ inline bool is_absent(float2 v) { return is_absent(v.x) || is_absent(v.y); }
__device__ inline bool is_absent(float4 v) {
  return is_absent(v.x) || is_absent(v.y) || is_absent(v.z) || is_absent(v.w);
}

// How a part's results lie in scratch memory, in vectors of four words: Layout has
//   kRows, kThreads (of the block), kBarrier (a named barrier that all of them may use),
//   kVectors (512 * kRows / 4), row_of(vector), column_of(vector): of its x,
//   kSecondRow, kSecondColumn: how much further its y and its z are,
//   weight_at(vector): where the weights of its two rows lie among the kRows of a part.
template <typename Layout>
class ExactShare {
 public:
  static constexpr int kRows = Layout::kRows, kThreads = Layout::kThreads,
                       kVectors = Layout::kVectors;
  static constexpr int64_t kLatent = 512;
  static constexpr float kAbsent = -0.0f;

  // sums: the row tile's first part's vectors, parts are `part_words` apart; weights: those that
  // this block reads, of part s at s * num_splits * `weight_words`. out: the tile's first row.
  // exchange: kThreads of them in shared memory.
  __device__ ExactShare(const LatentDecodePart& part, int rows, float* sums, int64_t part_words,
                        float* weights, int64_t weight_words, __nv_bfloat16* out,
                        ExactValues* exchange)
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
    if (vectors >= kThreads) {
      // Many vectors, few parts: a thread joins all parts of its vectors.
      if (splits_ > 2) {
        for (int v = begin_ + thread; v < end_; v += kThreads) gather<1, 8>(v, 0, 1);
      } else {
        for (int v = begin_ + thread; v < end_; v += 4 * kThreads) gather<4, 2>(v, 0, 1);
      }
    } else {
      // Few vectors, many parts: several threads share a vector.
      const int sharers = min(splits_, kThreads / vectors);
      if (thread < vectors * sharers) {
        gather<1, 8>(begin_ + thread % vectors, thread / vectors, sharers);
      }
      named_barrier(Layout::kBarrier, kThreads);
      if (thread < vectors) {
        ExactValues total = exchange_[thread];
        for (int other = 1; other < sharers; ++other) {
          const ExactValues more = exchange_[thread + other * vectors];
          total.raise(make_float2(fmaxf(total.largest.x, more.largest.x),
                                  fmaxf(total.largest.y, more.largest.y)));
          total.add(more.value, more.largest, more.sum);
        }
        write(begin_ + thread, total);
      }
    }
    named_barrier(Layout::kBarrier, kThreads);  // all have read the weights
    take_back_weights();
  }

 private:
  // The next launch finds them absent. This share may need few of the rows: a weight that nobody
  // has waited for may still be on its way.
  __device__ void take_back_weights() const {
    constexpr int kAtOnce = 8;
    const int count = splits_ * kRows;
    for (int first = threadIdx.x; first < count; first += kAtOnce * kThreads) {
      float word[kAtOnce];
      const auto each = [&](auto visit) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = first + k * kThreads;
          if (i < count) visit(k, weights_of(i / kRows) + i % kRows);
        }
      };
      each([&](int k, const float* at) { word[k] = load_shared_word(at); });
      for (bool waiting = true; waiting;) {
        waiting = false;
        each([&](int k, const float* at) {
          if (!is_absent(word[k])) return;
          word[k] = load_shared_word(at);
          waiting = true;
        });
      }
      each([&](int, float* at) { store_shared_word(at, kAbsent); });
    }
  }
  __device__ float* vector_of(int split, int vector) const {
    return sums_ + split * part_words_ + vector * 4;
  }
  __device__ float* weights_of(int split) const { return weights_ + split * weight_stride_; }

  // Of kVectorsAtOnce vectors, kThreads apart, every `sharers`-th part from the first, kPartsAtOnce
  // at a time: all that is absent is asked for together until it is there.
  template <int kVectorsAtOnce, int kPartsAtOnce>
  __device__ void gather(int vector, int first, int sharers) {
    ExactValues joined[kVectorsAtOnce];
    for (int split = first; split < splits_; split += kPartsAtOnce * sharers) {
      float4 value[kVectorsAtOnce][kPartsAtOnce];
      float2 weight[kVectorsAtOnce][kPartsAtOnce];
      const auto each = [&](auto visit) {
#pragma unroll
        for (int v = 0; v < kVectorsAtOnce; ++v) {
#pragma unroll
          for (int s = 0; s < kPartsAtOnce; ++s) {
            visit(v, s, vector + v * kThreads, split + s * sharers);
          }
        }
      };
      each([&](int v, int s, int at, int part) {
        const bool exists = at < end_ && part < splits_;
        value[v][s] = exists ? load_shared_words4(vector_of(part, at)) : make_float4(0, 0, 0, 0);
        weight[v][s] = exists ? load_shared_words2(weights_of(part) + Layout::weight_at(at))
                              : make_float2(-1e30f, -1e30f);
      });
      for (bool waiting = true; waiting;) {
        waiting = false;
        each([&](int v, int s, int at, int part) {
          if (is_absent(value[v][s])) {
            value[v][s] = load_shared_words4(vector_of(part, at));
            waiting = true;
          }
          if (is_absent(weight[v][s])) {
            weight[v][s] = load_shared_words2(weights_of(part) + Layout::weight_at(at));
            waiting = true;
          }
        });
      }
#pragma unroll
      for (int v = 0; v < kVectorsAtOnce; ++v) {
        float2 largest = joined[v].largest;
#pragma unroll
        for (int s = 0; s < kPartsAtOnce; ++s) {
          largest = make_float2(fmaxf(largest.x, weight[v][s].x), fmaxf(largest.y, weight[v][s].y));
        }
        joined[v].raise(largest);
      }
      each([&](int v, int s, int at, int part) {
        if (at >= end_ || part >= splits_) return;
        joined[v].add(value[v][s], weight[v][s], make_float2(1, 1));
        // Nobody else reads this vector: the next launch finds it absent.
        store_shared_words(vector_of(part, at), make_float4(kAbsent, kAbsent, kAbsent, kAbsent));
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

  __device__ void write(int vector, const ExactValues& joined) const {
    const int row = Layout::row_of(vector);
    __nv_bfloat16* out = out_ + row * kLatent + Layout::column_of(vector);
    const float a = 1 / joined.sum.x, b = 1 / joined.sum.y;
    if (row < rows_) {
      out[0] = __float2bfloat16(joined.value.x * a);
      out[Layout::kSecondColumn] = __float2bfloat16(joined.value.z * a);
    }
    if (row + Layout::kSecondRow < rows_) {
      out += Layout::kSecondRow * kLatent;
      out[0] = __float2bfloat16(joined.value.y * b);
      out[Layout::kSecondColumn] = __float2bfloat16(joined.value.w * b);
    }
  }

  const int rows_, splits_, begin_, end_;
  float* sums_;
  const int64_t part_words_;
  float* weights_;
  const int64_t weight_stride_;
  __nv_bfloat16* out_;
  ExactValues* exchange_;
};

}  // namespace fathom::cuda
