// Attention over one split by the consumer warpgroups, over 8-bit keys: shared by the kernels over
// a sequence's pages (latent_decode_8_bit_rows_cuda.cu, which describes the algorithm) and over
// chosen keys (ops/attention/sparse_latent_cuda).
#pragma once

#include <cuda_bf16.h>

#include <cstddef>

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/tile_load.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_results_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_rows_queries_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"
#include "ops/attention/latent_decode_cuda/score_reference_cuda.cuh"

namespace fathom::cuda::latent_8_bit {

// Probabilities are at most 2^(kBias + kSlack), which f16 holds; it has full precision down to
// 2^-14.
constexpr float kBias = 7, kSlack = 8;

// bar.red.or: whether any of a warpgroup's threads has the predicate.
template <int kId>
__device__ inline bool any_of(bool said) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred said, any;\nsetp.ne.b32 said, %1, 0;\n"
      "bar.red.or.pred any, %2, %3, said;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(said)), "n"(kId), "n"(kGroupThreads)
      : "memory");
  return any != 0;
}

// ---- attention over one split
//
// A thread's accumulators of a [64, 64] wgmma: element j is row 16 * warp + lane / 4 (+ 8 if j & 2)
// of M and column 8 * (j / 4) + 2 * (lane % 4) + (j & 1) of N, so a thread has 16 of the query
// rows; Place::row_of(i) is the i-th. M is keys in the scores; in the values row m of a warp's 16
// is column 2 m of its 16, row m + 8 is column 2 m + 1.

template <typename Row, LatentKeys kKeysFrom = LatentKeys::kPages>
class RowsAttention {
 public:
  using Shared = RowsSharedMemory<Row, kKeysFrom>;
  using Page = typename Shared::Page;
  static constexpr int kElements = kBlockRows / 2, kOwn = kBlockRows / 4;

  __device__ RowsAttention(Shared& shared, const Arguments& arguments, int rank)
      : shared_(shared),
        arguments_(arguments),
        rank_(rank),
        queries_(uniform_matrix(swizzled_matrix(shared_address(shared.queries), 1024))),
        probabilities_(uniform_matrix(swizzled_matrix(shared_address(shared.probabilities), 1024))),
        keys_(shared_address(shared.pages) +
              Page::at(16 * place_.warp + place_.lane % 16, place_.lane / 16 * 16)),
        values_(shared_address(shared.pages) +
                Page::at(place_.lane, place_.group * (kOutBlocks * 64) + place_.warp * 16)) {}

  __device__ void run(const LatentDecodePart& part) {
    const int pages = __shfl_sync(~0u, part.num_tiles, 0);
    if (pages == 0) return wait_for_earlier_launches();
    valid_ = part.kv_len - part.first_tile * kKeys;
    first_limit_ = valid_ - part.num_queries + 1;
    const int first_row = rank_ * kBlockRows, rows = part.rows - first_row;
    row_scale_ = load_queries<Row>(
        shared_, arguments_, int64_t{part.out_row} + (rows > 0 ? first_row : 0), max(rows, 1));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sums_[i] = 0;
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) out_[block][j] = 0;
    }
    // One array for all scores: with several, ptxas 13.0 overlaps no wgmmas.
    float scores[kElements];
    for (int page = place_.group - 1; page < pages; ++page) {
      if (((page ^ place_.group) & 1) == 0) {
        mask(part, page, scores);
        soften(page, scores);
      } else if (page + 1 < pages) {
        multiply_keys(page + 1, scores);
      }
      if (page >= 0) multiply_values(page);
    }
    turn_ += pages;
    even_uses_ += (pages + 1) / 2;
    odd_uses_ += pages / 2;
    end(part, rows);
  }

  // Writes the last split's natural logarithms of rows' sums of exponentials, after run(). The
  // first consumer threads have a row each.
  __device__ void write_lse(float* lse, int rows) const {
    constexpr float kLn2 = 0.6931471805599453f;
    if (static_cast<int>(threadIdx.x) >= min(rows, kBlockRows)) return;
    lse[threadIdx.x] = (shared_.weights[threadIdx.x] - kBias) * kLn2;
  }

 private:
  // A unit of tensor core work: two wgmmas, whose A is 32 bytes of 64 rows. Before a thread
  // overwrites A, all units up to the one before the last kBuffers - 1 have ended.
  static constexpr int kBuffers = 2;
  using Buffers = uint32_t[kBuffers][4][4];

  __device__ int stage_of(int page) const { return (turn_ + page) % Shared::kStages; }
  __device__ void wait_for_page(int page) const {
    barrier_wait(&shared_.arrived[stage_of(page)], (turn_ + page) / Shared::kStages & 1);
  }

  // ---- scores

  __device__ void multiply_keys(int page, float (&scores)[kElements]) {
    wait_for_page(page);
    const int stage = stage_of(page), valid = valid_ - page * kKeys;
    if (valid < kKeys) clear_beyond(stage, valid);
    uint32_t scales[kSlabs][2];  // keys 16 * warp + lane / 4 and 8 further
    float divisor = 1;           // of this warp's keys
    if constexpr (Row::kIsScaled) divisor = bring_scales(stage, scales);
    const uint32_t from = keys_ + stage * Page::kBytes;
    constexpr int kLatentUnits = kLatent / 64, kUnits = (kLatent + kRope) / 64;
    Buffers a;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t(&its)[4][4] = a[unit % kBuffers];
      const uint64_t query = moved(queries_, unit * Shared::kBoxBytes);
      if (Row::kRopeIsBf16 && unit >= kLatentUnits) {
        mma_wait<kBuffers - 1>();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          load_matrices(its[i], Page::further(from, Row::kRopeAt + i * 32));
        if (Row::kIsScaled && divisor != 1) divide(its, divisor);
        mma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          mma_64(scores, its[step][0], its[step][1], its[step][2], its[step][3],
                 moved(query, step * 32), 1);
        }
      } else {
        uint32_t raw[2][4];
        load_matrices(raw[0], Page::further(from, unit * 64));
        load_matrices(raw[1], Page::further(from, unit * 64 + 32));
        mma_wait<kBuffers - 1>();
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // 16 columns, of keys 8 apart
          widen_fp8(raw[i / 4][i % 4], its[i / 2][i % 2], its[i / 2][i % 2 + 2]);
          if (Row::kIsScaled && unit < kLatentUnits) {
            const uint32_t scale = scales[unit / 2 % kSlabs][i % 2];
            its[i / 2][i % 2] = times_f16(its[i / 2][i % 2], scale);
            its[i / 2][i % 2 + 2] = times_f16(its[i / 2][i % 2 + 2], scale);
          }
        }
        mma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          mma_64_f16(scores, its[step][0], its[step][1], its[step][2], its[step][3],
                     moved(query, step * 32), unit + step > 0);
        }
      }
      mma_commit();
    }
    mma_wait();
    pin(scores);
    if (Row::kIsScaled && divisor != 1) {
#pragma unroll
      for (float& score : scores) score *= divisor;
    }
  }

  // Divides rotary keys like the latent ones whose scales are divided: by a power of two, exactly.
  __device__ static void divide(uint32_t (&pairs)[4][4], float divisor) {
    const float inverse = 1 / divisor;
#pragma unroll
    for (auto& four : pairs) {
#pragma unroll
      for (uint32_t& pair : four) pair = times_bf16(pair, inverse);
    }
  }

  // Converts four bytes to f16, the first two into `low` and the others into `high`: exact.
  __device__ static void widen_fp8(uint32_t bytes, uint32_t& low, uint32_t& high) {
    if constexpr (Row::kType == Fp8::kE4M3) {
      asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
          "cvt.rn.f16x2.e4m3x2 %1, h;\n}"
          : "=r"(low), "=r"(high)
          : "r"(bytes));
    } else {  // e5m2 is the upper half of an f16
      low = __byte_perm(bytes, 0, 0x1404);
      high = __byte_perm(bytes, 0, 0x3424);
    }
  }

  // The scales of this lane's key of either half of the warp's 16.
  __device__ float4 key_scales(int stage, int half) const {
    return *reinterpret_cast<const float4*>(shared_.pages[stage] +
                                            Page::at(own_key(half), Row::kScalesAt));
  }
  __device__ int own_key(int half) const { return 16 * place_.warp + place_.lane / 4 + half * 8; }

  // Packs scales as f16, twice each.
  __device__ static void pack_scales(const float4& its, float up, int half,
                                     uint32_t (&scales)[kSlabs][2]) {
    const auto twice = [up](float scale) { return pack_f16(scale * up, scale * up); };
    scales[0][half] = twice(its.x);
    scales[1][half] = twice(its.y);
    scales[2][half] = twice(its.z);
    scales[3][half] = twice(its.w);
  }

  // Stores scales for the multiplication of values.
  __device__ void put_value_scales(int stage, int half, const uint32_t (&scales)[kSlabs][2]) {
    const int slab = place_.lane % 4;
    const uint32_t low = slab & 1 ? scales[1][half] : scales[0][half];
    const uint32_t high = slab & 1 ? scales[3][half] : scales[2][half];
    shared_.value_scales[stage][slab][value_scale_at(own_key(half))] =
        static_cast<uint16_t>(slab & 2 ? high : low);
  }

  // Loads the scales of a warp's keys and returns their divisor. Values' scales use the divisor of
  // the group's previous page; soften() corrects it where it no longer suffices.
  __device__ float bring_scales(int stage, uint32_t (&scales)[kSlabs][2]) {
    const float4 its[2] = {key_scales(stage, 0), key_scales(stage, 1)};
    const auto largest_of = [](const float4& x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); };
    const float largest = __uint_as_float(
        __reduce_max_sync(~0u, __float_as_uint(fmaxf(largest_of(its[0]), largest_of(its[1])))));
    const float values = shared_.value_divisors[place_.group];
    if (largest <= kMostScale && values == 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pack_scales(its[half], kScaleUp, half, scales);
        put_value_scales(stage, half, scales);
      }
      if (place_.lane == 0) shared_.key_divisors[threadIdx.x / 32] = 1;
      return 1;
    }
    put_divided_value_scales(stage, values);
    const float divisor = largest <= kMostScale ? 1 : scale_divisor(largest);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pack_scales(its[half], kScaleUp / divisor, half, scales);
    }
    if (place_.lane == 0) shared_.key_divisors[threadIdx.x / 32] = divisor;
    return divisor;
  }

  // Scales still too large for f16 are never used: soften() finds that the divisor must rise.
  __device__ void put_divided_value_scales(int stage, float divisor) {
    uint32_t scales[kSlabs][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pack_scales(key_scales(stage, half), kScaleUp / divisor, half, scales);
      put_value_scales(stage, half, scales);
    }
  }

  // Whether this page's values, or those of the page before, need another divisor than this page's
  // scales were stored with.
  __device__ bool value_divisor_rises() const {
    const float own = shared_.value_divisors[place_.group];
    if (place_.lane != 0) return false;  // only lane 0 has written it
    return shared_.key_divisors[threadIdx.x / 32] > own ||
           shared_.value_divisors[place_.group ^ 1] != own;
  }

  // The largest divisor of the group's warps and of all pages before.
  __device__ float wanted_value_divisor() const {
    float most = fmaxf(shared_.value_divisors[0], shared_.value_divisors[1]);
#pragma unroll
    for (int w = 0; w < kGroupThreads / 32; ++w) {
      most = fmaxf(most, shared_.key_divisors[place_.group * (kGroupThreads / 32) + w]);
    }
    return most;
  }

  // Rows of a page past the sequence's end may hold anything, including NaN, which a zero
  // probability does not cancel. Each warp clears those of its own 16 keys; no other warp reads
  // them before their probabilities are published.
  __device__ void clear_beyond(int stage, int valid) {
    constexpr int kVectors = Row::kBytes / 16;
    const int first = max(valid, 16 * place_.warp), end = 16 * place_.warp + 16;
    for (int i = first * kVectors + place_.lane; i < end * kVectors; i += 32) {
      *reinterpret_cast<uint4*>(shared_.pages[stage] + Page::at(i / kVectors, i % kVectors * 16)) =
          make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
  }

  // ---- softmax

  __device__ void mask(const LatentDecodePart& part, int page, float (&scores)[kElements]) const {
    if ((page + 1) * kKeys <= first_limit_) return;
    const int key = page * kKeys + 16 * place_.warp + place_.lane / 4;
    const int first_row = part.first_row + rank_ * kBlockRows;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const int row = first_row + place_.row_of(j / 4 * 2 + (j & 1));
      if (key + (j & 2 ? 8 : 0) >= first_limit_ + row / arguments_.heads) scores[j] = -INFINITY;
    }
  }

  // The values of the thread's row pair i.
  __device__ float2 pair_of(const float* rows, int i) const {
    return *reinterpret_cast<const float2*>(rows + place_.row_of(2 * i));
  }

  // Turns scores into probabilities, which both warpgroups multiply values with.
  __device__ void soften(int page, float (&scores)[kElements]) {
    float2 references[kOwn / 2];
    float above = -INFINITY;  // the references
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) {
      references[i] = pair_of(shared_.references, i);
      const float* its = scores + 4 * i;
      above = fmaxf(above, fmaxf(its[0], its[2]) - references[i].x);
      above = fmaxf(above, fmaxf(its[1], its[3]) - references[i].y);
    }
    bool wants = above * row_scale_ > kSlack;
    if constexpr (Row::kIsScaled) wants = wants || value_divisor_rises();
    const bool rises =
        place_.group == 0 ? any_of<kBarrier + 1>(wants) : any_of<kBarrier + 2>(wants);
    if (rises) {
      raise_references(page, scores);
#pragma unroll
      for (int i = 0; i < kOwn / 2; ++i) references[i] = pair_of(shared_.references, i);
    }
    if (place_.thread == 0) shared_.rescales[place_.group] = rises;
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) {
      const float2 reference = references[i];
      float* its = scores + 4 * i;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float its_reference = j & 1 ? reference.y : reference.x;
        if (FATHOM_PLANTED(arguments_, kRoundedReference)) {
          its[j] = fmaf(its[j], row_scale_, kBias - __fmul_rn(its_reference, row_scale_));
        } else {
          its[j] = above_reference(its[j], its_reference, row_scale_, kBias);
        }
        its[j] = exp2_fast(its[j]);
      }
      sums_[2 * i] += its[0] + its[2];
      sums_[2 * i + 1] += its[1] + its[3];
    }
    const uint32_t box = shared_address(shared_.probabilities[place_.group]);
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 2) {
      const float* its = scores + 4 * i;
      const int matrix = place_.lane / 8, row = (i + matrix / 2) * 8 + place_.lane % 8;
      store_matrices_transposed(box + chunk_at(row, 2 * place_.warp + matrix % 2),
                                pack_f16(its[0], its[1]), pack_f16(its[2], its[3]),
                                pack_f16(its[4], its[5]), pack_f16(its[6], its[7]));
    }
    fence_async_proxy();
    barrier_arrive(&shared_.published[place_.group]);
  }

  // Raises the references of rows whose scores are too far above them, and the values' divisor to
  // what this page's scales need.
  __device__ void raise_references(int page, const float (&scores)[kElements]) {
    float divisor = 1;
    if constexpr (Row::kIsScaled) {
      divisor = wanted_value_divisor();
      put_divided_value_scales(stage_of(page), divisor);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int j = i / 2 * 4 + (i & 1);
      float most = fmaxf(scores[j], scores[j + 2]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
      }
      if (place_.lane < 4) shared_.maxima[place_.warp][place_.row_of(i)] = most;
    }
    meet_group();
    if (Row::kIsScaled && place_.thread == 0) shared_.value_divisors[place_.group] = divisor;
    const int row = place_.thread;
    if (row < kBlockRows) {
      float most = shared_.maxima[0][row];
#pragma unroll
      for (int w = 1; w < kGroupThreads / 32; ++w) most = fmaxf(most, shared_.maxima[w][row]);
      const float above = above_reference(most, shared_.references[row], row_scale_);
      const bool rises = above > kSlack;
      shared_.factors[place_.group][row] = rises ? exp2_fast(-above) : 1;
      if (rises) shared_.references[row] = most;
    }
    meet_group();
    rescale(place_.group);
  }

  __device__ void meet_group() const {
    if (place_.group == 0) {
      named_barrier(kBarrier + 1, kGroupThreads);
    } else {
      named_barrier(kBarrier + 2, kGroupThreads);
    }
  }

  // Rescales the sums of all pages before one of this parity.
  __device__ void rescale(int parity) {
    // The previous page had the other parity.
    const float divided =
        Row::kIsScaled ? shared_.value_divisors[parity ^ 1] / shared_.value_divisors[parity] : 1;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float factor = shared_.factors[parity][place_.row_of(i)];
      const int j = i / 2 * 4 + (i & 1);
      sums_[i] *= factor;
      if constexpr (Row::kIsScaled) factor *= divided;
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
        out_[block][j] *= factor;
        out_[block][j + 2] *= factor;
      }
    }
  }

  // ---- values

  // Multiplies this warpgroup's columns of a page.
  __device__ void multiply_values(int page) {
    const int parity = page % kGroups, stage = stage_of(page);
    // Waiting for the page's barrier orders the copy before this thread's reads.
    if (parity != place_.group) wait_for_page(page);
    barrier_wait(&shared_.published[parity],
                 ((parity == 0 ? even_uses_ : odd_uses_) + page / kGroups) & 1);
    if (parity != place_.group && shared_.rescales[parity]) rescale(parity);
    const uint32_t from = values_ + stage * Page::kBytes;
    const uint64_t probabilities = moved(probabilities_, parity * Shared::kBoxBytes);
    Buffers a;
    uint4 scales[2];  // groups of eight of the 64 keys: this lane's two
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) pin(out_[block]);
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
      uint32_t(&its)[4][4] = a[block % kBuffers];
      if (Row::kIsScaled && block % 2 == 0) {
        const int slab = place_.group * (kOutBlocks / 2) + block / 2;
        const auto* run = reinterpret_cast<const uint4*>(shared_.value_scales[stage][slab] +
                                                         place_.lane % 4 * 16);
        scales[0] = run[0];
        scales[1] = run[1];
      }
      uint32_t raw[2][4];  // 8 keys each: two columns of a key, and of the next
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices_transposed(raw[half],
                                 Page::further(from + half * 32 * Page::kRowStride, block * 64));
      }
      mma_wait<kBuffers - 1>();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t columns =
            __byte_perm(raw[i / 4][i % 4], 0, 0x3120);  // even columns' two keys, odd columns'
        uint32_t &even = its[i / 2][i % 2 * 2], &odd = its[i / 2][i % 2 * 2 + 1];
        widen_fp8(columns, even, odd);
        if constexpr (Row::kIsScaled) {
          const uint4& two = scales[i / 4];
          const uint32_t scale = i % 4 == 0   ? two.x
                                 : i % 4 == 1 ? two.y
                                 : i % 4 == 2 ? two.z
                                              : two.w;
          even = times_f16(even, scale);
          odd = times_f16(odd, scale);
        }
      }
      mma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        mma_64_f16(out_[block], its[step][0], its[step][1], its[step][2], its[step][3],
                   moved(probabilities, step * 32), 1);
      }
      mma_commit();
    }
    __syncwarp();
    if (place_.lane == 0) barrier_arrive(&shared_.read[stage]);
    mma_wait();
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) pin(out_[block]);
  }

  // ---- epilogue

  __device__ void end(const LatentDecodePart& part, int rows) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float sum = sums_[i];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (place_.lane < 4) shared_.sums[threadIdx.x / 32][place_.row_of(i)] = sum;
    }
    meet();
    if (threadIdx.x < kBlockRows) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_.sums[w][threadIdx.x];
      const float down =
          Row::kIsScaled ? fmaxf(shared_.value_divisors[0], shared_.value_divisors[1]) / kScaleUp
                         : 1;
      shared_.inverses[threadIdx.x] = sum > 0 ? reciprocal_fast(sum) * down : 0;
      shared_.weights[threadIdx.x] = present(
          sum > 0 ? fmaf(shared_.references[threadIdx.x], row_scale_, log2_fast(sum)) : -1e30f);
    }
    meet();
    const int blocks = arguments_.tile_blocks;
    if (part.num_splits == 1) {
      const int64_t row = int64_t{part.out_row} + rank_ * kBlockRows;
      write_out<kBlockRows>(shared_, arguments_.out + row * kLatent, place_, rows, out_);
    } else {
      const int64_t slot = int64_t{part.first_slot} + part.split;
      const int64_t weight = int64_t{part.first_weight} + part.split;
      const int readers = kKeysFrom == LatentKeys::kPages ? part.num_splits : 1;
      write_partial<kBlockRows>(
          shared_, arguments_.sums + (slot * blocks + rank_) * (kLatent * kBlockRows / 2),
          arguments_.weights + (weight * blocks + rank_) * kBlockRows,
          part.num_splits * blocks * kBlockRows, place_, readers, out_);
    }
  }

  Shared& shared_;
  const Arguments& arguments_;
  const int rank_;
  const Place place_;
  const uint64_t queries_, probabilities_;
  const uint32_t keys_, values_;      // a lane's ldmatrix addresses in the first stage
  int turn_ = 0;                      // pages since the launch
  int even_uses_ = 0, odd_uses_ = 0;  // in earlier splits
  int valid_, first_limit_;  // keys of the split: in the sequence, visible to its first new token
  float row_scale_;          // from query-key dot products to base 2 logarithms
  float sums_[kOwn];         // probabilities of its own pages
  float out_[kOutBlocks][kElements];
};

}  // namespace fathom::cuda::latent_8_bit
