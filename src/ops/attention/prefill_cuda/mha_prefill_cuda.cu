// What: out = softmax(scale * [q_nope q_rope] [k_nope k_rope]^T) v, many queries of one head at a
// time; log-sum-exp beside it.
//
// Inputs/outputs: mha_prefill_cuda.h. Tile schedule: mha_prefill_plan.h.
//
// Layout: one persistent CTA per SM, three warpgroups: two consumers compute 64 of a tile's 128
// queries each, the third's first warp is the producer. Shared memory has boxes of 64 columns with
// the 128-byte swizzle: queries 2 x 3 boxes of 64 rows (48 KB), and two stages each of keys (3
// boxes of 128 rows, the third the rotary part that all heads share; 48 KB) and values (2 boxes; 32
// KB).
//
// Algorithm, for each step of 128 keys; keys go forward, so that a row sees a key in the first
// step:
//   1. scores [64, 128] = q [64, 192] keys^T                          operands in shared memory
//   2. out [64, 128] += probabilities [64, 128] values, one step late  probabilities in registers
//   3. mask (last steps only), running maximum, probabilities, their sum; overlaps with 2.
//   4. rescale out after 2. if the maximum has risen, probabilities to bf16
// The warpgroups take turns at issuing 1. and 2., so that one's softmax overlaps with the other's
// GEMMs. Tiles are pipelined: the next tile's queries and keys are loaded as soon as their shared
// memory is free.
// Rows of values beyond a sequence's end belong to others, and a zero probability does not cancel a
// NaN there: a warp of the third warpgroup overwrites them when they have arrived.
// A tile over later keys of its rows combines its result by log-sum-exp with theirs over the keys
// before, which it reads from global memory as fp32.
//
// Determinism: one warpgroup computes a row, in the order of its keys; no atomics. Steps whose keys
// a row does not see leave its sums as they are.
//
// Limits: head dimensions 192 and 128. A tile is not split over CTAs: few tiles with many keys
// leave SMs idle.
//
// Source: FlashAttention-3 (Shah et al., 2024): warpgroup specialization, ping-pong turns, the
// overlap of softmax with GEMMs; FlashAttention-4 (Dao et al., 2025): lazy rescaling. Longest tiles
// first: Graham (1969).
//
// Measured: docs/kernels/mha_prefill.md.
#include <cuda_bf16.h>

#include <array>
#include <cmath>

#include "base/math_constants.h"
#include "device/cuda/launch.h"
#include "device/cuda/planted_fault.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "device/cuda/wgmma.cuh"
#include "ops/attention/prefill_cuda/mha_prefill_cuda.h"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kNope = 128, kRope = 64, kQk = kNope + kRope, kV = 128, kKvColumns = kNope + kV;
constexpr int kGroups = 2, kGroupThreads = 128;
constexpr int kRows = MhaPrefillTile::kRows / kGroups;  // rows of a warpgroup
constexpr int kKeys = MhaPrefillTile::kKeys;
constexpr int kBoxColumns = 64;  // 128 bytes, the swizzle's width
constexpr int kNopeBoxes = kNope / kBoxColumns, kQkBoxes = kQk / kBoxColumns,
              kVBoxes = kV / kBoxColumns;
constexpr int kQueryBoxBytes = kRows * 128, kKeyBoxBytes = kKeys * 128;
constexpr int kStages = 2;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kK = 16;             // columns (or rows) that one wgmma multiplies
constexpr int kGroupBytes = 1024;  // 8 rows

struct Arguments {
  const MhaPrefillTile* tiles;
  const int32_t* first_tile;
  __nv_bfloat16* out;
  QuantizedRows quantized;
  float* partial;
  float* lse;
  int32_t heads;
  float scale_log2;
  FATHOM_PLANTED_FAULT
};

struct SharedMemory {
  alignas(1024) uint8_t queries[kGroups][kQkBoxes * kQueryBoxBytes];
  alignas(1024) uint8_t keys[kStages][kQkBoxes * kKeyBoxBytes];
  alignas(1024) uint8_t values[kStages][kVBoxes * kKeyBoxBytes];
  uint64_t queries_arrived[kGroups], queries_read[kGroups];
  uint64_t keys_arrived[kStages], keys_read[kStages];
  uint64_t values_arrived[kStages], values_read[kStages];
  uint64_t tail_arrived[kStages];  // values whose last rows are beyond the sequence
};

// Counts the uses of a stage's memory.
struct Turn {
  int count = 0;

  __device__ int stage() const { return count % kStages; }
  __device__ int parity() const { return count / kStages & 1; }
  // Returns at once for the first use of each stage.
  __device__ void wait_until_read(uint64_t* read) const {
    if (count >= kStages) barrier_wait(&read[stage()], parity() ^ 1);
  }
};

// Whether the last step's values reach beyond the sequence's end.
__device__ bool has_tail(const MhaPrefillTile& tile) { return tile.steps * kKeys > tile.num_keys; }

// ---- producer: one thread

struct Maps {
  CUtensorMap q, kv, k_rope;
};

class Copies {
 public:
  __device__ Copies(SharedMemory& shared, const Maps& maps) : shared_(shared), maps_(maps) {}

  __device__ void run(const MhaPrefillTile& tile) {
    for (int step = 0; step < tile.steps; ++step) {
      copy_keys(tile, step);
      if (step == 0) {
        copy_queries(tile);
      } else {
        copy_values(tile, step - 1);
      }
    }
    if (tile.steps > 0) copy_values(tile, tile.steps - 1);
  }

 private:
  __device__ void copy_queries(const MhaPrefillTile& tile) {
    for (int group = 0; group < kGroups; ++group) {
      if (tiles_ > 0) barrier_wait(&shared_.queries_read[group], (tiles_ - 1) & 1);
      uint64_t* arrived = &shared_.queries_arrived[group];
      barrier_expect(arrived, kQkBoxes * kQueryBoxBytes);
      for (int box = 0; box < kQkBoxes; ++box) {
        copy_box(shared_.queries[group] + box * kQueryBoxBytes, &maps_.q, arrived,
                 tile.head * kQk + box * kBoxColumns, tile.first_row + group * kRows);
      }
    }
    ++tiles_;
  }

  __device__ void copy_keys(const MhaPrefillTile& tile, int step) {
    keys_.wait_until_read(shared_.keys_read);
    const int stage = keys_.stage(), key = tile.first_key + step * kKeys;
    uint64_t* arrived = &shared_.keys_arrived[stage];
    barrier_expect(arrived, kQkBoxes * kKeyBoxBytes);
    for (int box = 0; box < kNopeBoxes; ++box) {
      copy_box(shared_.keys[stage] + box * kKeyBoxBytes, &maps_.kv, arrived,
               tile.head * kKvColumns + box * kBoxColumns, key);
    }
    copy_box(shared_.keys[stage] + kNopeBoxes * kKeyBoxBytes, &maps_.k_rope, arrived, 0, key);
    ++keys_.count;
  }

  __device__ void copy_values(const MhaPrefillTile& tile, int step) {
    values_.wait_until_read(shared_.values_read);
    const int stage = values_.stage(), key = tile.first_key + step * kKeys;
    const bool tail = step == tile.steps - 1 && has_tail(tile);
    uint64_t* arrived = tail ? &shared_.tail_arrived[stage] : &shared_.values_arrived[stage];
    barrier_expect(arrived, kVBoxes * kKeyBoxBytes);
    for (int box = 0; box < kVBoxes; ++box) {
      copy_box(shared_.values[stage] + box * kKeyBoxBytes, &maps_.kv, arrived,
               tile.head * kKvColumns + kNope + box * kBoxColumns, key);
    }
    ++values_.count;
  }

  SharedMemory& shared_;
  const Maps& maps_;
  Turn keys_, values_;
  int tiles_ = 0;  // tiles whose queries were loaded
};

// ---- values beyond a sequence's end: one warp

class Tails {
 public:
  __device__ explicit Tails(SharedMemory& shared) : shared_(shared) {}

  __device__ void run(const MhaPrefillTile& tile) {
    values_ += tile.steps;
    if (tile.steps == 0 || !has_tail(tile)) return;
    const int stage = (values_ - 1) % kStages, lane = threadIdx.x % 32;
    barrier_wait(&shared_.tail_arrived[stage], tails_ >> stage & 1);
    tails_ ^= 1 << stage;
    const int first = (tile.num_keys - (tile.steps - 1) * kKeys) * 128;
    for (int box = 0; box < kVBoxes; ++box) {
      for (int at = first + lane * 16; at < kKeyBoxBytes; at += 32 * 16) {
        *reinterpret_cast<uint4*>(shared_.values[stage] + box * kKeyBoxBytes + at) = uint4{};
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared_.values_arrived[stage]);
  }

 private:
  SharedMemory& shared_;
  int values_ = 0;  // value steps so far
  int tails_ = 0;   // a bit for each stage: parity of its next tail
};

// ---- attention: a warpgroup and its 64 queries
//
// A thread has two of their rows, 16 * warp + lane / 4 and 8 more, and the accumulator elements
// that wgmma.cuh says: half h of an array's pairs belongs to row h.

constexpr int kElements = 64;

// A row's scores may exceed the reference of its sums by this power of two before the sums are
// rescaled: few rows need that after their first steps. bf16 and fp32 have the range.
constexpr float kSlack = 8;

// References beyond this, in base 2 logarithms, are subtracted from scores before both are scaled.
// The product of a reference and the scale is rounded, by 2^-24 of its size, where the fused
// multiply-add takes a score's exactly: 2^-14 here, but more than a probability can hold from 2^31
// on. Not below, because a subtraction more for each score costs 2 to 3 % of the launch.
constexpr float kLargeLogit = 1024;

// Keeps the arithmetic that produces a and b above this point, where a wgmma wait begins (the
// assembler hoists waits where it can). Both are never negative.
__device__ void compute_before_here(float a, float b) {
  asm volatile(
      "{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never trap;\n"
      "setp.lt.f32 never, %1, 0f00000000;\n@never trap;\n}" ::"f"(a),
      "f"(b)
      : "memory");
}

// kQuantizes: e4m3 results are requested. (A separate kernel: with both in one, GEMMs took 3 %
// longer whether e4m3 was requested or not.)
template <bool kQuantizes>
class Attention {
 public:
  __device__ Attention(SharedMemory& shared, const Arguments& arguments, int group)
      : shared_(shared),
        arguments_(arguments),
        group_(group),
        lane_(threadIdx.x % 32),
        first_row_(threadIdx.x % kGroupThreads / 32 * 16 + lane_ / 4),
        queries_(swizzled_matrix(shared_address(shared.queries[group]), kGroupBytes)),
        keys_(swizzled_matrix(shared_address(shared.keys), kGroupBytes)),
        values_(swizzled_boxes(shared_address(shared.values), kKeyBoxBytes)) {
    // The first warpgroup has the first turn.
    if (group == 1) named_barrier_arrive(kTurnBarrier, kGroups * kGroupThreads);
  }

  __device__ void run(const MhaPrefillTile& tile) {
    // Early exit: without it nvcc 13.0 overlaps the next tile with the end of this one and runs out
    // of registers.
    if (tile.steps == 0) {
      write_nothing(tile);
      return;
    }
    // Keys visible to this warpgroup's first row: steps below need no mask.
    const int visible = tile.visible + group_ * kRows;
    const int unmasked = visible / kKeys;
    begin(tile, unmasked);
    for (int step = 1; step < tile.steps; ++step) {
      const Turn before = turn_;
      ++turn_.count;
      float factor[2];
      barrier_wait(&shared_.keys_arrived[turn_.stage()], turn_.parity());
      take_turn();
      pin(scores_);
      pin(out_);
      mma_fence();
      multiply_keys(turn_.stage());
      mma_commit();
      barrier_wait(&shared_.values_arrived[before.stage()], before.parity());
      mma_fence();
      multiply_values(before.stage(), step > 1);
      mma_commit();
      pass_turn();
      mma_wait<1>();
      pin(scores_);
      has_read(&shared_.keys_read[turn_.stage()]);
      if (step == tile.steps - 1) has_read(&shared_.queries_read[group_]);
      if (step >= unmasked) mask(tile, step);
      soften(factor);
      compute_before_here(sum_[0], sum_[1]);
      mma_wait();
      pin(out_);
      has_read(&shared_.values_read[before.stage()]);
      rescale(factor);
      pack();
    }
    finish(tile);
  }

 private:
  static constexpr int kTurnBarrier = 1;  // and the next one: one a warpgroup

  __device__ void take_turn() const {
    named_barrier(kTurnBarrier + group_, kGroups * kGroupThreads);
  }
  __device__ void pass_turn() const {
    named_barrier_arrive(kTurnBarrier + (group_ ^ 1), kGroups * kGroupThreads);
  }
  __device__ void has_read(uint64_t* barrier) const {
    if (lane_ == 0) barrier_arrive(barrier);
  }

  // Prologue: the first step's scores and probabilities.
  __device__ void begin(const MhaPrefillTile& tile, int unmasked) {
    maximum_[0] = maximum_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0;
    barrier_wait(&shared_.queries_arrived[group_], tiles_ & 1);
    ++tiles_;
    barrier_wait(&shared_.keys_arrived[turn_.stage()], turn_.parity());
    mma_fence();
    multiply_keys(turn_.stage());
    mma_commit();
    mma_wait();
    pin(scores_);
    has_read(&shared_.keys_read[turn_.stage()]);
    if (tile.steps == 1) has_read(&shared_.queries_read[group_]);
    if (unmasked == 0) mask(tile, 0);
    float factor[2];
    soften(factor);
    pack();
  }

  // Epilogue: the last step's values.
  __device__ void finish(const MhaPrefillTile& tile) {
    barrier_wait(&shared_.values_arrived[turn_.stage()], turn_.parity());
    pin(out_);
    mma_fence();
    multiply_values(turn_.stage(), tile.steps > 1);
    mma_commit();
    add_up_sums();
    mma_wait();
    pin(out_);
    has_read(&shared_.values_read[turn_.stage()]);
    ++turn_.count;
    write(tile);
  }

  __device__ void multiply_keys(int stage) {
    const uint64_t keys = moved(keys_, stage * (kQkBoxes * kKeyBoxBytes));
#pragma unroll
    for (int i = 0; i < kQk / kK; ++i) {
      const int box = i / 4, within = i % 4 * kK * 2;
      const uint64_t a = moved(queries_, box * kQueryBoxBytes + within);
      const uint64_t b = moved(keys, box * kKeyBoxBytes + within);
      mma_64(scores_, a, b, i > 0);
    }
  }

  __device__ void multiply_values(int stage, int add) {
    const uint64_t values = moved(values_, stage * (kVBoxes * kKeyBoxBytes));
#pragma unroll
    for (int i = 0; i < kKeys / kK; ++i) {
      mma_64<KAlong::kRows>(out_, probabilities_[4 * i], probabilities_[4 * i + 1],
                            probabilities_[4 * i + 2], probabilities_[4 * i + 3],
                            moved(values, i * kK * 128), i == 0 ? add : 1);
    }
  }

  __device__ void mask(const MhaPrefillTile& tile, int step) {
    const int row = group_ * kRows + first_row_;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Keys of this step visible to the row, relative to the thread's first column.
      const int visible = tile.visible + row + 8 * h - step * kKeys - 2 * (lane_ % 4);
#pragma unroll
      for (int j = 2 * h; j < kElements; j += 4) {
        if (j / 4 * 8 >= visible) scores_[j] = -INFINITY;
        if (j / 4 * 8 + 1 >= visible) scores_[j + 1] = -INFINITY;
      }
    }
  }

  // Turns scores into probabilities, relative to about the largest score so far; earlier sums must
  // then be multiplied with `factor`.
  __device__ void soften(float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(scores_[2 * h], scores_[2 * h + 1]);
#pragma unroll
      for (int j = 4 + 2 * h; j < kElements; j += 4) {
        most = fmaxf(most, fmaxf(scores_[j], scores_[j + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if ((most - maximum_[h]) * arguments_.scale_log2 <= kSlack) most = maximum_[h];
      factor[h] = exp2_fast((maximum_[h] - most) * arguments_.scale_log2);
      maximum_[h] = most;
      float base = most * arguments_.scale_log2;
      if (fabsf(base) > kLargeLogit && !FATHOM_PLANTED(arguments_, kRoundedReference)) {
#pragma unroll
        for (int j = 2 * h; j < kElements; j += 4) {
          scores_[j] -= most;
          scores_[j + 1] -= most;
        }
        base = 0;
      }
      float sum = 0;
#pragma unroll
      for (int j = 2 * h; j < kElements; j += 4) {
        scores_[j] = exp2_fast(scores_[j] * arguments_.scale_log2 - base);
        scores_[j + 1] = exp2_fast(scores_[j + 1] * arguments_.scale_log2 - base);
        sum += scores_[j] + scores_[j + 1];
      }
      sum_[h] = sum_[h] * factor[h] + sum;
    }
  }

  __device__ void rescale(const float (&factor)[2]) {
    if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int j = 0; j < kElements; ++j) out_[j] *= factor[j / 2 & 1];
  }

  __device__ void pack() {
#pragma unroll
    for (int j = 0; j < kElements; j += 2) {
      probabilities_[j / 2] = pack_bf16(scores_[j], scores_[j + 1]);
    }
  }

  __device__ void add_up_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(~0u, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(~0u, sum_[h], 2);
    }
  }

  __device__ size_t row_at(const MhaPrefillTile& tile, int row) const {
    return static_cast<size_t>(tile.first_row + row) * arguments_.heads + tile.head;
  }

  __device__ void write(const MhaPrefillTile& tile) const {
    // Keys that a row sees beyond this run are left to a later launch.
    const bool goes_on = tile.visible + tile.rows - 1 > tile.num_keys;
    if (tile.joined || goes_on) {
      write_part(tile);
    } else {
      write_whole(tile);
    }
  }

  // Epilogue for rows that see keys of this run alone.
  __device__ void write_whole(const MhaPrefillTile& tile) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = group_ * kRows + first_row_ + 8 * h;
      const bool exists = row < tile.rows;
      const size_t at = row_at(tile, row);
      const float inverse = 1 / sum_[h];
      if (arguments_.lse != nullptr && exists && lane_ % 4 == 0) arguments_.lse[at] = lse_of(h);
      uint4 rounded[kV / 32];
#pragma unroll
      for (int c = 0; c < kV / 8; c += 4) {
        float2 x[4];
        take_columns(h, c, inverse, x);
        rounded[c / 4] = round(x);
        write_rounded(rounded[c / 4], at * kV + 8 * c, exists);
      }
      if constexpr (kQuantizes) write_quantized(rounded, tile, row, exists);
    }
  }

  __device__ void write_part(const MhaPrefillTile& tile) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = group_ * kRows + first_row_ + 8 * h;
      const bool exists = row < tile.rows, ends = tile.visible + row <= tile.num_keys;
      const size_t at = row_at(tile, row);
      float lse = lse_of(h), share = 1 / sum_[h], before_share = 0;
      if (tile.joined && exists) {
        const float before = arguments_.lse[at], most = fmaxf(before, lse);
        const float weight = expf(lse - most), before_weight = expf(before - most);
        const float total = weight + before_weight;
        share *= weight / total;
        before_share = before_weight / total;
        lse = most + logf(total);
      }
      __syncwarp();  // all lanes have read lse
      if (exists && lane_ % 4 == 0) arguments_.lse[at] = lse;
      float* const partial = arguments_.partial + at * kV + 2 * (lane_ % 4);
      uint4 rounded[kV / 32];
#pragma unroll
      for (int c = 0; c < kV / 8; c += 4) {
        float2 x[4];
        take_columns(h, c, share, x);
        if (tile.joined && exists) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 before = *reinterpret_cast<const float2*>(partial + 8 * (c + i));
            x[i].x += before.x * before_share;
            x[i].y += before.y * before_share;
          }
        }
        if (exists && !ends) {
#pragma unroll
          for (int i = 0; i < 4; ++i) *reinterpret_cast<float2*>(partial + 8 * (c + i)) = x[i];
        }
        rounded[c / 4] = round(x);
        write_rounded(rounded[c / 4], at * kV + 8 * c, exists && ends);
      }
      if constexpr (kQuantizes) write_quantized(rounded, tile, row, exists && ends);
    }
  }

  // Natural log of row h's sum.
  __device__ float lse_of(int h) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return (maximum_[h] * arguments_.scale_log2 + log2f(sum_[h])) * kLn2;
  }

  // Takes columns 8 * (c + i) + 2 * (lane % 4) and the next ones of row h's sums.
  __device__ void take_columns(int h, int c, float factor, float2 (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 4 * (c + i) + 2 * h;
      x[i] = make_float2(out_[j] * factor, out_[j + 1] * factor);
    }
  }

  // Rounds 32 columns of a row, which lie in four lanes.
  __device__ uint4 round(const float2 (&x)[4]) const {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = pack_bf16(x[i].x, x[i].y);
    transpose(v);
    return make_uint4(v[0], v[1], v[2], v[3]);
  }

  __device__ void write_rounded(uint4 x, size_t first, bool writes) const {
    if (kQuantizes && arguments_.out == nullptr) return;
    if (writes) *reinterpret_cast<uint4*>(arguments_.out + first + 8 * (lane_ % 4)) = x;
  }

  // Quantizes a head's columns, one block of the output projection's k. x: for each i, eight
  // columns of a row from 32 i + 8 (lane % 4) on.
  __device__ void write_quantized(const uint4 (&x)[kV / 32], const MhaPrefillTile& tile, int row,
                                  bool writes) const {
    static_assert(kV == kScaleBlock);
    const QuantizedRows& to = arguments_.quantized;
    const BlockScale scale = block_scale(magnitude_among_four(x), to.form, to.fixed_scale);
    if (!writes) return;
    const int64_t at = tile.first_row + row;
    uint8_t* const values = static_cast<uint8_t*>(to.values) + at * to.values_row_stride +
                            tile.head * kV + 8 * (lane_ % 4);
#pragma unroll
    for (int i = 0; i < kV / 32; ++i) {
      *reinterpret_cast<uint2*>(values + 32 * i) = pack_e4m3(x[i], scale.inverse);
    }
    if (lane_ % 4 == 0) to.scales[tile.head * to.scales_block_stride + at] = scale.scale;
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

  // Writes the results of a run without keys.
  __device__ void write_nothing(const MhaPrefillTile& tile) const {
    constexpr int kLanes = kV * 2 / 16;
    const int thread = threadIdx.x % kGroupThreads;
    for (int i = thread; i < kRows * kLanes; i += kGroupThreads) {
      const int row = group_ * kRows + i / kLanes;
      if (row >= tile.rows) break;
      const size_t at = row_at(tile, row);
      if (!kQuantizes || arguments_.out != nullptr) {
        reinterpret_cast<uint4*>(arguments_.out)[at * kLanes + i % kLanes] = uint4{};
      }
      if constexpr (kQuantizes) {
        store_quantized(uint4{}, arguments_.quantized, tile.first_row + row,
                        tile.head * kV + i % kLanes * 8);
      }
      if (i % kLanes == 0 && arguments_.lse != nullptr) arguments_.lse[at] = -INFINITY;
    }
  }

  SharedMemory& shared_;
  const Arguments& arguments_;
  const int group_, lane_, first_row_;
  const uint64_t queries_, keys_, values_;
  Turn turn_;      // step of keys and of values
  int tiles_ = 0;  // tiles whose queries were read
  float maximum_[2], sum_[2];
  float scores_[kElements], out_[kElements];
  uint32_t probabilities_[kElements / 2];
};

// ---- the kernel

// Runs the tiles of this CTA in turn.
template <typename Role>
__device__ void for_each_tile(const MhaPrefillTile* tiles, const MhaPrefillTile& first,
                              Role&& role) {
  MhaPrefillTile tile = first;
  for (int t = 1; tile.rows > 0; ++t) {
    role.run(tile);
    tile = tiles[t];
  }
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kThreads, 1)
    mha_prefill_kernel(const __grid_constant__ Maps maps,
                       const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) uint8_t memory[];
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
  // Warp-uniform, and known to be by the compiler.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (int group = 0; group < kGroups; ++group) {
      barrier_init(&shared.queries_arrived[group], 1);
      barrier_init(&shared.queries_read[group], kWarps);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.keys_arrived[stage], 1);
      barrier_init(&shared.keys_read[stage], kGroups * kWarps);
      barrier_init(&shared.values_arrived[stage], 1);
      barrier_init(&shared.values_read[stage], kGroups * kWarps);
      barrier_init(&shared.tail_arrived[stage], 1);
    }
    fence_barrier_init();
    prefetch_map(&maps.q);
    prefetch_map(&maps.kv);
    prefetch_map(&maps.k_rope);
  }
  // Tiles are written by no launch, so they are read before the PDL wait.
  const MhaPrefillTile* const tiles =
      arguments.tiles + __shfl_sync(~0u, arguments.first_tile[blockIdx.x], 0);
  const MhaPrefillTile first = tiles[0];
  __syncthreads();
  wait_for_earlier_launches();
  let_next_launch_begin();

  if (warp >= kGroups * 4) {
    give_registers<24>();
    if (warp == kGroups * 4) {
      if (threadIdx.x % 32 == 0) for_each_tile(tiles, first, Copies(shared, maps));
    } else if (warp == kGroups * 4 + 1) {
      for_each_tile(tiles, first, Tails(shared));
    }
  } else {
    take_registers<240>();
    for_each_tile(tiles, first, Attention<kQuantizes>(shared, arguments, warp / 4));
  }
}

template <bool kQuantizes>
void launch_prefill(int num_multiprocessors, const Maps& maps, const Arguments& arguments,
                    GpuStream stream) {
  const auto kernel = mha_prefill_kernel<kQuantizes>;
  constexpr int kBytes = sizeof(SharedMemory);
  stream.device().allow_shared_memory(kernel, kBytes);
  launch(kernel,
         {.blocks = static_cast<unsigned>(num_multiprocessors),
          .threads = kThreads,
          .shared_bytes = kBytes},
         stream, maps, arguments);
}

}  // namespace

void mha_prefill(int num_multiprocessors, const MhaPrefillArguments& arguments, GpuStream stream) {
  const int64_t heads = arguments.heads, keys = arguments.keys;
  const Axis columns = {.size = heads * kQk, .stride = 1, .box = kBoxColumns};
  const Axis rows = {.size = arguments.rows, .stride = arguments.q_row_stride, .box = kRows};
  const Maps maps = {bf16_map(arguments.q, std::array{columns, rows}),
                     bf16_map(arguments.kv, {.rows = keys, .columns = heads * kKvColumns},
                              {.rows = kKeys, .columns = kBoxColumns}),
                     bf16_map(arguments.k_rope, {.rows = keys, .columns = kRope},
                              {.rows = kKeys, .columns = kBoxColumns})};
  const Arguments inner = {arguments.tiles,
                           arguments.first_tile,
                           static_cast<__nv_bfloat16*>(arguments.out),
                           arguments.quantized,
                           arguments.partial,
                           arguments.lse,
                           arguments.heads,
                           arguments.softmax_scale * kLog2E};
  if (arguments.quantized.values != nullptr) {
    launch_prefill<true>(num_multiprocessors, maps, inner, stream);
  } else {
    launch_prefill<false>(num_multiprocessors, maps, inner, stream);
  }
}

}  // namespace fathom::cuda
