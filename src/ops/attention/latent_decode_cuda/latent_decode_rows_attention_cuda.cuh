// Attention over one split by a consumer warpgroup, and the scratch layout of its results: shared
// by the kernels over a sequence's pages (latent_decode_rows_cuda.cu, which describes the
// algorithm) and over chosen keys (ops/attention/sparse_latent_cuda).
#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_rows_memory_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_keys.h"
#include "ops/attention/latent_decode_cuda/score_reference_cuda.cuh"

namespace fathom::cuda::latent_rows {

// ---- scratch layout of a split's results: as in the threads' registers

struct ShareLayout {
  static constexpr int kRows = latent_rows::kRows, kThreads = kGroups * kGroupThreads;
  static constexpr int kBarrier = kBothGroups;
  static constexpr int kVectors = kLatent * kRows / 8, kGroupVectors = kVectors / kGroups;
  static constexpr int kPairColumn = 1, kSecondRow = 8, kSecondColumn = 8;

  __device__ static int row_of(int vector) {
    const int thread = vector % kGroupThreads;
    return thread / 32 * 16 + thread % 32 / 4;
  }
  __device__ static int column_of(int vector) {
    const int within = vector % kGroupVectors;
    return vector / kGroupVectors * (kLatent / kGroups) + within / kGroupThreads * 16 +
           2 * (vector % 4);
  }
  // Rows r and r + 8 are adjacent.
  __device__ static int weight_at(int vector) {
    const int thread = vector % kGroupThreads;
    return thread / 32 * 16 + thread % 32 / 4 * 2;
  }
  __device__ static int row_of_weight(int at) {
    return at / 16 * 16 + at % 16 / 2 + at % 2 * kSecondRow;
  }
};

// ---- attention over one split: warpgroup kGroup, which has latent columns 256 * kGroup …
//
// A thread has two rows of each accumulator, 16 * warp + lane / 4 and 8 more: element j belongs to
// row h = j / 2 % 2 of them and to column 8 * (j / 4) + 2 * (lane % 4) + j % 2.

// A row's scores may exceed its reference by this power of two before its sums are rescaled: few
// rows need that after their first pages. bf16 and fp32 have the range.
constexpr float kSlack = 8;

// Pages arrive by TMA, listed keys by cp.async, zero-filled beyond the last.
template <int kGroup, LatentKeys kKeysFrom = LatentKeys::kPages>
class Attention {
 public:
  __device__ Attention(SharedMemory& shared, const Arguments& arguments, int rank)
      : shared_(shared),
        arguments_(arguments),
        rank_(rank),
        thread_(threadIdx.x % kGroupThreads),
        lane_(threadIdx.x % 32),
        first_row_(thread_ / 32 * 16 + lane_ / 4),
        queries_(swizzled_matrix(shared_address(shared.queries), kGroupBytes)),
        keys_(swizzled_matrix(shared_address(shared.pages[kGroup]), kGroupBytes)),
        values_(swizzled_boxes(shared_address(shared.pages) + kGroup * kHalfBoxes * kBoxBytes,
                               kBoxBytes)),
        probabilities_(swizzled_matrix(shared_address(shared.probabilities), kGroupBytes)) {}

  __device__ void run(const LatentDecodePart& part) {
    const int pages = __shfl_sync(~0u, part.num_tiles, 0);
    if (pages == 0) return;
    begin(part);
    if constexpr (kGroup == 0) {
      run_even_pages(pages);
    } else {
      run_odd_pages(pages);
    }
    uses_[0] += (pages + 1) / 2;
    uses_[1] += pages / 2;
    end(part);
    ++parts_;
  }

  // Writes the last split's natural logarithms of rows' sums of exponentials, after run(). The
  // warpgroup's first threads have a row each.
  __device__ void write_lse(float* lse, int rows) const {
    if (thread_ >= min(rows, kRows)) return;
    constexpr float kLn2 = 0.6931471805599453f;
    const int last = (parts_ - 1) & 1;
    const float sum = shared_.sums[last][0][thread_] + shared_.sums[last][1][thread_];
    lse[thread_] =
        fmaf(shared_.references[last][thread_], arguments_.scale_log2, log2_fast(sum)) * kLn2;
  }

 private:
  static constexpr int kElements = 32, kOutElements = 128;

  __device__ void begin(const LatentDecodePart& part) {
    const int first_key = part.first_tile * kKeys;
    valid_ = part.kv_len - first_key;
    const int first_limit = valid_ - part.num_queries + 1;  // of the first new token
    unmasked_ = first_limit / kKeys;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = part.first_row + rank_ * kRows + first_row_ + 8 * h;
      // Relative to the thread's first column.
      visible_[h] = first_limit + row / arguments_.heads - 2 * (lane_ % 4);
      reference_[h] = kNoReference;
      sum_[h] = 0;
    }
  }

  // Schedule of warpgroup 0.
  __device__ void run_even_pages(int pages) {
    for (int page = 0; page < pages; page += 2) {
      float scores[kElements];
      multiply_queries(page, scores, [] {});
      mma_commit();
      if (page > 0) {
        multiply_others_values(page - 1);
        mma_wait<1>();
      } else {
        mma_wait();
      }
      pin(scores);
      if (page + 2 >= pages) has_read(&shared_.queries_read);
      float factor[2];
      uint32_t packed[kElements / 2];
      soften(page, scores, factor, packed);
      mma_wait();
      pin(out_);
      if (page > 0) has_read(&shared_.read[1][1]);
      publish(packed);
      multiply_own_values(page, factor, packed);
    }
    if (pages % 2 == 0) {
      multiply_others_values(pages - 1);
      mma_wait();
      pin(out_);
      has_read(&shared_.read[1][1]);
    }
  }

  // Schedule of warpgroup 1.
  __device__ void run_odd_pages(int pages) {
    for (int page = 1; page < pages; page += 2) {
      multiply_others_values(page - 1);
      float scores[kElements];
      multiply_queries(page, scores, [&] {
        mma_commit();
        mma_wait<1>();
        has_read(&shared_.read[0][1]);
      });
      mma_commit();
      mma_wait();
      pin(scores);
      pin(out_);
      if (page + 2 >= pages) has_read(&shared_.queries_read);
      float factor[2];
      uint32_t packed[kElements / 2];
      soften(page, scores, factor, packed);
      publish(packed);
      multiply_own_values(page, factor, packed);
    }
    if (pages % 2 == 1) {
      multiply_others_values(pages - 1);
      // It has read none; but the producer has looked at the previous turn only now.
      if (pages == 1) has_read(&shared_.queries_read);
      mma_wait();
      pin(out_);
      has_read(&shared_.read[0][1]);
    }
  }

  // Issues the scores GEMM of the queries with a page of this warpgroup's; calls after_first() once
  // its first box has been issued.
  template <typename AfterFirst>
  __device__ void multiply_queries(int page, float (&scores)[kElements], AfterFirst&& after_first) {
    const int parity = (uses_[kGroup] + page / 2) & 1;
    if constexpr (kKeysFrom == LatentKeys::kPages) {
      if (valid_ - page * kKeys < kKeys) clear_beyond(parity, valid_ - page * kKeys);
    }
    const bool first = page < 2;
    mma_fence();
#pragma unroll
    for (int arrival = 0; arrival < kArrivals; ++arrival) {
      if (first) barrier_wait(&shared_.queries_arrived[query_arrival(arrival)], parts_ & 1);
      barrier_wait(&shared_.arrived[kGroup][arrival], parity);
      // cp.async writes through the generic proxy. The other warpgroup is told by published[].
      if constexpr (kKeysFrom == LatentKeys::kListed) fence_async_proxy();
#pragma unroll
      for (int i = 0; i < boxes_of(arrival); ++i) {
        const int at = box_of(kGroup, arrival, i) * kBoxBytes;
#pragma unroll
        for (int k = 0; k < kBoxColumns / kK; ++k) {
          mma_64(scores, moved(queries_, at + k * 32), moved(keys_, at + k * 32),
                 arrival + k > 0 ? 1 : 0);
        }
      }
      if (arrival == 0) after_first();
    }
  }
  // Queries are loaded in the order of the first page's boxes.
  __device__ static constexpr int query_arrival(int arrival) {
    return arrival == 0 || kGroup == 0 ? arrival : (arrival - 1 + 2) % 4 + 1;
  }

  // Rows of a page past the sequence's end may hold anything, including NaN, which a zero
  // probability does not cancel.
  __device__ void clear_beyond(int parity, int valid) {
    for (int arrival = 0; arrival < kArrivals; ++arrival) {
      barrier_wait(&shared_.arrived[kGroup][arrival], parity);
    }
    const int rows = kKeys - valid;
    for (int i = thread_; i < kRopeBox * rows * 8; i += kGroupThreads) {
      const int box = i / (rows * 8), row = valid + i / 8 % rows;
      *reinterpret_cast<uint4*>(shared_.pages[kGroup] + box * kBoxBytes + row * 128 + i % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    barrier_arrive(&shared_.cleared[kGroup]);
    barrier_wait(&shared_.cleared[kGroup], clears_++ & 1);
  }

  // Turns scores into probabilities relative to the row's reference. Earlier sums must then be
  // multiplied with `factor`.
  __device__ void soften(int page, float (&scores)[kElements], float (&factor)[2],
                         uint32_t (&packed)[kElements / 2]) {
    if (page >= unmasked_) mask(page, scores);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(scores[2 * h], scores[2 * h + 1]);
#pragma unroll
      for (int j = 4 + 2 * h; j < kElements; j += 4) {
        most = fmaxf(most, fmaxf(scores[j], scores[j + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float above = above_reference(most, reference_[h], arguments_.scale_log2);
      factor[h] = 1;
      if (above > kSlack) {
        factor[h] = exp2_fast(-above);
        reference_[h] = most;
        sum_[h] *= factor[h];
      }
#pragma unroll
      for (int j = 2 * h; j < kElements; j += 4) {
        const uint32_t two = pack_bf16(
            exp2_fast(above_reference(scores[j], reference_[h], arguments_.scale_log2)),
            exp2_fast(above_reference(scores[j + 1], reference_[h], arguments_.scale_log2)));
        packed[j / 2] = two;
        // Sums the rounded values, because those are multiplied.
        sum_[h] += __uint_as_float(two << 16) + __uint_as_float(two & 0xFFFF0000u);
      }
    }
  }

  __device__ void mask(int page, float (&scores)[kElements]) const {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const int key = page * kKeys + j / 4 * 8 + j % 2;
      if (key >= visible_[j / 2 % 2]) scores[j] = -INFINITY;
    }
  }

  // Publishes probabilities to the other warpgroup. Both have already consumed what the other
  // published before.
  __device__ void publish(const uint32_t (&packed)[kElements / 2]) {
    const int matrix = lane_ / 8, row = thread_ / 32 * 16 + matrix % 2 * 8 + lane_ % 8;
#pragma unroll
    for (int k = 0; k < kKeys / kK; ++k) {
      const int chunk = 2 * k + matrix / 2;
      store_matrices(shared_address(shared_.probabilities) + row * 128 + (chunk ^ (row % 8)) * 16,
                     packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3]);
    }
    if (lane_ % 4 == 0) {
      shared_.references[parts_ & 1][first_row_] = reference_[0];
      shared_.references[parts_ & 1][first_row_ + 8] = reference_[1];
    }
    fence_async_proxy();
    barrier_arrive(&shared_.published[kGroup]);
  }

  __device__ void multiply_own_values(int page, const float (&factor)[2],
                                      const uint32_t (&packed)[kElements / 2]) {
    rescale(factor);
    pin(out_);
    mma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / kK; ++k) {
      mma_64<KAlong::kRows>(out_, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2],
                            packed[4 * k + 3], moved(values_, at_values(kGroup, k)),
                            page > 0 || k > 0);
    }
    mma_commit();
    mma_wait();
    pin(out_);
    has_read(&shared_.read[kGroup][0]);
  }

  // Issues the GEMM of the other warpgroup's probabilities with this one's values.
  __device__ void multiply_others_values(int page) {
    constexpr int kStage = kGroup ^ 1;
    barrier_wait(&shared_.published[kStage], (uses_[kStage] + page / 2) & 1);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float reference = shared_.references[parts_ & 1][first_row_ + 8 * h];
      factor[h] = 1;
      if (reference > reference_[h]) {
        factor[h] = exp2_fast(above_reference(reference_[h], reference, arguments_.scale_log2));
        reference_[h] = reference;
        sum_[h] *= factor[h];
      }
    }
    rescale(factor);
    pin(out_);
    mma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / kK; ++k) {
      mma_64<KAlong::kColumns, KAlong::kRows>(out_, moved(probabilities_, k * 32),
                                              moved(values_, at_values(kStage, k)),
                                              page > 0 || k > 0);
    }
    mma_commit();
  }

  __device__ static constexpr int at_values(int stage, int k) {
    return stage * (kBoxes * kBoxBytes) + k * 2 * kGroupBytes;
  }

  __device__ void rescale(const float (&factor)[2]) {
    if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int j = 0; j < kOutElements; ++j) out_[j] *= factor[j / 2 % 2];
  }

  __device__ void has_read(uint64_t* barrier) const {
    if (lane_ == 0) barrier_arrive(barrier);
  }

  // Epilogue: adds both warpgroups' sums and writes the result.
  __device__ void end(const LatentDecodePart& part) {
    float(*sums)[kRows] = shared_.sums[parts_ & 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(~0u, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(~0u, sum_[h], 2);
      if (lane_ % 4 == 0) sums[kGroup][first_row_ + 8 * h] = sum_[h];
    }
    barrier_arrive(&shared_.summed);
    barrier_wait(&shared_.summed, parts_ & 1);
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sums[0][first_row_ + 8 * h] + sums[1][first_row_ + 8 * h];
      inverse[h] = sum > 0 ? reciprocal_fast(sum) : 0;
    }
    if (part.num_splits == 1) {
      write_out(part, inverse);
    } else {
      write_weights(part);
      write_partial(part, inverse);
    }
  }

  __device__ void write_out(const LatentDecodePart& part, const float (&inverse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = rank_ * kRows + first_row_ + 8 * h;
      __nv_bfloat16* to = arguments_.out + static_cast<size_t>(part.out_row + row) * kLatent +
                          kGroup * (kLatent / kGroups) + 8 * (lane_ % 4);
#pragma unroll
      for (int c = 0; c < kLatent / kGroups / 8; c += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 4 * (c + i) + 2 * h;
          v[i] = pack_bf16(out_[j] * inverse[h], out_[j + 1] * inverse[h]);
        }
        transpose(v);
        if (row < part.rows) {
          *reinterpret_cast<uint4*>(to + 8 * c) = make_uint4(v[0], v[1], v[2], v[3]);
        }
      }
    }
  }

  // Transposes among four adjacent lanes: lane i's v[j] becomes lane j's v[i].
  __device__ void transpose(uint32_t (&v)[4]) const {
    const bool odd = lane_ & 1, upper = lane_ & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t other = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
      (odd ? v[i] : v[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t other = __shfl_xor_sync(~0u, upper ? v[i] : v[i + 2], 2);
      (upper ? v[i] : v[i + 2]) = other;
    }
  }

  // Each reader's weights are contiguous over all splits. Those of listed keys have one reader.
  __device__ void write_weights(const LatentDecodePart& part) const {
    const int thread = kGroup * kGroupThreads + thread_, at = thread % kRows;
    const int row = ShareLayout::row_of_weight(at);
    const float sum = shared_.sums[parts_ & 1][0][row] + shared_.sums[parts_ & 1][1][row];
    const float weight = present(
        sum > 0 ? fmaf(shared_.references[parts_ & 1][row], arguments_.scale_log2, log2_fast(sum))
                : -1e30f);
    const auto readers = [&] { return kKeysFrom == LatentKeys::kPages ? part.num_splits : 1; };
    for (int reader = thread / kRows; reader < readers(); reader += ShareLayout::kThreads / kRows) {
      const size_t its = part.first_weight + reader * part.num_splits + part.split;
      store_shared_word(arguments_.weights + (its * arguments_.tile_blocks + rank_) * kRows + at,
                        weight);
    }
  }

  __device__ void write_partial(const LatentDecodePart& part, const float (&inverse)[2]) const {
    const size_t slot = (part.first_slot + part.split) * arguments_.tile_blocks + rank_;
    float* to = arguments_.sums +
                (slot * ShareLayout::kVectors + kGroup * ShareLayout::kGroupVectors + thread_) * 4;
#pragma unroll
    for (int j = 0; j < kOutElements; j += 8) {
      const auto pair = [&](int at) {
        const float factor = inverse[at / 2 % 2];
        return present_pair(out_[at] * factor, out_[at + 1] * factor);
      };
      store_shared_words(to + j / 2 * kGroupThreads,
                         make_float4(pair(j), pair(j + 2), pair(j + 4), pair(j + 6)));
    }
  }

  SharedMemory& shared_;
  const Arguments& arguments_;
  const int rank_, thread_, lane_, first_row_;
  const uint64_t queries_, keys_, values_, probabilities_;
  int uses_[kStages] = {};  // uses of each stage in earlier splits
  int parts_ = 0, clears_ = 0;
  int valid_, unmasked_, visible_[2];  // keys of this split: in the sequence, visible to a row
  float reference_[2], sum_[2];
  float out_[kOutElements];
};

}  // namespace fathom::cuda::latent_rows
