// What: out = softmax(scale * [q_latent q_rope] [latent rope]^T) latent, for 1 to 8 new tokens of
// each sequence, over a cache of 8 bits: e4m3 with fp32 scales for each 128 and a rotary key in
// bf16, or all of it in e4m3 or e5m2 (cache/latent_row.h).
//
// Inputs/outputs: latent_decode_cuda.h. Parts of work: latent_decode_plan.h.
//
// Layout: one block a multiprocessor: two warpgroups that compute, a warp that issues copies. A
// stage holds one page so that neither reading of it (keys by columns, columns by keys) meets bank
// conflicts: rows of 656 bytes, an odd number of 16, as they lie in the cache, in one copy; rows of
// 576 in boxes of 128 columns with the 128-byte swizzle. Queries lie beside them as 9 boxes of
// [rows, 64 columns], probabilities as [rows, 64 keys] for each page and scale.
//
// Algorithm, two pages at a time; rows are the N of the tensor core's instruction:
//   1. scores^T [keys, rows] = page q^T: each warpgroup of a page, each warp of 16 keys. A comes
//      from registers: ldmatrix brings bytes, one conversion makes two f16 of them, which is exact.
//      Scales multiply the sums of 128 columns each.
//   2. running maximum of each row over both pages; probabilities times the key's scale of each 128
//      columns to shared memory (f16)
//   3. out^T [512, rows] += latent^T probabilities^T: each warpgroup half of the columns, of both
//      pages. ldmatrix.trans brings pairs of columns of pairs of keys; a byte permutation makes
//      pairs of keys of them, then they are converted.
// Parts of a row tile are joined within the launch: latent_decode_join_cuda.cuh.
//
// Numbers: products of f16 (11 bits, and the cache's values have 4) with fp32 sums. Of each query
// row the largest value is brought to 2^14 by a power of two, so that f16 holds it. The rotary part
// in bf16 is multiplied as bf16.
//
// Determinism: as latent_decode_cuda.cu.
//
// Limits: 512 + 64 columns; row tiles of up to 32 rows. A cached value times its scale is below
// 114,000.
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
constexpr int kKeys = 64;        // of a page
constexpr int kBoxColumns = 64;  // of f16: 128 bytes, the swizzle's width
constexpr int kBoxes = (kLatent + kRope) / kBoxColumns;
constexpr int kGroups = 2, kGroupThreads = 128;  // warpgroups that compute
constexpr int kComputing = kGroups * kGroupThreads, kThreads = kComputing + kGroupThreads;
constexpr int kWarps = kComputing / 32;
constexpr int kOutBlocks = kLatent / kGroups / 64;  // of 64 columns, of a warpgroup
constexpr int kMostShared = 227 * 1024;
constexpr int kBarrier = 1;  // of the computing threads

// Probabilities are multiplied by it, so that f16 holds those times a small scale.
constexpr float kProbabilityUnit = 256;

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
  static constexpr int kBoxBytes = kRows * 128;
  static constexpr int kScales = Row::kIsScaled ? Row::kScales : 1;
  static constexpr int kOther = (kBoxes + kGroups * kScales) * kBoxBytes + 4096;
  static constexpr int kStages = std::min(5, (kMostShared - kOther) / Page::kBytes);
  static_assert(Page::kBytes % 1024 == 0 && kStages >= kGroups);

  alignas(1024) uint8_t pages[kStages][Page::kBytes];
  alignas(1024) uint8_t queries[kBoxes][kBoxBytes];
  alignas(1024) uint8_t probabilities[kGroups][kScales][kBoxBytes];
  float exchange[kWarps][kRows];
  alignas(16) float weights[kRows];
  float row_scale[kRows];  // of its queries' products, to the logarithm of base 2
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
        barrier_wait(&shared.read[stage], (turn / Shared::kStages - 1) & 1);
      }
      copy_page<Row>(map, arguments.pages, page, shared.pages[stage], &shared.arrived[stage]);
    }
  }
}

template <Half kType, int kElements>
__device__ void multiply(float (&d)[kElements], const uint32_t (&a)[4], uint64_t b, int add) {
  mma_64<kType>(d, a[0], a[1], a[2], a[3], b, add);
}

// ---- attention over one part
//
// A thread's registers of a [64, kRows] product: element j is row 16 * warp + lane / 4 (+ 8 if j &
// 2) of M and column 8 * (j / 4) + 2 * (lane % 4) + (j & 1) of N, so a thread has kRows / 4 of the
// query rows; row_of(i) is the i-th. M is keys in the scores; in the values row m of a warp's 16 is
// column 2 m of its 16 bytes, row m + 8 is column 2 m + 1.

template <typename Row, int kRows>
class PartAttention {
 public:
  using Shared = SharedMemory<Row, kRows>;
  using Page = PageLayout<Row>;
  static constexpr int kElements = kRows / 2, kOwn = kRows / 4;

  __device__ PartAttention(Shared& shared, const Arguments& arguments)
      : shared_(shared),
        arguments_(arguments),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0)),
        thread_(threadIdx.x % kGroupThreads),
        warp_(thread_ / 32),
        lane_(threadIdx.x % 32),
        queries_(shared_address(shared.queries)),
        probabilities_(shared_address(shared.probabilities)) {}

  __device__ void run(const LatentDecodePart& part) {
    load_queries(part);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      maximum_[i] = -INFINITY;
      sum_[i] = 0;
      row_scale_[i] = shared_.row_scale[row_of(i)];
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

  // A row's columns in 36 units of 16, several threads a row. Within a unit pairs of columns lie in
  // the order in which the keys' conversion yields them: 0, 2, 4, 6, then 1, 3, 5, 7.
  __device__ void load_queries(const LatentDecodePart& part) {
    constexpr int kSharers = kComputing / kRows, kUnits = (kLatent + kRope) / 16;
    constexpr int kUnitsEach = (kUnits + kSharers - 1) / kSharers;
    wait_for_earlier_launches();
    meet();  // the part before has been computed
    const int row = threadIdx.x / kSharers, first = threadIdx.x % kSharers;
    // Rows beyond the part's compute the first one's again; nobody reads what they give.
    const int64_t from = part.out_row + (row < part.rows ? row : 0);
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
    const float up = scale_up(values, kSharers);
    if (first == 0) shared_.row_scale[row] = arguments_.scale_log2 / up;
#pragma unroll
    for (int u = 0; u < kUnitsEach; ++u) {
      const int unit = first + u * kSharers;
      if (unit >= kUnits) break;
      const Eight low = times(widen(values[u][0]), up), high = times(widen(values[u][1]), up);
      uint8_t* box = shared_.queries[unit / 4];
      uint4 chunks[2];
      if (Row::kRopeIsBf16 && unit >= kLatent / 16) {
        chunks[0] = narrow(low);
        chunks[1] = narrow(high);
      } else {
        chunks[0] = make_uint4(pack_f16(low.v[0], low.v[1]), pack_f16(low.v[4], low.v[5]),
                               pack_f16(high.v[0], high.v[1]), pack_f16(high.v[4], high.v[5]));
        chunks[1] = make_uint4(pack_f16(low.v[2], low.v[3]), pack_f16(low.v[6], low.v[7]),
                               pack_f16(high.v[2], high.v[3]), pack_f16(high.v[6], high.v[7]));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint4*>(box + chunk_at(row, unit % 4 * 2 + half)) = chunks[half];
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

  // The power of two that brings the row's largest value to 2^14.
  template <int kUnitsEach>
  __device__ static float scale_up(const uint4 (&values)[kUnitsEach][2], int sharers) {
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
    for (int distance = 1; distance < sharers; distance *= 2) {
      most = __vmaxu2(most, __shfl_xor_sync(~0u, most, distance));
    }
    const int exponent = max(15, static_cast<int>(max(most >> 16, most & 0xFFFF)) >> 7);
    return __int_as_float((268 - exponent) << 23);
  }

  __device__ void two_pages(const LatentDecodePart& part, int t, int pages) {
    float scores[kElements];
    float4 scales[2];  // of keys 16 * warp + lane / 4 and 8 further
    if (group_ < pages) {
      multiply_keys(part, t + group_, scores, scales);
      mask(part, (part.first_tile + t + group_) * kKeys, scores);
    } else {
#pragma unroll
      for (float& score : scores) score = -INFINITY;
    }
    float factor[kOwn];
    const bool grew = update_maximum(scores, factor);
    if (group_ < pages) write_probabilities(scores, scales);
    if (__any_sync(~0u, grew)) {
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) out_[block][j] *= factor[j / 4 * 2 + (j & 1)];
      }
    }
    fence_async_proxy();
    meet();
    for (int p = 0; p < pages; ++p) multiply_values(p);
    turn_ += pages;
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

    constexpr int kSlabs = kLatent / 128;
    float sums[2][kElements];  // of 128 columns, of the next 128
    multiply_rope(from, scores);
    multiply_slab(from, 0, sums[0]);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      if (slab + 1 < kSlabs) multiply_slab(from, slab + 1, sums[(slab + 1) % 2]);
      if (slab + 1 < kSlabs) {
        mma_wait<1>();
      } else {
        mma_wait<0>();
      }
      if (slab == 0) pin(scores);
      pin(sums[slab % 2]);
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if constexpr (Row::kIsScaled) {
          scores[j] += sums[slab % 2][j] * component(scales[j / 2 % 2], slab);
        } else {
          scores[j] += sums[slab % 2][j];
        }
      }
    }
  }

  __device__ static float component(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }

  // 32 bytes of the warp's 16 keys, as two A operands.
  __device__ static void load_keys(uint32_t from, uint32_t (&a)[2][4]) {
    uint32_t bytes[4];
    load_matrices(bytes, from);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t four = bytes[step * 2 + row];
        a[step][row] = fp8_to_f16<Row::kType>(static_cast<uint16_t>(four));
        a[step][row + 2] = fp8_to_f16<Row::kType>(static_cast<uint16_t>(four >> 16));
      }
    }
  }

  __device__ uint64_t query_at(int column) const {
    return swizzled_matrix(
        queries_ + column / kBoxColumns * Shared::kBoxBytes + column % kBoxColumns * 2, 1024);
  }

  __device__ void multiply_slab(uint32_t from, int slab, float (&sums)[kElements]) {
    uint32_t a[8][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      load_keys(Page::further(from, slab * 128 + pair * 32),
                reinterpret_cast<uint32_t(&)[2][4]>(a[pair * 2]));
    }
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      multiply<Half::kF16>(sums, a[step], query_at(slab * 128 + step * 16), step > 0);
    }
    mma_commit();
  }

  __device__ void multiply_rope(uint32_t from, float (&sums)[kElements]) {
    uint32_t a[4][4];
    if constexpr (Row::kRopeIsBf16) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        load_matrices(a[step], Page::further(from, Row::kRopeAt + step * 32));
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        load_keys(Page::further(from, Row::kRopeAt + pair * 32),
                  reinterpret_cast<uint32_t(&)[2][4]>(a[pair * 2]));
      }
    }
    mma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      constexpr Half kType = Row::kRopeIsBf16 ? Half::kBF16 : Half::kF16;
      multiply<kType>(sums, a[step], query_at(kLatent + step * 16), step > 0);
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
      const int row = part.first_row + row_of(j / 4 * 2 + (j & 1));
      if (key + (j & 2 ? 8 : 0) >= first_limit + row / arguments_.heads) scores[j] = -INFINITY;
    }
  }

  // Of each row over both pages, that is over the block. True where a maximum of this thread's rows
  // has grown: what has been summed is then to be multiplied by its factor.
  __device__ bool update_maximum(const float (&scores)[kElements], float (&factor)[kOwn]) {
    float(*exchange)[kRows] = shared_.exchange;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int j = i / 2 * 4 + (i & 1);
      float most = fmaxf(scores[j], scores[j + 2]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
      }
      if (lane_ < 4) exchange[group_ * 4 + warp_][row_of(i)] = most;
    }
    meet();
    bool grew = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float most = exchange[0][row_of(i)];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) most = fmaxf(most, exchange[w][row_of(i)]);
      most *= row_scale_[i];
      factor[i] = 1;
      if (most > maximum_[i]) {
        factor[i] = exp2_fast(maximum_[i] - most);
        maximum_[i] = most;
        sum_[i] *= factor[i];
        grew = true;
      }
    }
    return grew;
  }

  __device__ void write_probabilities(float (&scores)[kElements], const float4 (&scales)[2]) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const int i = j / 4 * 2 + (j & 1);
      // Of a row that has seen no key yet every score is -infinity.
      const float most = maximum_[i] == -INFINITY ? 0 : maximum_[i];
      scores[j] = exp2_fast(scores[j] * row_scale_[i] - most);
      sum_[i] += scores[j];
    }
#pragma unroll
    for (int s = 0; s < Shared::kScales; ++s) {
      float scale[2] = {kProbabilityUnit, kProbabilityUnit};
      if constexpr (Row::kIsScaled) {
        scale[0] *= component(scales[0], s);
        scale[1] *= component(scales[1], s);
      }
      uint32_t packed[kElements / 2];  // 2j + h: rows 8j …, keys h * 8 …
#pragma unroll
      for (int j = 0; j < kElements; j += 2) {
        const float factor = scale[j / 2 % 2];
        packed[j / 2] = pack_f16(scores[j] * factor, scores[j + 1] * factor);
      }
      const uint32_t to = probabilities_ + (group_ * Shared::kScales + s) * Shared::kBoxBytes;
#pragma unroll
      for (int j = 0; j < kRows / 8; j += 2) {
        const int matrix = lane_ / 8, row = (j + matrix / 2) * 8 + lane_ % 8;
        store_matrices_transposed(to + chunk_at(row, 2 * warp_ + (matrix & 1)), packed[2 * j],
                                  packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
      }
    }
  }

  // ---- values

  // Page p of the two, this warpgroup's columns.
  __device__ void multiply_values(int p) {
    const int turn = turn_ + p, stage = turn % Shared::kStages;
    // The other warpgroup's page: its arrival orders the copy before this thread's reads.
    if (p != group_) barrier_wait(&shared_.arrived[stage], turn / Shared::kStages & 1);
    // Of ldmatrix: keys 0 to 7, 8 to 15, 16 to 23, 24 to 31 at the warp's 16 columns.
    const uint32_t from = shared_address(shared_.pages[stage]) +
                          Page::at(lane_, group_ * (kOutBlocks * 64) + warp_ * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[kOutBlocks][2][4];
#pragma unroll
      for (int block = 0; block < kOutBlocks; ++block) {
        load_values(Page::further(from + half * 32 * Page::kRowStride, block * 64), a[block]);
      }
      mma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int block = 0; block < kOutBlocks; ++block) {
          const int scale =
              Row::kIsScaled ? (group_ * kOutBlocks + block) * 64 / (kLatent / Shared::kScales) : 0;
          const uint32_t to = probabilities_ + (p * Shared::kScales + scale) * Shared::kBoxBytes +
                              (half * 2 + step) * 32;
          multiply<Half::kF16>(out_[block], a[block][step], swizzled_matrix(to, 1024), 1);
        }
      }
      mma_commit();
    }
    mma_wait();
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) pin(out_[block]);
    __syncwarp();
    if (lane_ == 0) barrier_arrive(&shared_.read[stage]);
  }

  // 32 keys of the warp's 16 columns, as two A operands: pairs of keys of the even columns, then of
  // the odd ones.
  __device__ static void load_values(uint32_t from, uint32_t (&a)[2][4]) {
    uint32_t bytes[4];
    load_matrices_transposed(bytes, from);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int keys = 0; keys < 2; ++keys) {
        const uint32_t four = bytes[step * 2 + keys];  // two keys of two columns
        const auto even = static_cast<uint16_t>(__byte_perm(four, 0, 0x4420));
        const auto odd = static_cast<uint16_t>(__byte_perm(four, 0, 0x4431));
        a[step][keys * 2] = fp8_to_f16<Row::kType>(even);
        a[step][keys * 2 + 1] = fp8_to_f16<Row::kType>(odd);
      }
    }
  }

  // ---- results

  __device__ void add_up_sums() {
    float(*exchange)[kRows] = shared_.exchange;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum_[i] += __shfl_xor_sync(~0u, sum_[i], distance);
      }
      if (lane_ < 4) exchange[group_ * 4 + warp_][row_of(i)] = sum_[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sum_[i] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum_[i] += exchange[w][row_of(i)];
      inverse_[i] = sum_[i] > 0 ? reciprocal_fast(sum_[i] * kProbabilityUnit) : 0;
    }
  }

  // Through the memory of the queries, which nobody needs any more: rows leave in runs of 512
  // bytes.
  __device__ void write_out(const LatentDecodePart& part) {
    // Rows of 16 bytes more than the result's: no two lanes' words in one bank.
    constexpr int kRowBytes = kLatent * 2 + 16;
    static_assert(kRows * kRowBytes <= sizeof(shared_.queries));
    uint8_t* const memory = shared_.queries[0];
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kElements; j += 4) {
        const int column = (group_ * kOutBlocks + block) * 64 + 16 * warp_ + lane_ / 4 * 2;
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const int i = j / 2 + next;
          *reinterpret_cast<uint32_t*>(memory + row_of(i) * kRowBytes + column * 2) = pack_bf16(
              out_[block][j + next] * inverse_[i], out_[block][j + 2 + next] * inverse_[i]);
        }
      }
    }
    meet();
    uint4* const out =
        reinterpret_cast<uint4*>(arguments_.out + static_cast<int64_t>(part.out_row) * kLatent);
    constexpr int kChunks = kLatent / 8;
#pragma unroll
    for (int u = 0; u < kRows * kChunks / kComputing; ++u) {
      const int i = threadIdx.x + u * kComputing, row = i / kChunks;
      if (row < part.rows) {
        out[i] = *reinterpret_cast<const uint4*>(memory + row * kRowBytes + i % kChunks * 16);
      }
    }
  }

  __device__ void write_partial(const LatentDecodePart& part) {
    if (threadIdx.x < 4) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        shared_.weights[row_of(i)] =
            present(sum_[i] > 0 ? maximum_[i] + log2_fast(sum_[i]) : -1e30f);
      }
    }
    meet();
    // Every reader has all parts' weights of its own in one run.
    for (int x = threadIdx.x; x < part.num_splits * (kRows / 4); x += kComputing) {
      const int row = x % (kRows / 4) * 4;
      const int64_t its = part.first_weight + x / (kRows / 4) * part.num_splits + part.split;
      store_shared_words(arguments_.weights + its * kRows + row,
                         *reinterpret_cast<const float4*>(shared_.weights + row));
    }
    float* sums = arguments_.sums +
                  static_cast<int64_t>(part.first_slot + part.split) * (kLatent * kRows / 2) +
                  group_ * (kLatent * kRows / 2 / kGroups) + thread_ * 4;
#pragma unroll
    for (int block = 0; block < kOutBlocks; block += 2) {
#pragma unroll
      for (int j = 0; j < kElements; j += 4) {
        const auto pair = [&](int b, int next) {
          const float factor = inverse_[j / 2 + next];
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
  const int group_, thread_, warp_, lane_;
  const uint32_t queries_, probabilities_;
  int turn_ = 0;  // pages since the launch
  float maximum_[kOwn], sum_[kOwn], inverse_[kOwn], row_scale_[kOwn];
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
                sizeof(typename Joining::Memory) <= sizeof(Shared::pages));
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32;
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
      Joining(part, part.rows,
              arguments.sums + static_cast<int64_t>(part.first_slot) * (kLatent * kRows / 2),
              Joining::kVectors,
              arguments.weights +
                  (static_cast<int64_t>(part.first_weight) + part.split * part.num_splits) * kRows,
              kRows, arguments.out + static_cast<int64_t>(part.out_row) * kLatent,
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
      const auto launch_for = tile_rows == 16 ? launch_rows<Row, 16> : launch_rows<Row, 32>;
      launch_for(map, inner, num_multiprocessors, stream);
    }
  });
}

}  // namespace fathom::cuda
