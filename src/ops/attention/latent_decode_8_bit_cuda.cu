// What: out = softmax(scale * [q_latent q_rope] [latent rope]^T) latent, for 1 to 8 new tokens of
// each sequence, over a cache of 8 bits: e4m3 with fp32 scales for each 128 and a rotary key in
// bf16, or all of it in e4m3 or e5m2 (cache/latent_row.h).
//
// Inputs/outputs: latent_decode_cuda.h. Parts of work: latent_decode_plan.h.
//
// Layout: one block a multiprocessor: two warpgroups that compute, a warp that issues copies. A
// tile of 128 rows is computed by two blocks at the same time. A stage holds one page so that
// neither reading of it (keys by columns, columns by keys) meets bank conflicts: rows of 656 bytes,
// an odd number of 16, as they lie in the cache, in one copy; rows of 576 in boxes of 128 columns
// with the 128-byte swizzle. Queries lie beside them as boxes of [rows, 128 columns], probabilities
// as [rows, keys of two pages] for each scale.
//
// Algorithm, two pages at a time; rows are the N of the tensor core's instruction:
//   1. scores^T [keys, rows] = page q^T: each warpgroup of a page, each warp of 16 keys. A comes
//      from registers: ldmatrix brings bytes as they are. Sums of 128 columns are multiplied with
//      the keys' scales and added up in fp32.
//   2. maximum of each row over both pages; probabilities relative to it, times the key's scale of
//      each 128 columns relative to the largest, to shared memory (e4m3)
//   3. out^T [512, rows] += factor * latent^T probabilities^T: each warpgroup half of the columns,
//      of both pages. ldmatrix.trans brings pairs of columns of pairs of keys; byte permutations
//      make four keys of one column of two of them.
// Parts of a row tile are joined within the launch: latent_decode_join_cuda.cuh.
//
// Numbers: queries and probabilities are sums of so many values in e4m3 as terms_of() says: two
// have 8 bits, as bf16 has, one has 4. Products of e4m3 or e5m2 are summed by the tensor cores over
// 128 columns or keys, beyond that in fp32. The rotary part in bf16 is multiplied as bf16, its
// queries rounded once.
//
// Determinism: as latent_decode_cuda.cu; the atomic maxima do not depend on their order.
//
// Limits: 512 + 64 columns; row tiles of up to 128 rows.
//
// Source: as latent_decode_cuda.cu.
//
// Measured: docs/kernels/latent_decode_8_bit.md.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "device/cuda/tile_load.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/attention/latent_decode_8_bit_cuda.h"
#include "ops/attention/latent_decode_join_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kLatent = 512, kRope = 64;
constexpr int kKeys = 64;          // of a page
constexpr int kSlabColumns = 128;  // that have a scale, and whose products are summed together
constexpr int kSlabs = kLatent / kSlabColumns;
constexpr int kBoxRowBytes = 128;                // the swizzle's width
constexpr int kGroups = 2, kGroupThreads = 128;  // warpgroups that compute
constexpr int kComputing = kGroups * kGroupThreads, kThreads = kComputing + kGroupThreads;
constexpr int kWarps = kComputing / 32;
constexpr int kOutBlocks = kLatent / kGroups / 64;  // of 64 columns, of a warpgroup
constexpr int kMostRows = 64;                       // of a block
constexpr int kMostShared = 227 * 1024;
constexpr int kBarrier = 1;  // of the computing threads

// A query or probability is the sum of so many values in e4m3: of two, as precise as bf16. The
// smaller one is multiplied first: where a sum is large already, the tensor cores cut it off.
constexpr int terms_of(int rows) { return rows > 32 ? 1 : 2; }

// Queries are brought below 2^8 and probabilities to 2^8 at most, which e4m3 holds, by powers of
// two.
constexpr int kQueryExponent = 7;
constexpr float kProbabilityExponent = 8;

// How far a row's scores may rise above its reference, as a power of two, before what has been
// summed is scaled. fp32 has room.
constexpr float kSlack = 64;

struct Arguments {
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* q_rope;
  const std::byte* pages;
  const int32_t* block_tables;
  const LatentDecodePart* parts;
  const int32_t* first_part;
  __nv_bfloat16* out;
  float* sums;     // [slots, 512 * rows of the tile / 2]: pairs of bf16, as threads have them
  float* weights;  // [weights, rows of the tile]: a part's, once for each block that reads it
  int32_t heads;
  int32_t tile_blocks;  // 1 or 2: that compute a row tile together
  float scale_log2;
};

// A page in shared memory.
template <typename Row>
struct PageLayout {
  static constexpr bool kIsLinear = Row::kBytes / 16 % 2 == 1;
  static constexpr int kBoxRow = 128, kBoxBytes = kKeys * kBoxRow;
  static constexpr int kNumBoxes = kIsLinear ? 1 : (Row::kBytes + kBoxRow - 1) / kBoxRow;
  static constexpr int kRowStride = kIsLinear ? Row::kBytes : kBoxRow;
  static constexpr int kBytes = kIsLinear ? kKeys * Row::kBytes : kNumBoxes * kBoxBytes;

  // Where 16 bytes of a row are, the page being at 0.
  __device__ static int at(int row, int byte) {
    if constexpr (kIsLinear) return row * kRowStride + byte;
    return byte / kBoxRow * kBoxBytes + row * kBoxRow + (byte % kBoxRow ^ row % 8 * 16);
  }
  // From an address, `bytes` further in the row: bits that both have set there are none.
  __device__ static uint32_t further(uint32_t address, int bytes) {
    if constexpr (kIsLinear) return address + bytes;
    return (address ^ bytes % kBoxRow) + bytes / kBoxRow * kBoxBytes;
  }
};

template <typename Row, int kRows>
struct SharedMemory {
  using Page = PageLayout<Row>;
  static constexpr int kTerms = terms_of(kRows);
  static constexpr int kBoxBytes = kRows * kBoxRowBytes;
  // Of the latent columns, each term; and one for the rotated ones, all terms in e4m3 or one in
  // bf16.
  static constexpr int kQueryBoxes = kTerms * kSlabs + 1, kRopeBox = kTerms * kSlabs;
  static constexpr int kScales = Row::kIsScaled ? kSlabs : 1;
  static constexpr int kOther = (kQueryBoxes + kScales * kTerms) * kBoxBytes + 4096;
  static constexpr int kStages = std::min(5, (kMostShared - kOther) / Page::kBytes);
  static_assert(Page::kBytes % 1024 == 0 && kStages >= kGroups);

  alignas(1024) uint8_t pages[kStages][Page::kBytes];
  alignas(1024) uint8_t queries[kQueryBoxes][kBoxBytes];
  // Of each scale and term: [rows, keys of two pages].
  alignas(1024) uint8_t probabilities[kScales][kTerms][kBoxBytes];
  // Of every second pair of pages, over all warps: the rows' largest scores, as integers in the
  // same order, and the keys' largest scales.
  alignas(16) int32_t maxima[2][kRows];
  alignas(16) float scale_maxima[2][kSlabs];
  // Of a pair of pages and each row: what its sums are to be multiplied with before they are added
  // to those before, and these before that.
  alignas(16) float factors[kRows], rescales[kRows];
  int32_t any_rescales;
  alignas(16) float sums[kWarps][kRows], references[kRows], inverses[kRows], weights[kRows];
  uint32_t largest_queries[kWarps];
  uint64_t arrived[kStages], read[kStages];
};

// Blocks of 16 bytes within a row of 128, as the swizzle permutes them.
__device__ int chunk_at(int row, int chunk) { return row * 128 + ((chunk ^ (row % 8)) * 16); }

// ---- copies: one warp

template <typename Row>
__device__ void copy_page(const CUtensorMap& map, const std::byte* pages, int64_t page, uint8_t* to,
                          uint64_t* arrived) {
  using Page = PageLayout<Row>;
  barrier_expect(arrived, Page::kBytes);
  if constexpr (Page::kIsLinear) {
    copy_bytes(to, pages + page * Page::kBytes, Page::kBytes, arrived);
  } else {
    for (int box = 0; box < Page::kNumBoxes; ++box) {
      copy_box(to + box * Page::kBoxBytes, &map, arrived, box * (Page::kBoxRow / 2),
               static_cast<int>(page) * kKeys);
    }
  }
}

// Pages that hold none of a sequence's new tokens were written by earlier steps: those are asked
// for before the launches before this one have ended.
template <typename Row, typename Shared>
__device__ void issue_pages(Shared& shared, const CUtensorMap& map, const Arguments& arguments,
                            int first_part) {
  const int lane = threadIdx.x % 32;
  constexpr int kWithin = LatentDecodePart::kPagesWithin;
  int turn = 0;
  for (int p = first_part, more = 1; more; ++p) {
    const LatentDecodePart part = arguments.parts[p];
    more = part.more;
    const int32_t* table = arguments.block_tables + part.first_page;
    int ahead = 0;  // lane's page of the next 32
    for (int t = 0; t < part.num_tiles; ++t, ++turn) {
      if (t % 32 == kWithin) ahead = t + lane < part.num_tiles ? table[t + lane] : 0;
      const int later = __shfl_sync(~0u, ahead, (t - kWithin) & 31);
      const int64_t page = t < kWithin ? part.pages[t] : later;
      const int stage = turn % Shared::kStages;
      if (t == part.old_tiles) wait_for_earlier_launches();
      if (lane != 0) continue;
      if (turn >= Shared::kStages) {
        if (Shared::kStages < 2 * kGroups) {
          prefetch_bytes(arguments.pages + page * (kKeys * Row::kBytes), kKeys * Row::kBytes);
        }
        barrier_wait(&shared.read[stage], (turn / Shared::kStages - 1) & 1);
      }
      copy_page<Row>(map, arguments.pages, page, shared.pages[stage], &shared.arrived[stage]);
    }
  }
}

// Floats as integers in the same order, and back.
__device__ inline int32_t ordered(float x) {
  const int32_t bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
__device__ inline float unordered(int32_t x) { return __int_as_float(x ^ (x >> 31 & 0x7FFFFFFF)); }

// ---- attention over one part
//
// A thread's registers of a [64, kRows] product: element j is row 16 * warp + lane / 4 (+ 8 if j &
// 2) of M and column 8 * (j / 4) + 2 * (lane % 4) + (j & 1) of N, so a thread has kOwn of the
// query rows; row_of(i) is the i-th. M is keys in the scores; in the values row m of a warp's 16 is
// column 2 m of its 16 bytes, row m + 8 is column 2 m + 1.
//
// What is reduced over a warp's keys ends with kKept rows a lane, from the lane's row_of(first_)
// on.

template <typename Row, int kRows>
class PartAttention {
 public:
  using Shared = SharedMemory<Row, kRows>;
  using Page = PageLayout<Row>;
  static constexpr int kElements = kRows / 2, kOwn = kRows / 4, kKept = std::max(1, kRows / 32);
  static constexpr int kTerms = Shared::kTerms;
  // What is summed over 128 columns or two pages before it is added to the rest; two of them at a
  // time where registers allow.
  static constexpr int kSums = kRows > 32 ? 1 : 2;
  // What the tensor cores sum of a slab's scores in one register: the fewer columns, the less is
  // cut off.
  static constexpr int kHalves = kRows > 32 ? 1 : 2;

  __device__ PartAttention(Shared& shared, const Arguments& arguments, int rank)
      : shared_(shared),
        arguments_(arguments),
        rank_(rank),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0)),
        thread_(threadIdx.x % kGroupThreads),
        warp_(thread_ / 32),
        lane_(threadIdx.x % 32),
        first_((lane_ / 16 * (kOwn / 2)) + lane_ / 8 % 2 * (kOwn / 4) + lane_ / 4 % 2 * (kOwn / 8)),
        queries_(shared_address(shared.queries)),
        probabilities_(shared_address(shared.probabilities)) {}

  __device__ void run(const LatentDecodePart& part) {
    load_queries(part);
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      reference_[k] = -INFINITY;
      sum_[k] = 0;
    }
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
      write_out(part);
    } else {
      write_partial(part);
    }
  }

 private:
  __device__ int row_of(int i) const { return i / 2 * 8 + 2 * (lane_ % 4) + (i & 1); }
  __device__ void meet() const { named_barrier(kBarrier, kComputing); }

  // ---- queries

  // A row's columns in 36 units of 16, several threads a row.
  __device__ void load_queries(const LatentDecodePart& part) {
    constexpr int kSharers = kComputing / kRows, kUnits = (kLatent + kRope) / 16;
    constexpr int kUnitsEach = (kUnits + kSharers - 1) / kSharers;
    wait_for_earlier_launches();
    meet();  // the part before has been computed
    const int row = threadIdx.x / kSharers, first = threadIdx.x % kSharers;
    // Rows beyond the part's compute its first one again; nobody reads what they give.
    const int in_tile = rank_ * kRows + row;
    const int64_t from = part.out_row + (in_tile < part.rows ? in_tile : 0);
    uint4 values[kUnitsEach][2];
#pragma unroll
    for (int u = 0; u < kUnitsEach; ++u) {
      const int unit = first + u * kSharers;
      const __nv_bfloat16* source = unit < kLatent / 16
                                        ? arguments_.q_latent + from * kLatent + unit * 16
                                        : arguments_.q_rope + from * kRope + (unit * 16 - kLatent);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        values[u][half] =
            unit < kUnits ? reinterpret_cast<const uint4*>(source)[half] : make_uint4(0, 0, 0, 0);
      }
    }
    const float up = scale_up(values);
    row_scale_ = arguments_.scale_log2 / up;
#pragma unroll
    for (int u = 0; u < kUnitsEach; ++u) {
      const int unit = first + u * kSharers;
      if (unit >= kUnits) break;
      Eight low = times(widen(values[u][0]), up), high = times(widen(values[u][1]), up);
      const bool is_rope = unit >= kLatent / 16;
      const int rope_unit = unit - kLatent / 16;
      if (Row::kRopeIsBf16 && is_rope) {
        uint8_t* const box = shared_.queries[Shared::kRopeBox];
        *reinterpret_cast<uint4*>(box + chunk_at(row, 2 * rope_unit)) = narrow(low);
        *reinterpret_cast<uint4*>(box + chunk_at(row, 2 * rope_unit + 1)) = narrow(high);
        continue;
      }
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const uint2 a = next_term(low, term), b = next_term(high, term);
        const int box = is_rope ? Shared::kRopeBox : term * kSlabs + unit / 8;
        const int chunk = is_rope ? term * (kRope / 16) + rope_unit : unit % 8;
        *reinterpret_cast<uint4*>(shared_.queries[box] + chunk_at(row, chunk)) =
            make_uint4(a.x, a.y, b.x, b.y);
      }
    }
    fence_async_proxy();
    meet();
  }

  __device__ static Eight times(Eight x, float factor) {
#pragma unroll
    for (float& v : x.v) v *= factor;
    return x;
  }

  // The leading bits of x that one value in e4m3 holds are taken from it; the last term is rounded.
  __device__ static float take_term(float& x, int term) {
    if (term == kTerms - 1) return x;
    const float leading = __uint_as_float(__float_as_uint(x) & 0xFFF00000);
    x -= leading;
    return leading;
  }
  __device__ static uint2 next_term(Eight& x, int term) {
    Eight leading;
#pragma unroll
    for (int i = 0; i < 8; ++i) leading.v[i] = take_term(x.v[i], term);
    return narrow_to_fp8<Fp8::kE4M3>(leading);
  }

  // The power of two that brings the block's largest value below 2^8. Scores' errors count as they
  // are, so rows with less need no other.
  template <int kUnitsEach>
  __device__ float scale_up(const uint4 (&values)[kUnitsEach][2]) const {
    uint32_t most = 0;  // of the magnitudes' bits
#pragma unroll
    for (int u = 0; u < kUnitsEach; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = values[u][half];
        most = __vmaxu2(__vmaxu2(most, v.x & 0x7FFF7FFF), v.y & 0x7FFF7FFF);
        most = __vmaxu2(__vmaxu2(most, v.z & 0x7FFF7FFF), v.w & 0x7FFF7FFF);
      }
    }
    most = __reduce_max_sync(~0u, max(most >> 16, most & 0xFFFF));
    if (lane_ == 0) shared_.largest_queries[threadIdx.x / 32] = most;
    meet();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = max(most, shared_.largest_queries[w]);
    const int exponent = max(15, static_cast<int>(most) >> 7);
    return __int_as_float((2 * 127 + kQueryExponent - exponent) << 23);
  }

  // ---- two pages, one of each warpgroup's scores

  __device__ void two_pages(const LatentDecodePart& part, int t, int pages) {
    const int buffer = pairs_ & 1;
    float scores[kElements];
    float4 scales[2];  // of keys 16 * warp + lane / 4 and 8 further
    if (group_ < pages) {
      multiply_keys(part, t + group_, scores, scales);
      mask(part, (part.first_tile + t + group_) * kKeys, scores);
      send_maxima(buffer, scores, scales);
    }
    meet();
    update_references(buffer);
    float4 scale_maxima;
    if constexpr (Row::kIsScaled) {
      scale_maxima = *reinterpret_cast<const float4*>(shared_.scale_maxima[buffer]);
    }
    if (group_ < pages) write_probabilities(buffer, scores, scales, scale_maxima);
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
    const int turn = turn_ + group_, stage = turn % Shared::kStages;
    barrier_wait(&shared_.arrived[stage], turn / Shared::kStages & 1);
    const int valid = part.kv_len - (part.first_tile + t) * kKeys;
    if (valid < kKeys) clear_beyond(stage, valid);
    // Of ldmatrix: rows 0 to 7 and 8 to 15 of the warp's keys, at two times 16 bytes.
    const uint32_t from =
        shared_address(shared_.pages[stage]) + Page::at(16 * warp_ + lane_ % 16, lane_ / 16 * 16);
    if constexpr (Row::kIsScaled) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = Page::at(16 * warp_ + lane_ / 4 + half * 8, Row::kScalesAt);
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
      if (kSums > 1 && next < kSlabs) {
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
        float sum = sums[slab % kSums][0][j];
        if constexpr (kHalves > 1) sum += sums[slab % kSums][1][j];
        if constexpr (Row::kIsScaled) sum *= component(scales[j / 2 % 2], slab);
        scores[j] += sum;
      }
      if (kSums == 1 && next < kSlabs) multiply_slab(from, next, a[0], sums[0]);
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
    constexpr int kSteps = 4, kHalfSteps = kSteps / kHalves;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrices(a[step], Page::further(from, slab * kSlabColumns + step * 32));
    }
    mma_fence();
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        mma_64_fp8<Row::kType>(sums[step / kHalfSteps], a[step],
                               query_at(term * kSlabs + slab, step * 32),
                               term < kTerms - 1 || step % kHalfSteps > 0);
      }
    }
    mma_commit();
  }

  __device__ void multiply_rope(uint32_t from, float (&sums)[kElements]) {
    constexpr int kSteps = Row::kRopeIsBf16 ? 4 : 2;  // of 32 bytes
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

  // Rows of a page past the sequence's end may hold anything, NaN too: zero times that is not zero.
  // A warp clears those of its own 16 keys, which no other warp reads before all have met.
  __device__ void clear_beyond(int stage, int valid) {
    constexpr int kVectors = Row::kBytes / 16;
    const int first = max(valid, 16 * warp_), end = 16 * warp_ + 16;
    for (int i = first * kVectors + lane_; i < end * kVectors; i += 32) {
      *reinterpret_cast<uint4*>(shared_.pages[stage] + Page::at(i / kVectors, i % kVectors * 16)) =
          make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
  }

  // ---- softmax

  __device__ void mask(const LatentDecodePart& part, int first_key, float (&scores)[kElements]) {
    const int first_limit = part.kv_len - part.num_queries + 1;  // of the first new token
    if (first_key + kKeys <= first_limit) return;
    const int key = first_key + 16 * warp_ + lane_ / 4;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const int row = part.first_row + rank_ * kRows + row_of(j / 4 * 2 + (j & 1));
      if (key + (j & 2 ? 8 : 0) >= first_limit + row / arguments_.heads) scores[j] = -INFINITY;
    }
  }

  // Of each of a thread's rows one value; reduced over the lanes that have the same rows, so that
  // a lane keeps kKept of them.
  template <int kDistance = 16, typename Reduce>
  __device__ void reduce_over_keys(float (&v)[kOwn], const Reduce& reduce) const {
    constexpr int kCount = kOwn * kDistance / 32;  // that are kept after this step
    if constexpr (kCount > 0) {
      const bool upper = lane_ & kDistance;
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
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      atomicMax(&shared_.maxima[buffer][row_of(first_ + k)], ordered(most[k]));
    }
    if constexpr (Row::kIsScaled) {
      const int slab = lane_ % 4;
      float largest = fmaxf(component(scales[0], slab), component(scales[1], slab));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      // Not negative: as integers in the same order.
      if (lane_ < kSlabs) {
        atomicMax(reinterpret_cast<int32_t*>(&shared_.scale_maxima[buffer][slab]),
                  __float_as_int(largest));
      }
    }
  }

  // Every warp does the same for the rows that its lanes keep; the first one tells.
  __device__ void update_references(int buffer) {
    bool rescales = false;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int row = row_of(first_ + k);
      const float most = unordered(shared_.maxima[buffer][row]) * row_scale_;
      float before = 1;
      if (most > reference_[k] + kSlack) {
        before = exp2_fast(reference_[k] - most);
        rescales |= reference_[k] != -INFINITY;
        sum_[k] *= before;
        reference_[k] = most;
      }
      factor_[k] = most == -INFINITY ? 0 : exp2_fast(most - reference_[k]);
      if (threadIdx.x < 32) {
        shared_.factors[row] = factor_[k];
        shared_.rescales[row] = before;
      }
    }
    if (threadIdx.x < 32) {
      rescales = __any_sync(~0u, rescales);
      if (lane_ == 0) shared_.any_rescales = rescales;
    }
  }

  __device__ void write_probabilities(int buffer, float (&scores)[kElements],
                                      const float4 (&scales)[2], const float4& scale_maxima) {
    float partial[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float most = unordered(shared_.maxima[buffer][row_of(i)]) * row_scale_;
      // Of a row that sees no key of these every score is -infinity.
      const float base = kProbabilityExponent - (most == -INFINITY ? 0 : most);
      const int j = i / 2 * 4 + (i & 1);
      scores[j] = exp2_fast(scores[j] * row_scale_ + base);
      scores[j + 2] = exp2_fast(scores[j + 2] * row_scale_ + base);
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
      constexpr int kTiles = kRows / 8;  // of 8 rows
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
          // A key and the one 8 further side by side: so multiply_values() has them.
          packed[term * kTiles + tile] = pack_fp8<Fp8::kE4M3>(x[0], x[2], x[1], x[3]);
        }
      }
#pragma unroll
      for (int first = 0; first < kTerms * kTiles; first += 4) {
        const int matrix = first + lane_ / 8, term = matrix / kTiles;
        const uint32_t box = probabilities_ + (s * kTerms + term) * Shared::kBoxBytes;
        const int row = matrix % kTiles * 8 + lane_ % 8;
        store_matrices_transposed(box + chunk_at(row, group_ * 4 + warp_), packed[first],
                                  packed[first + 1], packed[first + 2], packed[first + 3]);
      }
    }
    reduce_over_keys(partial, [](float a, float b) { return a + b; });
#pragma unroll
    for (int k = 0; k < kKept; ++k) sum_[k] += factor_[k] * partial[k];
  }

  // ---- values

  // This warpgroup's columns of kPages pages.
  template <int kPages>
  __device__ void multiply_values(const float4& scale_maxima) {
    float sums[kSums][kElements];
    uint32_t a[kSums][kPages * 2][4];
    uint32_t from[kPages];
#pragma unroll
    for (int p = 0; p < kPages; ++p) {
      const int turn = turn_ + p, stage = turn % Shared::kStages;
      // The other warpgroup's page: its arrival orders the copy before this thread's reads.
      if (p != group_) barrier_wait(&shared_.arrived[stage], turn / Shared::kStages & 1);
      // Of ldmatrix: keys 0 to 7, 8 to 15, 16 to 23, 24 to 31 at the warp's 16 columns.
      from[p] = shared_address(shared_.pages[stage]) +
                Page::at(lane_, group_ * (kOutBlocks * 64) + warp_ * 16);
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
          if (lane_ == 0) barrier_arrive(&shared_.read[(turn_ + p) % Shared::kStages]);
        }
      }
      if (kSums > 1 && next < kOutBlocks) {
        multiply_block<kPages>(from, next, a[next % kSums], sums[next % kSums]);
        mma_wait<1>();
      } else {
        mma_wait<0>();
      }
      pin(sums[block % kSums]);
      const int slab_in_group = block * 64 / kSlabColumns;
      const float scale = group_ == 0 ? component(scale_maxima, slab_in_group)
                                      : component(scale_maxima, kSlabs / kGroups + slab_in_group);
#pragma unroll
      for (int j = 0; j < kElements; j += 4) {
        float2 factor = *reinterpret_cast<const float2*>(shared_.factors + row_of(j / 2));
        if constexpr (Row::kIsScaled) factor.x *= scale, factor.y *= scale;
        out_[block][j] += factor.x * sums[block % kSums][j];
        out_[block][j + 1] += factor.y * sums[block % kSums][j + 1];
        out_[block][j + 2] += factor.x * sums[block % kSums][j + 2];
        out_[block][j + 3] += factor.y * sums[block % kSums][j + 3];
      }
      if (kSums == 1 && next < kOutBlocks) multiply_block<kPages>(from, next, a[0], sums[0]);
    }
  }

  // Of the pair after the next one.
  __device__ void clear_maxima() {
    const int buffer = pairs_ & 1;
    if (threadIdx.x < kRows) shared_.maxima[buffer][threadIdx.x] = ordered(-INFINITY);
    if (Row::kIsScaled && threadIdx.x < kSlabs) shared_.scale_maxima[buffer][threadIdx.x] = 0;
  }

  __device__ void rescale() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float before = shared_.rescales[row_of(i)];
      const int j = i / 2 * 4 + (i & 1);
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
        out_[block][j] *= before;
        out_[block][j + 2] *= before;
      }
    }
  }

  // Begins the products of the pages' keys in 64 columns.
  template <int kPages>
  __device__ void multiply_block(const uint32_t (&from)[kPages], int block,
                                 uint32_t (&a)[kPages * 2][4], float (&sums)[kElements]) {
#pragma unroll
    for (int step = 0; step < kPages * 2; ++step) {
      load_values(Page::further(from[step / 2] + step % 2 * 32 * Page::kRowStride, block * 64),
                  a[step]);
    }
    const int scale = Row::kIsScaled ? (group_ * kOutBlocks + block) * 64 / kSlabColumns : 0;
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

  // 32 keys of the warp's 16 columns as A: of the even columns, then of the odd ones; a key and the
  // one 8 further side by side.
  __device__ static void load_values(uint32_t from, uint32_t (&a)[4]) {
    uint32_t bytes[4];  // of 8 keys each: two columns of a key, and of the next
    load_matrices_transposed(bytes, from);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = __byte_perm(bytes[2 * half], bytes[2 * half + 1], 0x6240);
      a[2 * half + 1] = __byte_perm(bytes[2 * half], bytes[2 * half + 1], 0x7351);
    }
  }

  // ---- results

  __device__ void add_up_sums() {
    if (kOwn >= 8 || lane_ % 8 < 4) {
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const int row = row_of(first_ + k);
        shared_.sums[threadIdx.x / 32][row] = sum_[k];
        if (threadIdx.x < 32) shared_.references[row] = reference_[k];
      }
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

  // Through the memory of the queries, which nobody needs any more: rows leave in runs of 512
  // bytes.
  __device__ void write_out(const LatentDecodePart& part) {
    // Rows of 16 bytes more than the result's: no two lanes' words in one bank.
    constexpr int kRowBytes = kLatent * 2 + 16, kOnce = kRows < 32 ? kRows : 32;
    static_assert(kOnce * kRowBytes <= sizeof(shared_.queries));
    uint8_t* const memory = shared_.queries[0];
#pragma unroll
    for (int first = 0; first < kRows; first += kOnce) {
      if (first > 0) meet();
#pragma unroll
      for (int i = first / 4; i < (first + kOnce) / 4; ++i) {
        const float inverse = shared_.inverses[row_of(i)];
        const int j = i / 2 * 4 + (i & 1);
#pragma unroll
        for (int block = 0; block < kOutBlocks; ++block) {
          const int column = (group_ * kOutBlocks + block) * 64 + 16 * warp_ + lane_ / 4 * 2;
          *reinterpret_cast<uint32_t*>(memory + (row_of(i) - first) * kRowBytes + column * 2) =
              pack_bf16(out_[block][j] * inverse, out_[block][j + 2] * inverse);
        }
      }
      meet();
      constexpr int kChunks = kLatent / 8;
#pragma unroll
      for (int u = 0; u < kOnce * kChunks / kComputing; ++u) {
        const int i = threadIdx.x + u * kComputing, row = i / kChunks;
        const int in_tile = rank_ * kRows + first + row;
        if (in_tile >= part.rows) continue;
        reinterpret_cast<uint4*>(arguments_.out +
                                 (int64_t{part.out_row} + in_tile) * kLatent)[i % kChunks] =
            *reinterpret_cast<const uint4*>(memory + row * kRowBytes + i % kChunks * 16);
      }
    }
  }

  __device__ void write_partial(const LatentDecodePart& part) {
    // Every reader has all parts' weights of its own in one run.
    for (int x = threadIdx.x; x < part.num_splits * (kRows / 4); x += kComputing) {
      const int row = x % (kRows / 4) * 4;
      const int64_t its = part.first_weight + x / (kRows / 4) * part.num_splits + part.split;
      store_shared_words(arguments_.weights + (its * arguments_.tile_blocks + rank_) * kRows + row,
                         *reinterpret_cast<const float4*>(shared_.weights + row));
    }
    const int64_t slot = int64_t{part.first_slot + part.split} * arguments_.tile_blocks + rank_;
    float* sums = arguments_.sums + slot * (kLatent * kRows / 2) +
                  group_ * (kLatent * kRows / 2 / kGroups) + thread_ * 4;
#pragma unroll
    for (int j = 0; j < kElements; j += 4) {
      const float2 inverse = *reinterpret_cast<const float2*>(shared_.inverses + row_of(j / 2));
#pragma unroll
      for (int block = 0; block < kOutBlocks; block += 2) {
        const auto pair = [&](int b, int next) {
          const float factor = next == 0 ? inverse.x : inverse.y;
          return present_pair(out_[b][j + next] * factor, out_[b][j + 2 + next] * factor);
        };
        store_shared_words(
            sums + (block / 2 * (kElements / 4) + j / 4) * (4 * kGroupThreads),
            make_float4(pair(block, 0), pair(block, 1), pair(block + 1, 0), pair(block + 1, 1)));
      }
    }
  }

  Shared& shared_;
  const Arguments& arguments_;
  const int rank_, group_, thread_, warp_, lane_, first_;
  const uint32_t queries_, probabilities_;
  int turn_ = 0, pairs_ = 0;  // pages and pairs of them since the launch
  float row_scale_;           // of the queries' products, to the logarithm of base 2
  float reference_[kKept], sum_[kKept], factor_[kKept];
  float out_[kOutBlocks][kElements];
};

// Where write_partial() puts what: a vector is of two neighbouring rows and of two blocks of 64
// columns.
template <int kTileRows>
struct SumsLayout {
  static constexpr int kRows = kTileRows, kThreads = kComputing;
  static constexpr int kBarrier = fathom::cuda::kBarrier;
  static constexpr int kVectors = kLatent * kRows / 8;
  static constexpr int kPairColumn = 1, kSecondRow = 1, kSecondColumn = 64;

  __device__ static int row_of(uint32_t vector) {
    return vector / kGroupThreads % (kRows / 8) * 8 + 2 * (vector % 4);
  }
  __device__ static int column_of(uint32_t vector) {
    const uint32_t thread = vector % kGroupThreads;
    return vector / (kGroupThreads * kRows / 8) * 128 + thread / 32 * 16 + thread % 32 / 4 * 2;
  }
  __device__ static int weight_at(uint32_t vector) { return row_of(vector); }
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
  const int rank = blockIdx.x & (arguments.tile_blocks - 1);
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
  const int first_part =
      __shfl_sync(~0u, arguments.first_part[blockIdx.x >> (arguments.tile_blocks - 1)], 0);

  if (warp >= kWarps) {
    give_registers<24>();
    if (warp == kWarps) issue_pages<Row>(shared, map, arguments, first_part);
  } else {
    take_registers<240>();
    {
      PartAttention<Row, kRows> attention(shared, arguments, rank);
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
      const int blocks = arguments.tile_blocks;
      const int64_t first_slot = int64_t{part.first_slot} * blocks + rank;
      const int64_t first_weight =
          (int64_t{part.first_weight} + part.split * part.num_splits) * blocks + rank;
      Joining(part, part.rows - rank * kRows, arguments.sums + first_slot * (4 * Joining::kVectors),
              Joining::kVectors * blocks, arguments.weights + first_weight * kRows, kRows * blocks,
              arguments.out + (int64_t{part.out_row} + rank * kRows) * kLatent,
              reinterpret_cast<typename Joining::Memory&>(shared.pages))
          .run();
      named_barrier(kBarrier, kComputing);
    }
  }
}

template <typename Row, int kRows>
void launch_rows(const CUtensorMap& map, const Arguments& arguments, int num_blocks,
                 cudaStream_t stream) {
  const auto kernel = latent_decode_8_bit_kernel<Row, kRows>;
  constexpr int kBytes = sizeof(SharedMemory<Row, kRows>);
  static const bool prepared = (allow_shared_memory(kernel, kBytes), true);
  static_cast<void>(prepared);
  launch(kernel,
         {.blocks = static_cast<unsigned>(num_blocks), .threads = kThreads, .shared_bytes = kBytes},
         stream, map, arguments);
}

}  // namespace

void latent_decode_8_bit(int tile_rows, int num_multiprocessors,
                         const LatentDecodeArguments& arguments, cudaStream_t stream) {
  Arguments inner;
  inner.q_latent = static_cast<const __nv_bfloat16*>(arguments.q_latent);
  inner.q_rope = static_cast<const __nv_bfloat16*>(arguments.q_rope);
  inner.pages = static_cast<const std::byte*>(arguments.pages);
  inner.block_tables = arguments.block_tables;
  inner.parts = arguments.parts;
  inner.first_part = arguments.first_part;
  inner.out = static_cast<__nv_bfloat16*>(arguments.out);
  inner.sums = arguments.scratch;
  inner.weights = arguments.scratch + latent_decode_scratch(num_multiprocessors).sums;
  inner.heads = arguments.heads;
  inner.tile_blocks = std::max(1, tile_rows / kMostRows);
  constexpr float kLog2E = 1.4426950408889634f;
  inner.scale_log2 = arguments.softmax_scale * kLog2E;
  with_latent_row(arguments.format, [&]<typename Row>(Row) {
    if constexpr (!Row::kIsBf16) {
      // To the copy engine a page is of bf16 with half as many columns; what a box has beyond a row
      // is zero.
      CUtensorMap map = {};
      if constexpr (!PageLayout<Row>::kIsLinear) {
        map = bf16_map(arguments.pages,
                       {.rows = arguments.num_pages * kKeys, .columns = Row::kBytes / 2},
                       {.rows = kKeys, .columns = PageLayout<Row>::kBoxRow / 2});
      }
      const auto launch_for = tile_rows == 16   ? launch_rows<Row, 16>
                              : tile_rows == 32 ? launch_rows<Row, 32>
                                                : launch_rows<Row, kMostRows>;
      launch_for(map, inner, num_multiprocessors / inner.tile_blocks * inner.tile_blocks, stream);
    }
  });
}

}  // namespace fathom::cuda
