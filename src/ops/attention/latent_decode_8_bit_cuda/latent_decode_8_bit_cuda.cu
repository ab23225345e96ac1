// What: out = softmax(scale * [q_latent q_rope] [latent rope]^T) latent, for 1 to 8 new tokens of
// each sequence, in row tiles of 16 and 32, over an 8-bit cache: e4m3 with fp32 scales for each 128
// and a rotary key in bf16, or all of it in e4m3 or e5m2 (cache/latent_row.h).
//
// Inputs/outputs: latent_decode_cuda.h. Splits: latent_decode_plan.h.
//
// Layout: one CTA per SM: two consumer warpgroups, one producer warp. A stage holds one page so
// that neither way of reading it (keys by columns, columns by keys) has bank conflicts: rows of 656
// bytes, an odd number of 16, as they lie in the cache, in one copy; rows of 576 in boxes of 128
// columns with the 128-byte swizzle. Queries lie beside them as boxes of [rows, 128 columns],
// probabilities as [rows, keys of two pages] for each scale.
//
// Algorithm, two pages at a time; rows are N of wgmma:
//   1. scores^T [keys, rows] = page q^T: one page a warpgroup, 16 keys a warp. A comes from
//      registers: ldmatrix loads bytes as they are. Sums of 128 columns are multiplied with the
//      keys' scales and added up in fp32.
//   2. maximum of each row over both pages; probabilities relative to it, times the key's scale of
//      each 128 columns relative to the largest, to shared memory (e4m3)
//   3. out^T [512, rows] += factor * latent^T probabilities^T: half of the columns a warpgroup, of
//      both pages. ldmatrix.trans loads pairs of columns of pairs of keys; byte permutations
//      regroup two such words into four keys of one column.
// The splits of a row tile are combined within the launch: latent_decode_join_cuda.cuh.
//
// Numbers: queries and probabilities are sums of two e4m3 values, which together have 8 bits, as
// bf16 has. The tensor cores accumulate e4m3 or e5m2 over 128 columns or keys, the smaller terms
// first; beyond that sums are fp32. The rotary part in bf16 is multiplied as bf16, its queries
// rounded once.
//
// Determinism: as latent_decode_cuda.cu; the atomic maxima do not depend on their order.
//
// Limits: 512 + 64 columns. Above 32 rows a sequence: latent_decode_8_bit_rows_cuda.cu.
//
// Source: as latent_decode_cuda.cu.
//
// Measured: docs/kernels/latent_decode_8_bit.md.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/co_resident.h"
#include "device/cuda/tensor_map.h"
#include "device/cuda/tile_load.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_copies_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_cuda.h"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_queries_cuda.cuh"
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_results_cuda.cuh"
#include "ops/attention/latent_decode_cuda/latent_decode_join_cuda.cuh"
#include "ops/attention/latent_decode_cuda/score_reference_cuda.cuh"

namespace fathom::cuda {
namespace {

using namespace latent_8_bit;

// A row's scores may exceed its reference by this power of two before the sums are rescaled. fp32
// has the range.
constexpr float kSlack = 64;

// Order-preserving map of floats to integers, and its inverse.
__device__ inline int32_t ordered(float x) {
  const int32_t bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
__device__ inline float unordered(int32_t x) { return __int_as_float(x ^ (x >> 31 & 0x7FFFFFFF)); }

// ---- attention over one split
//
// A thread's accumulators of a [64, kRows] wgmma: element j is row 16 * warp + lane / 4 (+ 8 if j &
// 2) of M and column 8 * (j / 4) + 2 * (lane % 4) + (j & 1) of N, so a thread has kOwn of the query
// rows; Place::row_of(i) is the i-th. M is keys in the scores; in the values row m of a warp's 16
// is column 2 m of its 16 bytes, row m + 8 is column 2 m + 1.
//
// Reductions over a warp's keys leave one row a lane, kept_.

template <typename Row, int kRows>
class PartAttention {
 public:
  using Shared = SharedMemory<Row, kRows>;
  using Page = PageLayout<Row>;
  static constexpr int kElements = kRows / 2, kOwn = kRows / 4;
  // Accumulators in flight; each covers 128 columns or two pages before it is added to the rest.
  static constexpr int kSums = 2;
  static constexpr int kHalves = 2;  // halves of a slab, whose scores the tensor cores accumulate

  __device__ PartAttention(Shared& shared, const Arguments& arguments)
      : shared_(shared),
        arguments_(arguments),
        kept_(place_.row_of(place_.lane / 16 * (kOwn / 2) + place_.lane / 8 % 2 * (kOwn / 4) +
                            place_.lane / 4 % 2 * (kOwn / 8))),
        queries_(shared_address(shared.queries)),
        probabilities_(shared_address(shared.probabilities)) {}

  __device__ void run(const LatentDecodePart& part) {
    row_scale_ = load_queries(shared_, arguments_, part);
    reference_ = kNoReference;
    sum_ = 0;
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) out_[block][j] = 0;
    }
    for (int t = 0; t < part.num_tiles; t += kGroups) {
      two_pages(part, t, min(kGroups, part.num_tiles - t));
    }
    add_up_sums();
    if (part.num_splits == 1) {
      write_out<kRows>(shared_, arguments_.out + int64_t{part.out_row} * kLatent, place_, part.rows,
                       out_);
    } else {
      const int64_t slot = part.first_slot + part.split, weight = part.first_weight + part.split;
      write_partial<kRows>(shared_, arguments_.sums + slot * (kLatent * kRows / 2),
                           arguments_.weights + weight * kRows, part.num_splits * kRows, place_,
                           part.num_splits, out_);
    }
  }

 private:
  // ---- two pages, one for each warpgroup's scores

  __device__ void two_pages(const LatentDecodePart& part, int t, int pages) {
    const int buffer = pairs_ & 1;
    float scores[kElements];
    float4 scales[2];  // keys 16 * warp + lane / 4 and 8 further
    if (place_.group < pages) {
      multiply_keys(part, t + place_.group, scores, scales);
      mask(part, (part.first_tile + t + place_.group) * kKeys, scores);
      send_maxima(buffer, scores, scales);
    }
    meet();
    update_references(buffer);
    float4 scale_maxima;
    if constexpr (Row::kIsScaled) {
      scale_maxima = *reinterpret_cast<const float4*>(shared_.scale_maxima[buffer]);
    }
    if (place_.group < pages) write_probabilities(buffer, scores, scales, scale_maxima);
    fence_async_proxy();
    meet();
    if (pages == kGroups) {
      multiply_values<kGroups>(scale_maxima);
    } else {
      multiply_values<1>(scale_maxima);
    }
    turn_ += pages;
    ++pairs_;
  }

  // ---- scores

  __device__ void multiply_keys(const LatentDecodePart& part, int t, float (&scores)[kElements],
                                float4 (&scales)[2]) {
    const int turn = turn_ + place_.group, stage = turn % Shared::kStages;
    barrier_wait(&shared_.arrived[stage], turn / Shared::kStages & 1);
    const int valid = part.kv_len - (part.first_tile + t) * kKeys;
    if (valid < kKeys) clear_beyond(stage, valid);
    // ldmatrix takes rows 0 to 7 and 8 to 15 of the warp's keys, at two times 16 bytes.
    const uint32_t from = shared_address(shared_.pages[stage]) +
                          Page::at(16 * place_.warp + place_.lane % 16, place_.lane / 16 * 16);
    if constexpr (Row::kIsScaled) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = Page::at(16 * place_.warp + place_.lane / 4 + half * 8, Row::kScalesAt);
        scales[half] = *reinterpret_cast<const float4*>(shared_.pages[stage] + own);
      }
    }
    float sums[kSums][kHalves][kElements];
    uint32_t a[kSums][4][4];
    multiply_rope(from, scores);
    multiply_slab(from, 0, a[0], sums[0]);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int next = slab + 1;
      if (next < kSlabs) {
        multiply_slab(from, next, a[next % kSums], sums[next % kSums]);
        mma_wait<1>();
      } else {
        mma_wait<0>();
      }
      if (slab == 0) pin(scores);
#pragma unroll
      for (auto& half : sums[slab % kSums]) pin(half);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const float sum = sums[slab % kSums][0][j] + sums[slab % kSums][1][j];
        if constexpr (Row::kIsScaled) {
          scores[j] += sum * component(scales[j / 2 % 2], slab);
        } else {
          scores[j] += sum;
        }
      }
    }
  }

  __device__ static float component(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }

  __device__ uint64_t query_at(int box, int byte) const {
    return swizzled_matrix(queries_ + box * Shared::kBoxBytes + byte, 1024);
  }

  __device__ void multiply_slab(uint32_t from, int slab, uint32_t (&a)[4][4],
                                float (&sums)[kHalves][kElements]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_matrices(a[step], Page::further(from, slab * kSlabColumns + step * 32));
    }
    mma_fence();
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        mma_64_fp8<Row::kType>(sums[step / 2], a[step], query_at(term * kSlabs + slab, step * 32),
                               term < kTerms - 1 || step % 2 > 0);
      }
    }
    mma_commit();
  }

  __device__ void multiply_rope(uint32_t from, float (&sums)[kElements]) {
    constexpr int kSteps = Row::kRopeIsBf16 ? 4 : 2;  // steps of 32 bytes
    uint32_t a[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrices(a[step], Page::further(from, Row::kRopeAt + step * 32));
    }
    mma_fence();
#pragma unroll
    for (int term = Row::kRopeIsBf16 ? 0 : kTerms - 1; term >= 0; --term) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t query = query_at(Shared::kRopeBox, term * kRope + step * 32);
        if constexpr (Row::kRopeIsBf16) {
          mma_64(sums, a[step][0], a[step][1], a[step][2], a[step][3], query, step > 0);
        } else {
          mma_64_fp8<Row::kType>(sums, a[step], query, term < kTerms - 1 || step > 0);
        }
      }
    }
    mma_commit();
  }

  // Rows of a page past the sequence's end may hold anything, including NaN, which a zero
  // probability does not cancel. Each warp clears those of its own 16 keys; no other warp reads
  // them before the barrier.
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

  __device__ void mask(const LatentDecodePart& part, int first_key, float (&scores)[kElements]) {
    const int first_limit = part.kv_len - part.num_queries + 1;  // of the first new token
    if (first_key + kKeys <= first_limit) return;
    const int key = first_key + 16 * place_.warp + place_.lane / 4;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const int row = part.first_row + place_.row_of(j / 4 * 2 + (j & 1));
      if (key + (j & 2 ? 8 : 0) >= first_limit + row / arguments_.heads) scores[j] = -INFINITY;
    }
  }

  // Reduces one value for each of a thread's rows over the lanes that have the same rows, so that
  // each lane keeps one of them, kept_.
  template <int kDistance = 16, typename Reduce>
  __device__ void reduce_over_keys(float (&v)[kOwn], const Reduce& reduce) const {
    constexpr int kCount = kOwn * kDistance / 32;  // rows kept after this step
    if constexpr (kCount > 0) {
      const bool upper = place_.lane & kDistance;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float keeps = upper ? v[i + kCount] : v[i], sends = upper ? v[i] : v[i + kCount];
        v[i] = reduce(keeps, __shfl_xor_sync(~0u, sends, kDistance));
      }
    } else {
      v[0] = reduce(v[0], __shfl_xor_sync(~0u, v[0], kDistance));
    }
    if constexpr (kDistance > 4) reduce_over_keys<kDistance / 2>(v, reduce);
  }

  __device__ void send_maxima(int buffer, const float (&scores)[kElements],
                              const float4 (&scales)[2]) {
    float most[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int j = i / 2 * 4 + (i & 1);
      most[i] = fmaxf(scores[j], scores[j + 2]);
    }
    reduce_over_keys(most, [](float a, float b) { return fmaxf(a, b); });
    atomicMax(&shared_.maxima[buffer][kept_], ordered(most[0]));
    if constexpr (Row::kIsScaled) {
      const int slab = place_.lane % 4;
      float largest = fmaxf(component(scales[0], slab), component(scales[1], slab));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      // Values are not negative, so their bits compare as integers.
      if (place_.lane < kSlabs) {
        atomicMax(reinterpret_cast<int32_t*>(&shared_.scale_maxima[buffer][slab]),
                  __float_as_int(largest));
      }
    }
  }

  // Every warp computes the same for the rows that its lanes keep; the first one publishes.
  __device__ void update_references(int buffer) {
    bool rescales = false;
    const float most = unordered(shared_.maxima[buffer][kept_]);
    const float above = above_reference(most, reference_, row_scale_);
    float before = 1;
    factor_ = exp2_fast(above);
    if (above > kSlack) {
      before = exp2_fast(-above);
      factor_ = 1;
      rescales = reference_ != kNoReference;
      sum_ *= before;
      reference_ = most;
    }
    if (threadIdx.x < 32) {
      shared_.factors[kept_] = factor_;
      shared_.rescales[kept_] = before;
    }
    if (threadIdx.x < 32) {
      rescales = __any_sync(~0u, rescales);
      if (place_.lane == 0) shared_.any_rescales = rescales;
    }
  }

  __device__ void write_probabilities(int buffer, float (&scores)[kElements],
                                      const float4 (&scales)[2], const float4& scale_maxima) {
    float partial[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      // A row that sees none of these keys has only scores of -infinity.
      const float most = fmaxf(unordered(shared_.maxima[buffer][place_.row_of(i)]), kNoReference);
      const int j = i / 2 * 4 + (i & 1);
      scores[j] = exp2_fast(above_reference(scores[j], most, row_scale_, kProbabilityExponent));
      scores[j + 2] =
          exp2_fast(above_reference(scores[j + 2], most, row_scale_, kProbabilityExponent));
      partial[i] = scores[j] + scores[j + 2];
    }
#pragma unroll
    for (int s = 0; s < Shared::kScales; ++s) {
      float scale[2] = {1, 1};
      if constexpr (Row::kIsScaled) {
        const float most = component(scale_maxima, s);
        const float inverse = most > 0 ? reciprocal_fast(most) : 0;
        scale[0] = component(scales[0], s) * inverse;
        scale[1] = component(scales[1], s) * inverse;
      }
      constexpr int kTiles = kRows / 8;  // tiles of 8 rows
      uint32_t packed[kTerms * kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = scores[tile * 4 + j] * scale[j / 2];
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          float x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = take_term(p[j], term);
          // Packs a key and the one 8 further side by side, the order of multiply_values().
          packed[term * kTiles + tile] = pack_fp8<Fp8::kE4M3>(x[0], x[2], x[1], x[3]);
        }
      }
#pragma unroll
      for (int first = 0; first < kTerms * kTiles; first += 4) {
        const int matrix = first + place_.lane / 8, term = matrix / kTiles;
        const uint32_t box = probabilities_ + (s * kTerms + term) * Shared::kBoxBytes;
        const int row = matrix % kTiles * 8 + place_.lane % 8;
        store_matrices_transposed(box + chunk_at(row, place_.group * 4 + place_.warp),
                                  packed[first], packed[first + 1], packed[first + 2],
                                  packed[first + 3]);
      }
    }
    reduce_over_keys(partial, [](float a, float b) { return a + b; });
    sum_ += factor_ * partial[0];
  }

  // ---- values

  // Multiplies this warpgroup's columns of kPages pages.
  template <int kPages>
  __device__ void multiply_values(const float4& scale_maxima) {
    float sums[kSums][kElements];
    uint32_t a[kSums][kPages * 2][4];
    uint32_t from[kPages];
#pragma unroll
    for (int p = 0; p < kPages; ++p) {
      const int turn = turn_ + p, stage = turn % Shared::kStages;
      // The other warpgroup's page: waiting for its barrier orders the copy before this thread's
      // reads.
      if (p != place_.group) barrier_wait(&shared_.arrived[stage], turn / Shared::kStages & 1);
      // ldmatrix takes keys 0 to 7, 8 to 15, 16 to 23, 24 to 31 at the warp's 16 columns.
      from[p] = shared_address(shared_.pages[stage]) +
                Page::at(place_.lane, place_.group * (kOutBlocks * 64) + place_.warp * 16);
    }
    multiply_block<kPages>(from, 0, a[0], sums[0]);
    clear_maxima();
    if (shared_.any_rescales) rescale();
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
      const int next = block + 1;
      if (next == kOutBlocks) {
        __syncwarp();
#pragma unroll
        for (int p = 0; p < kPages; ++p) {
          if (place_.lane == 0) barrier_arrive(&shared_.read[(turn_ + p) % Shared::kStages]);
        }
      }
      if (next < kOutBlocks) {
        multiply_block<kPages>(from, next, a[next % kSums], sums[next % kSums]);
        mma_wait<1>();
      } else {
        mma_wait<0>();
      }
      pin(sums[block % kSums]);
      const int slab_in_group = block * 64 / kSlabColumns;
      const float scale = place_.group == 0
                              ? component(scale_maxima, slab_in_group)
                              : component(scale_maxima, kSlabs / kGroups + slab_in_group);
#pragma unroll
      for (int j = 0; j < kElements; j += 4) {
        float2 factor = *reinterpret_cast<const float2*>(shared_.factors + place_.row_of(j / 2));
        if constexpr (Row::kIsScaled) factor.x *= scale, factor.y *= scale;
        out_[block][j] += factor.x * sums[block % kSums][j];
        out_[block][j + 1] += factor.y * sums[block % kSums][j + 1];
        out_[block][j + 2] += factor.x * sums[block % kSums][j + 2];
        out_[block][j + 3] += factor.y * sums[block % kSums][j + 3];
      }
    }
  }

  // Clears the maxima of the pair after the next one.
  __device__ void clear_maxima() {
    const int buffer = pairs_ & 1;
    if (threadIdx.x < kRows) shared_.maxima[buffer][threadIdx.x] = ordered(-INFINITY);
    if (Row::kIsScaled && threadIdx.x < kSlabs) shared_.scale_maxima[buffer][threadIdx.x] = 0;
  }

  __device__ void rescale() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float before = shared_.rescales[place_.row_of(i)];
      const int j = i / 2 * 4 + (i & 1);
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
        out_[block][j] *= before;
        out_[block][j + 2] *= before;
      }
    }
  }

  // Issues the wgmmas of the pages' keys in 64 columns.
  template <int kPages>
  __device__ void multiply_block(const uint32_t (&from)[kPages], int block,
                                 uint32_t (&a)[kPages * 2][4], float (&sums)[kElements]) {
#pragma unroll
    for (int step = 0; step < kPages * 2; ++step) {
      load_values(Page::further(from[step / 2] + step % 2 * 32 * Page::kRowStride, block * 64),
                  a[step]);
    }
    const int scale = Row::kIsScaled ? (place_.group * kOutBlocks + block) * 64 / kSlabColumns : 0;
    mma_fence();
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
      const uint32_t box = probabilities_ + (scale * kTerms + term) * Shared::kBoxBytes;
#pragma unroll
      for (int step = 0; step < kPages * 2; ++step) {
        mma_64_fp8<Row::kType>(sums, a[step], swizzled_matrix(box + step * 32, 1024),
                               term < kTerms - 1 || step > 0);
      }
    }
    mma_commit();
  }

  // Loads 32 keys of the warp's 16 columns as A: the even columns, then the odd ones; a key and the
  // one 8 further side by side.
  __device__ static void load_values(uint32_t from, uint32_t (&a)[4]) {
    uint32_t bytes[4];  // 8 keys each: two columns of a key, and of the next
    load_matrices_transposed(bytes, from);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = __byte_perm(bytes[2 * half], bytes[2 * half + 1], 0x6240);
      a[2 * half + 1] = __byte_perm(bytes[2 * half], bytes[2 * half + 1], 0x7351);
    }
  }

  // ---- epilogue

  __device__ void add_up_sums() {
    if (kOwn >= 8 || place_.lane % 8 < 4) {
      shared_.sums[threadIdx.x / 32][kept_] = sum_;
      if (threadIdx.x < 32) shared_.references[kept_] = reference_ * row_scale_;
    }
    meet();
    if (threadIdx.x < kRows) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_.sums[w][threadIdx.x];
      shared_.inverses[threadIdx.x] = sum > 0 ? reciprocal_fast(sum) : 0;
      shared_.weights[threadIdx.x] =
          present(sum > 0 ? shared_.references[threadIdx.x] + log2_fast(sum) : -1e30f);
    }
    meet();
  }

  Shared& shared_;
  const Arguments& arguments_;
  const Place place_;
  const int kept_;
  const uint32_t queries_, probabilities_;
  int turn_ = 0, pairs_ = 0;        // pages and pairs of them since the launch
  float row_scale_;                 // from query-key dot products to base 2 logarithms
  float reference_, sum_, factor_;  // for row kept_
  float out_[kOutBlocks][kElements];
};

// ---- the kernel

template <typename Row, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    latent_decode_8_bit_kernel(const __grid_constant__ CUtensorMap map,
                               const __grid_constant__ Arguments arguments) {
  using Shared = SharedMemory<Row, kRows>;
  using Joining = JoinedShare<SumsLayout<kRows>>;
  static_assert(sizeof(Shared) <= kMostShared &&
                sizeof(typename Joining::Memory) <= offsetof(Shared, maxima));
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < kRows) {
    for (auto& maxima : shared.maxima) maxima[threadIdx.x] = ordered(-INFINITY);
    if (threadIdx.x < kSlabs) {
      for (auto& maxima : shared.scale_maxima) maxima[threadIdx.x] = 0;
    }
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      barrier_init(&shared.arrived[stage], 1);
      barrier_init(&shared.read[stage], kWarps);
    }
    fence_barrier_init();
  }
  let_next_launch_begin();
  __syncthreads();
  const int first_part = __shfl_sync(~0u, arguments.first_part[blockIdx.x], 0);

  if (warp >= kWarps) {
    give_registers<24>();
    if (warp == kWarps) issue_pages<Row>(shared, map, arguments, first_part);
  } else {
    take_registers<240>();
    {
      PartAttention<Row, kRows> attention(shared, arguments);
      for (int p = first_part, more = 1; more; ++p) {
        const LatentDecodePart part = arguments.parts[p];
        more = part.more;
        attention.run(part);
      }
    }
    named_barrier(kBarrier, kComputing);  // the pages' memory is free
    for (int p = first_part, more = 1; more; ++p) {
      const LatentDecodePart part = arguments.parts[p];
      more = part.more;
      if (part.num_splits == 1) continue;
      const int64_t first_weight = int64_t{part.first_weight} + part.split * part.num_splits;
      Joining(part, part.rows, arguments.sums + int64_t{part.first_slot} * (4 * Joining::kVectors),
              Joining::kVectors, arguments.weights + first_weight * kRows, kRows,
              arguments.out + int64_t{part.out_row} * kLatent,
              reinterpret_cast<typename Joining::Memory&>(shared.pages))
          .run();
      named_barrier(kBarrier, kComputing);
    }
  }
}

template <typename Row, int kRows>
void launch_rows(const CUtensorMap& map, const Arguments& arguments, int num_blocks,
                 GpuStream stream) {
  const auto kernel = latent_decode_8_bit_kernel<Row, kRows>;
  constexpr int kBytes = sizeof(SharedMemory<Row, kRows>);
  stream.device().allow_shared_memory(kernel, kBytes);
  launch_co_resident(
      "latent_decode_8_bit", kernel,
      {.blocks = static_cast<unsigned>(num_blocks), .threads = kThreads, .shared_bytes = kBytes},
      num_blocks, stream, map, arguments);
}

}  // namespace

void latent_decode_8_bit(int tile_rows, int num_multiprocessors,
                         const LatentDecodeArguments& arguments, GpuStream stream) {
  const Arguments inner = kernel_arguments(num_multiprocessors, arguments);
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    if constexpr (!Row::kIsBf16) {
      const auto launch_for = tile_rows == 16 ? launch_rows<Row, 16> : launch_rows<Row, 32>;
      launch_for(map_of_pages<Row>(arguments), inner, num_multiprocessors, stream);
    }
  });
}

}  // namespace fathom::cuda
