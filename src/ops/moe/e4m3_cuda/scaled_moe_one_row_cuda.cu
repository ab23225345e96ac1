// What: scaled_moe for one token. One launch.
//
// Inputs/outputs: scaled_moe_cuda.h.
//
// Layout: one CTA per SM, sixteen warps, each with slots of 4 KB that bulk copies (TMA) fill: two
// halves, which hold a gate's and an up's columns, or rows of down. x, and later the activations,
// lie in shared memory as f16, which holds e4m3 exactly; so do all scales that the CTA needs.
//
// Algorithm: the four GEMV phases of moe_one_row_cuda.cu, gate and up of the shared expert, of the
// token's experts, down of the one and of the others, in one weight stream. Each is cut into items
// of up to 2 x 2,048 bytes, which warps take in turn; an item's sums go to shared memory and are
// reduced when all are done: by the last warp, which writes activations in fp32, or by all at the
// end. Every CTA quantizes all activations for itself.
//
// Warp-level multiplication: ops/scaled_linear/row_products_cuda.cuh.
//
// Determinism: every sum has one order, which depends on the shape alone. (Atomics count integers.)
//
// Limits: one row. CTAs wait for one another: all of them must be co-resident.
//
// Measured: docs/kernels/scaled_moe.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "base/math.h"
#include "base/math_constants.h"
#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/co_resident.h"
#include "ops/linear/row_stream_cuda.cuh"
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_one_row_cuda.h"
#include "ops/scaled_linear/quantize_four_cuda.cuh"
#include "ops/scaled_linear/row_products_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * kWarp;
constexpr int kSlots = 2;  // slots of a warp
constexpr int kHalfBytes = 2048, kSlotBytes = 2 * kHalfBytes;
constexpr int kMostShared = 227 * 1024;
constexpr int kMostExpertsOfOne = kWarp;
enum Phase { kSharedUp, kRoutedUp, kSharedDown, kRoutedDown, kEnd };

// Offsets in shared memory after the tables, in floats.
struct Places {
  int32_t up_scales[2];   // [blocks of 128 units that the CTA touches][gate, up][hidden / 128]
  int32_t down_scales;    // [two blocks of 128 rows][all_blocks]
  int32_t x_scales;       // [hidden / 128]
  int32_t blocks_scales;  // [all_blocks], of the activations
  int32_t up_sums[2];     // [units][pieces][gate, up]
  int32_t down_sums;      // [parts][rows]
};

// A CTA's share of a phase. Units are intermediate columns of all the phase's experts, or rows of
// the result. Its items are numbered in mixed radix: k-slice of a weight row, group of units (one
// for gate and up), expert (one for gate and up, which covers all).
struct Share {
  int begin, end;
  int columns, pieces, piece_columns;  // of a weight row
  int groups, experts;
  int group_units, larger_groups;  // the first larger_groups groups have one unit more
  int num_items;
  int piece_step, group_step, expert_step;  // to the warp's next item
};

struct Arguments {
  const uint8_t *x, *gate_up, *down, *shared_gate_up, *shared_down;
  const float *x_scales, *gate_up_scales, *down_scales, *shared_gate_up_scales, *shared_down_scales;
  int64_t x_scales_stride;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* out;
  float* activations;  // [shared_inter + experts * inter]
  uint64_t* progress;  // [2]
  int32_t hidden, inter, shared_inter, experts;
  int32_t vector_bytes;  // of x or of the activations, whichever is larger
  int32_t most_rows;     // rows of the result a CTA has, at most
  // Each CTA has base_units units; larger_blocks of them have one more.
  Share shares[kEnd][2];
  int32_t base_units[kEnd], larger_blocks[kEnd];
  Places places;
  ScaleForm form;
  bool f32;

  __device__ int all_blocks() const { return (shared_inter + experts * inter) / 128; }
};

struct Tables {
  Share shares[kEnd];
  uint64_t arrived[kWarps][kSlots];
  uint64_t scales_there;
  uint64_t awaited[2];  // value of progress when all CTAs' activations are written
  int32_t warps_done[2];
  int32_t ids[kMostExpertsOfOne];
  float weights[kMostExpertsOfOne];  // an absent expert (id -1) has 0
};

constexpr int pieces_of(int columns) { return (columns + kHalfBytes - 1) / kHalfBytes; }

int units_of(const MoeShape& shape, int phase) {
  return phase == kSharedUp   ? shape.shared_inter
         : phase == kRoutedUp ? shape.experts_per_token * shape.inter
                              : shape.hidden;
}

// The CTA's share of `count` units, without its begin and end.
Share share_of(const MoeShape& shape, int phase, int count) {
  const bool is_shared = phase == kSharedUp || phase == kSharedDown;
  Share s = {};
  s.columns = phase < kSharedDown ? shape.hidden : is_shared ? shape.shared_inter : shape.inter;
  if (s.columns == 0 || count == 0) return s;
  s.pieces = pieces_of(s.columns);
  s.piece_columns = (s.columns / 128 + s.pieces - 1) / s.pieces * 128;
  const int most = phase < kSharedDown ? 1 : 2 * std::max(kHalfBytes / s.columns, 1);
  s.groups = (count + most - 1) / most;
  s.experts = phase == kRoutedDown ? shape.experts_per_token : 1;
  s.group_units = count / s.groups;
  s.larger_groups = count % s.groups;
  s.num_items = s.pieces * s.groups * s.experts;
  s.piece_step = kWarps % s.pieces;
  s.group_step = kWarps / s.pieces % s.groups;
  s.expert_step = kWarps / s.pieces / s.groups;
  return s;
}

// The remainder of gate and up goes to the first CTAs, that of down to the last.
__device__ Share share_of_block(const Arguments& a, int phase) {
  const int block = blockIdx.x, base = a.base_units[phase], larger = a.larger_blocks[phase];
  const int first_larger = static_cast<int>(gridDim.x) - larger;
  const bool is_larger = phase < kSharedDown ? block < larger : block >= first_larger;
  Share s = a.shares[phase][is_larger];
  s.begin =
      block * base + (phase < kSharedDown ? min(block, larger) : max(block - first_larger, 0));
  s.end = s.begin + base + is_larger;
  return s;
}

// A warp's items, phase by phase: it takes every kWarps-th. An item is `columns` bytes from
// `column` on of `rows0` weight rows, for a slot's first half, and of `rows1` others.
class ItemWalk {
 public:
  __device__ explicit ItemWalk(const Tables& tables) : tables_(tables) {}

  __device__ void begin(int phase) {
    phase_ = phase;
    const Share& s = share();
    unsigned first = threadIdx.x / kWarp;
    // The second phase of gate and up, or of down, continues the round-robin where the first one
    // ended.
    if (phase % 2 != 0) first = (first - tables_.shares[phase - 1].num_items) & (kWarps - 1);
    piece_ = group_ = expert_ = 0;
    if (s.num_items == 0) return;
    const unsigned whole = first / s.pieces;
    piece_ = first - whole * s.pieces;
    expert_ = whole / s.groups;
    group_ = whole - expert_ * s.groups;
  }
  __device__ bool is_at_end() const { return expert_ >= share().experts; }
  __device__ void next() {
    const Share& s = share();
    piece_ += s.piece_step;
    group_ += s.group_step;
    expert_ += s.expert_step;
    if (piece_ >= s.pieces) piece_ -= s.pieces, ++group_;
    if (group_ >= s.groups) group_ -= s.groups, ++expert_;
  }

  __device__ const Share& share() const { return tables_.shares[phase_]; }
  __device__ int phase() const { return phase_; }
  __device__ bool is_of_shared() const { return phase_ % 2 == 0; }
  __device__ bool is_up() const { return phase_ < kSharedDown; }
  __device__ int piece() const { return piece_; }
  __device__ int column() const { return piece_ * share().piece_columns; }
  __device__ int columns() const { return min(share().piece_columns, share().columns - column()); }
  // The current one of the CTA's units.
  __device__ int unit() const {
    return group_ * share().group_units + min(group_, share().larger_groups);
  }
  __device__ int units() const { return share().group_units + (group_ < share().larger_groups); }
  __device__ int rows0() const { return is_up() ? 1 : (units() + 1) / 2; }
  __device__ int rows1() const { return is_up() ? 1 : units() / 2; }
  __device__ int expert() const { return expert_; }

 private:
  const Tables& tables_;
  int phase_ = 0, piece_ = 0, group_ = 0, expert_ = 0;
};

// Pointers derived from this are known to be shared memory wherever they are used.
__device__ uint8_t* block_memory() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}
__device__ uint8_t* vector_memory() { return block_memory() + kWarps * kSlots * kSlotBytes; }

__device__ float silu_times(float gate, float up) {
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

// ---- the kernel

// Not inlined: keeps one copy of its divisions.
__device__ __noinline__ BlockScale scale_of(float magnitude, ScaleForm form) {
  return block_scale(magnitude, form);
}

class OneRow {
 public:
  __device__ explicit OneRow(const Arguments& a)
      : a_(a),
        tables_(*reinterpret_cast<Tables*>(vector_memory() + a.vector_bytes)),
        floats_(reinterpret_cast<float*>(&tables_ + 1)),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  __device__ void run() {
    if (threadIdx.x < kEnd) {
      tables_.shares[threadIdx.x] = share_of_block(a_, static_cast<int>(threadIdx.x));
      if (threadIdx.x < 2) tables_.warps_done[threadIdx.x] = 0;
      if (threadIdx.x == 0) barrier_init(&tables_.scales_there, kThreads);
    }
    if (lane_ == 0) {
      for (int slot = 0; slot < kSlots; ++slot) barrier_init(&tables_.arrived[warp_][slot], 1);
      fence_barrier_init();
    }
    __syncthreads();
    // Phases before kRoutedUp need no expert ids and do not depend on earlier launches.
    ItemWalk asked(tables_), walk(tables_);
    asked.begin(kSharedUp);
    SlotTurn asked_slot, slot;
    int ahead = 0;
#pragma unroll 1
    for (const int before : {kRoutedUp, kEnd}) {
#pragma unroll 1
      for (; ahead < kSlots && ask(asked, asked_slot, before); ++ahead) {
      }
      copy_scales(before == kRoutedUp);
      if (before == kEnd) break;
      let_next_launch_begin();
      wait_for_earlier_launches();
      if (static_cast<int>(threadIdx.x) < a_.experts) {
        tables_.ids[threadIdx.x] = a_.expert_ids[threadIdx.x];
        tables_.weights[threadIdx.x] = a_.expert_weights[threadIdx.x];
      }
      load_x();
      wait_for_copies();
      __syncthreads();
    }
    barrier_arrive_after_copies(&tables_.scales_there);

#pragma unroll 1
    for (int phase = kSharedUp; phase < kEnd; ++phase) {
      if (phase == kRoutedUp) barrier_wait(&tables_.scales_there, 0);
      if (phase == kSharedDown) __syncthreads();  // all warps have read x
      if (phase >= kSharedDown && tables_.shares[phase].columns > 0) load_activations(phase);
#pragma unroll 1
      for (walk.begin(phase); !walk.is_at_end(); walk.next()) {
        barrier_wait(&tables_.arrived[warp_][slot.slot], slot.parity);
        multiply(walk, slots() + slot.slot * kSlotBytes);
        __syncwarp();
        ask(asked, asked_slot, kEnd);
        slot.advance(kSlots);
      }
      if (phase < kSharedDown) finish_gate_up(phase);
    }
    __syncthreads();
    write_out();
  }

 private:
  __device__ uint8_t* slots() const { return block_memory() + warp_ * kSlots * kSlotBytes; }

  // Issues the load of the next item if that is before phase `before`; returns whether there was
  // one.
  __device__ bool ask(ItemWalk& walk, SlotTurn& slot, int before) const {
    while (walk.phase() < kEnd && walk.is_at_end()) {
      if (walk.phase() + 1 == kEnd) return false;
      walk.begin(walk.phase() + 1);
    }
    if (walk.phase() >= before) return false;
    const Share& s = walk.share();
    const bool is_shared = walk.is_of_shared();
    const int unit = s.begin + walk.unit(), rows0 = walk.rows0();
    const uint8_t* matrix;
    int64_t row;
    int second;  // rows from the first half's row to the second half's
    if (walk.is_up()) {
      const int inter = is_shared ? a_.shared_inter : a_.inter;
      const int chosen = is_shared ? 0 : static_cast<unsigned>(unit) / static_cast<unsigned>(inter);
      matrix = is_shared ? a_.shared_gate_up : a_.gate_up;
      row = int64_t{is_shared ? 0 : 2 * expert(chosen)} * inter + (unit - chosen * inter);
      second = inter;
    } else {
      matrix = is_shared ? a_.shared_down : a_.down;
      row = int64_t{is_shared ? 0 : expert(walk.expert())} * a_.hidden + unit;
      second = rows0;
    }
    if (lane_ == 0) {
      const uint8_t* from = matrix + row * s.columns + walk.column();
      const int bytes0 = rows0 * walk.columns(), bytes1 = walk.rows1() * walk.columns();
      uint8_t* const to = slots() + slot.slot * kSlotBytes;
      uint64_t* const arrived = &tables_.arrived[warp_][slot.slot];
      const uint64_t policy = read_once_policy();
      barrier_expect(arrived, bytes0 + bytes1);
      copy_bytes_under(policy, to, from, bytes0, arrived);
      if (bytes1 > 0) {
        copy_bytes_under(policy, to + kHalfBytes, from + int64_t{second} * s.columns, bytes1,
                         arrived);
      }
    }
    __syncwarp();
    slot.advance(kSlots);
    walk.next();
    return true;
  }

  __device__ int expert(int chosen) const { return max(tables_.ids[chosen], 0); }

  // ---- scales and vectors

  // The block of 128 rows that holds the CTA's first row.
  __device__ int first_row_block() const { return tables_.shares[kRoutedDown].begin / 128; }

  // Copies the scales of the shared expert or of the others, one warp per row of scales: each row
  // costs one division.
  __device__ void copy_scales(bool is_shared) const {
    const int inter = is_shared ? a_.shared_inter : a_.inter, blocks = inter / 128;
    const int row_blocks = a_.hidden / 128;
    if (inter == 0) return;
    const int up = is_shared ? kSharedUp : kRoutedUp;
    const int begin = tables_.shares[up].begin, end = tables_.shares[up].end;
    const int first = begin / 128, up_rows = begin < end ? 2 * ((end - 1) / 128 + 1 - first) : 0;
    const int all_rows = up_rows + 2 * (is_shared ? 1 : a_.experts);
#pragma unroll 1
    for (int i = warp_; i < all_rows; i += kWarps) {
      int to, count;
      const float* from;
      if (i < up_rows) {
        const int block = first + i / 2;  // block of 128 units of all experts
        const int chosen = static_cast<unsigned>(block) / static_cast<unsigned>(blocks);
        const int64_t row = int64_t{is_shared ? 0 : 2 * expert(chosen)} * blocks + i % 2 * blocks +
                            block - chosen * blocks;
        to = a_.places.up_scales[up] + i * row_blocks;
        from = (is_shared ? a_.shared_gate_up_scales : a_.gate_up_scales) + row * row_blocks;
        count = row_blocks;
      } else {
        const int which = (i - up_rows) % 2, chosen = (i - up_rows) / 2;
        const int64_t row = int64_t{is_shared ? 0 : expert(chosen)} * row_blocks +
                            min(first_row_block() + which, row_blocks - 1);
        to = a_.places.down_scales + which * a_.all_blocks() +
             (is_shared ? 0 : a_.shared_inter / 128) + chosen * blocks;
        from = (is_shared ? a_.shared_down_scales : a_.down_scales) + row * blocks;
        count = blocks;
      }
#pragma unroll 1
      for (int j = lane_; j < count; j += kWarp) {
        copy_4(shared_address(floats_ + to + j), from + j);
      }
    }
  }

  __device__ void load_x() const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < a_.hidden / 16; i += kThreads) {
      const uint4 x = reinterpret_cast<const uint4*>(a_.x)[i];
      auto* const to = reinterpret_cast<uint4*>(vector_memory() + vector_at(i * 16));
      const auto low = [](uint32_t four) { return fp8_to_f16<Fp8::kE4M3>(four); };
      const auto high = [](uint32_t four) { return upper_fp8_to_f16<Fp8::kE4M3>(four); };
      to[0] = make_uint4(low(x.x), high(x.x), low(x.y), high(x.y));
      to[512 / 16] = make_uint4(low(x.z), high(x.z), low(x.w), high(x.w));
    }
    const int i = static_cast<int>(threadIdx.x);
    if (i < a_.hidden / 128) floats_[a_.places.x_scales + i] = a_.x_scales[i * a_.x_scales_stride];
  }

  // Waits until all CTAs have written their activations. Reads them past the L1; a warp takes 128.
  __device__ void load_activations(int phase) const {
    if (threadIdx.x == 0) {
      const int up = phase - kSharedDown;
      while (load_acquire(&a_.progress[up]) < tables_.awaited[up]) {
      }
    }
    __syncthreads();
    const int first = phase == kSharedDown ? 0 : a_.shared_inter / 128;
    const int end = phase == kSharedDown ? a_.shared_inter / 128 : a_.all_blocks();
    constexpr int kTogether = 4;
#pragma unroll 1
    for (int block = first + warp_; block < end; block += kWarps * kTogether) {
      float4 values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = min(block + i * kWarps, end - 1);
        values[i] = __ldcg(reinterpret_cast<const float4*>(a_.activations) + at * kWarp + lane_);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = block + i * kWarps;
        if (at >= end) break;
        const BlockScale scale = scale_of(warp_magnitude(values[i]), a_.form);
        const uint32_t four = pack_four(values[i], scale.inverse);
        const int column = at * 128 + lane_ * 4;
        *reinterpret_cast<uint2*>(vector_memory() + vector_at(column) + column % 8 * 2) =
            make_uint2(fp8_to_f16<Fp8::kE4M3>(four), upper_fp8_to_f16<Fp8::kE4M3>(four));
        if (lane_ == 0) {
          const int chosen =
              static_cast<unsigned>(at - first) / static_cast<unsigned>(a_.inter / 128);
          const float weight = phase == kSharedDown ? 1.0f : tables_.weights[chosen];
          floats_[a_.places.blocks_scales + at] = scale.scale * weight;
        }
      }
    }
    __syncthreads();
  }

  // ---- items

  __device__ void multiply(const ItemWalk& walk, const uint8_t* slot) const {
    const Share& s = walk.share();
    const int column = walk.column(), rows0 = walk.rows0(), rows1 = walk.rows1();
    int place;              // index of the first row's sum; the second half's rows follow
    int vector_column;      // first column of x
    int x_scales, scales0;  // scales of those columns of x; of the first row
    if (walk.is_up()) {
      const int row_blocks = a_.hidden / 128;
      const int block = (s.begin + walk.unit()) / 128 - s.begin / 128;
      place = a_.places.up_sums[walk.phase()] + (walk.unit() * s.pieces + walk.piece()) * 2;
      vector_column = column;
      x_scales = a_.places.x_scales + column / 128;
      scales0 = a_.places.up_scales[walk.phase()] + block * 2 * row_blocks + column / 128;
    } else {
      const bool is_shared = walk.is_of_shared();
      const int first_part = is_shared ? 0 : tables_.shares[kSharedDown].pieces;
      const int part = first_part + walk.expert() * s.pieces + walk.piece();
      place = a_.places.down_sums + part * a_.most_rows + walk.unit();
      vector_column = (is_shared ? 0 : a_.shared_inter + walk.expert() * s.columns) + column;
      x_scales = a_.places.blocks_scales + vector_column / 128;
      scales0 = a_.places.down_scales + vector_column / 128;
      if (s.columns == 128 || s.columns == 256) {
        multiply_short_rows(walk, slot, vector_column, floats_ + place);
        return;
      }
    }
#pragma unroll 1
    for (int j = 0; j < rows0; ++j) {
      const float *of_first, *of_second;
      if (walk.is_up()) {
        of_first = floats_ + scales0;
        of_second = of_first + a_.hidden / 128;
      } else {
        const int row = s.begin + walk.unit() + j;
        of_first = floats_ + scales0 + row_scales(row);
        of_second = floats_ + scales0 + row_scales(row + rows0);
      }
      const Pair pair =
          multiply_rows<kHalfBytes>(slot + j * walk.columns(), vector_memory(), vector_column,
                                    walk.columns(), floats_ + x_scales, of_first, of_second, lane_);
      if (lane_ == 0) {
        floats_[place + j] = pair.first;
        if (j < rows1) floats_[place + rows0 + j] = pair.second;
      }
    }
  }

  // Offset of the scales of a row of down from those of the CTA's first row.
  __device__ int row_scales(int row) const {
    return row / 128 > first_row_block() ? a_.all_blocks() : 0;
  }

  // Multiplies rows of 128 or 256 columns: several at a time, always with the same part of the
  // vector.
  __device__ void multiply_short_rows(const ItemWalk& walk, const uint8_t* slot, unsigned column,
                                      float* sums) const {
    const unsigned columns = walk.columns(), chunk = lane_ / 4;
    const int rows0 = walk.rows0(), first_row = walk.share().begin + walk.unit();
    const Sixteen x = load_sixteen(vector_memory(), column + lane_ * 16 % columns);
    const int block = (column + chunk * 64 % columns) / 128;
    const float x_scale = floats_[a_.places.blocks_scales + block];
    const float* scales = floats_ + a_.places.down_scales + block;
    const float row_scale[2] = {x_scale * scales[0], x_scale * scales[a_.all_blocks()]};
    const int next_block = (first_row_block() + 1) * 128;  // from here on the second scale applies
    cuda::multiply_short_rows<kHalfBytes>(
        slot, static_cast<int>(columns), rows0, walk.rows1(), x, lane_,
        [&](bool second, int row) {
          return first_row + row + (second ? rows0 : 0) >= next_block ? row_scale[1] : row_scale[0];
        },
        [&](bool second, int row, float sum) { sums[row + (second ? rows0 : 0)] = sum; });
  }

  // The last warp to finish writes the CTA's activations.
  __device__ void finish_gate_up(int phase) const {
    int done = 0;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence_block();
      done = atomicAdd(&tables_.warps_done[phase], 1);
      __threadfence_block();
    }
    if (__shfl_sync(~0u, done, 0) != kWarps - 1) return;
    __syncwarp();  // memory ordering for all lanes: a shuffle orders no memory
    const Share& s = tables_.shares[phase];
    const auto* sums = reinterpret_cast<const float2*>(floats_ + a_.places.up_sums[phase]);
#pragma unroll 1
    for (int unit = lane_; unit < s.end - s.begin; unit += kWarp) {
      float2 sum = make_float2(0, 0);
#pragma unroll 1
      for (int i = 0; i < s.pieces; ++i) {
        const float2 more = sums[unit * s.pieces + i];
        sum.x += more.x, sum.y += more.y;
      }
      const unsigned chosen =
          static_cast<unsigned>(s.begin + unit) / static_cast<unsigned>(a_.inter);
      const bool exists = phase == kSharedUp || tables_.ids[chosen] >= 0;
      a_.activations[(phase == kRoutedUp ? a_.shared_inter : 0) + s.begin + unit] =
          exists ? silu_times(sum.x, sum.y) : 0;
    }
    __threadfence();
    __syncwarp();
    if (lane_ == 0) {
      const uint64_t before = add_release(&a_.progress[phase], 1);
      tables_.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
    }
  }

  __device__ void write_out() const {
    const Share& share = tables_.shares[kRoutedDown];
    const int begin = share.begin, end = share.end;
    const int parts = tables_.shares[kSharedDown].pieces + a_.experts * share.pieces;
#pragma unroll 1
    for (int row = begin + static_cast<int>(threadIdx.x); row < end; row += kThreads) {
      float sum = 0;
#pragma unroll 4
      for (int part = 0; part < parts; ++part) {
        sum += floats_[a_.places.down_sums + part * a_.most_rows + row - begin];
      }
      if (a_.f32) {
        static_cast<float*>(a_.out)[row] = sum;
      } else {
        static_cast<__nv_bfloat16*>(a_.out)[row] = __float2bfloat16(sum);
      }
    }
  }

  const Arguments& a_;
  Tables& tables_;
  float* const floats_;
  const int warp_, lane_;
};

__global__ void __launch_bounds__(kThreads, 1)
    scaled_moe_one_row_kernel(const __grid_constant__ Arguments a) {
  OneRow(a).run();
}

struct SharedMemory {
  int64_t vector_bytes = 0, bytes = 0;
  int64_t most_rows = 0;
  Places places = {};

  SharedMemory(const MoeShape& s, int blocks) {
    const int64_t activations = s.shared_inter + int64_t{s.experts_per_token} * s.inter;
    vector_bytes = round_up(std::max<int64_t>(s.hidden, activations), 512) * 2;
    most_rows = ceil_div(s.hidden, blocks);
    int64_t floats = 0;
    const auto take = [&](int64_t count) {
      const int64_t at = floats;
      floats += round_up(count, 4);
      return static_cast<int32_t>(at);
    };
    const int64_t row_blocks = s.hidden / 128;
    const int64_t units[2] = {ceil_div(s.shared_inter, blocks),
                              ceil_div(int64_t{s.experts_per_token} * s.inter, blocks)};
    for (int i = 0; i < 2; ++i) {
      places.up_scales[i] = take((units[i] / 128 + 2) * 2 * row_blocks);
      places.up_sums[i] = take(units[i] * pieces_of(s.hidden) * 2);
    }
    places.down_scales = take(2 * (activations / 128));
    places.x_scales = take(row_blocks);
    places.blocks_scales = take(activations / 128);
    const int64_t parts = (s.shared_inter > 0 ? pieces_of(s.shared_inter) : 0) +
                          s.experts_per_token * pieces_of(s.inter);
    places.down_sums = take(parts * most_rows);
    bytes = kWarps * kSlots * kSlotBytes + vector_bytes + static_cast<int64_t>(sizeof(Tables)) +
            floats * 4;
  }
};

}  // namespace

int64_t scaled_moe_one_row_workspace_bytes(const MoeShape& shape) {
  return (shape.shared_inter + int64_t{shape.experts_per_token} * shape.inter) * 4;
}

bool scaled_moe_one_row_takes(const MoeShape& shape, const SmBudget& budget) {
  const int blocks = moe_few_rows_blocks(budget);
  return shape.experts_per_token <= kMostExpertsOfOne && shape.hidden <= 128 * blocks &&
         SharedMemory(shape, blocks).bytes <= kMostShared;
}

void scaled_moe_one_row(const ScaledMoeArguments& arguments, GpuStream stream) {
  stream.device().allow_shared_memory(scaled_moe_one_row_kernel, kMostShared);
  const MoeShape& shape = arguments.shape;
  const int blocks = moe_few_rows_blocks(arguments.budget);
  const SharedMemory memory(shape, blocks);
  const auto cast = [](const void* p) { return static_cast<const uint8_t*>(p); };
  Arguments a = {.x = cast(arguments.x),
                 .gate_up = cast(arguments.gate_up),
                 .down = cast(arguments.down),
                 .shared_gate_up = cast(arguments.shared_gate_up),
                 .shared_down = cast(arguments.shared_down),
                 .x_scales = arguments.x_scales,
                 .gate_up_scales = arguments.gate_up_scales,
                 .down_scales = arguments.down_scales,
                 .shared_gate_up_scales = arguments.shared_gate_up_scales,
                 .shared_down_scales = arguments.shared_down_scales,
                 .x_scales_stride = arguments.x_scales_stride,
                 .expert_ids = arguments.expert_ids,
                 .expert_weights = arguments.expert_weights,
                 .out = arguments.out,
                 .activations = static_cast<float*>(arguments.workspace),
                 .progress = arguments.progress,
                 .hidden = shape.hidden,
                 .inter = shape.inter,
                 .shared_inter = shape.shared_inter,
                 .experts = shape.experts_per_token,
                 .vector_bytes = static_cast<int32_t>(memory.vector_bytes),
                 .most_rows = static_cast<int32_t>(memory.most_rows),
                 .shares = {},
                 .base_units = {},
                 .larger_blocks = {},
                 .places = memory.places,
                 .form = arguments.form,
                 .f32 = arguments.out_type == DType::kF32};
  for (int phase = 0; phase < kEnd; ++phase) {
    const int units = units_of(shape, phase);
    a.base_units[phase] = units / blocks;
    a.larger_blocks[phase] = units % blocks;
    for (int more = 0; more < 2; ++more) {
      a.shares[phase][more] = share_of(shape, phase, units / blocks + more);
    }
  }
  launch_co_resident("scaled_moe_one_row", scaled_moe_one_row_kernel,
                     {.blocks = static_cast<unsigned>(blocks),
                      .threads = kThreads,
                      .shared_bytes = static_cast<unsigned>(memory.bytes)},
                     arguments.budget.sms, stream, a);
}

}  // namespace fathom::cuda
