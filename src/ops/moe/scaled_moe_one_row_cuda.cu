// What: scaled_moe for one token. One launch.
//
// Inputs/outputs: scaled_moe_cuda.h.
//
// Layout: a block a multiprocessor, eight warps, each with slots of 4 KB that the copy engine
// fills: two halves, which hold a gate's and an up's columns, or rows of down. x, and later the
// activations, lie in shared memory as f16, which holds e4m3 exactly; so do all scales that the
// block wants.
//
// Algorithm: the four phases of moe_one_row_cuda.cu, gate and up of the shared expert, of the
// token's experts, down of the one and of the others, in one stream of weights. Each is cut into
// items of up to 2 x 2,048 bytes, which warps take in turn; what an item gives goes to shared
// memory, and is added up when all are done: by the warp that is last, which writes activations in
// fp32, or by all at the end. Every block quantises all activations for itself.
//
// e4m3 becomes f16 on its way to the tensor cores, two values an instruction, and products are
// summed in fp32. A warp reads 512 bytes of each half, 16 a lane, and multiplies them as a matrix
// of 16 rows: row g is bytes 64 g to 64 g + 63 of the first half, row g + 8 those of the second,
// and column g the same bytes' part of x. So the diagonal has the sums of 64 products each, all of
// one block that has a scale; nothing is read twice and nothing need be transposed.
//
// Determinism: every sum has one order, which depends on the shape alone. (Atomics count integers.)
//
// Limits: one row. Blocks wait for one another: all of them must be able to run at once.
//
// Measured: docs/kernels/scaled_moe.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "base/math.h"
#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/warp_mma.cuh"
#include "ops/linear/row_stream_cuda.cuh"
#include "ops/moe/moe_few_rows_cuda.h"
#include "ops/moe/scaled_moe_one_row_cuda.h"
#include "ops/scaled_linear/quantize_four_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kSlots = 3;  // of a warp
constexpr int kHalfBytes = 2048, kSlotBytes = 2 * kHalfBytes;
constexpr int kStepBytes = kWarp * 16;  // of each half, at a time
constexpr int kMostShared = 227 * 1024;
constexpr int kMostExpertsOfOne = kWarp;
enum Phase { kSharedUp, kRoutedUp, kSharedDown, kRoutedDown, kEnd };

// Of shared memory behind the tables, in floats.
struct Places {
  int32_t up_scales[2];   // [blocks of 128 units that a block has some of][gate, up][hidden / 128]
  int32_t down_scales;    // [two blocks of 128 rows][all_blocks]
  int32_t x_scales;       // [hidden / 128]
  int32_t blocks_scales;  // [all_blocks], of the activations
  int32_t up_sums[2];     // [units][pieces][gate, up]
  int32_t down_sums;      // [parts][rows]
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
  int32_t vector_bytes;  // of x or of the activations, the larger
  int32_t most_rows;     // of the result, of a block
  Places places;
  ScaleForm form;
  bool f32;

  __device__ int inter_of(int phase) const {
    return phase == kSharedUp || phase == kSharedDown ? shared_inter : inter;
  }
  __device__ int all_blocks() const { return (shared_inter + experts * inter) / 128; }
};

// A block's part of a phase. Units are intermediate columns of all the phase's experts, or rows of
// the result.
struct Share {
  int begin, end;
  int columns, pieces, piece_columns;  // of a row of weights
  int groups;                          // of rows that fit a slot, of an expert: of down
  int num_items;
};

class Work;
struct Tables;

// One lane's requests. In shared memory, and one function that is called from everywhere: few
// instructions to fetch.
struct Requests {
  SlotTurn at;
  int phase, index;
  // The next one: where it lies is known before its slot is free.
  bool is_ready;
  const uint8_t* from;
  int64_t second;
  int bytes0, bytes1;

  __device__ void begin(const Work& work, const Tables& tables, int first_phase);
  __device__ void step(const Work& work, Tables& tables, uint8_t* slots, int before);
};

struct Tables {
  Share shares[kEnd];
  Requests requests[kWarps];
  uint64_t arrived[kWarps][kSlots];
  uint64_t scales_there;
  uint64_t awaited[2];  // what progress is when all blocks' activations are there
  int32_t warps_done[2];
  int32_t ids[kMostExpertsOfOne];
  float weights[kMostExpertsOfOne];  // of an expert that is none: 0, and -1 for its id
};

__host__ __device__ constexpr int pieces_of(int columns) {
  return (columns + kHalfBytes - 1) / kHalfBytes;
}
// Columns of the longest piece.
__host__ __device__ constexpr int piece_columns(int columns) {
  return ((columns + 127) / 128 + pieces_of(columns) - 1) / pieces_of(columns) * 128;
}

__device__ Share share_of(const Arguments& a, int phase) {
  const bool is_shared = phase == kSharedUp || phase == kSharedDown;
  const int inter = is_shared ? a.shared_inter : a.inter;
  const int units = phase >= kSharedDown ? a.hidden : is_shared ? inter : a.experts * inter;
  Share s;
  s.begin = static_cast<int>(static_cast<int64_t>(units) * blockIdx.x / gridDim.x);
  s.end = static_cast<int>(static_cast<int64_t>(units) * (blockIdx.x + 1) / gridDim.x);
  s.columns = phase < kSharedDown ? a.hidden : inter;
  s.pieces = pieces_of(s.columns);
  s.piece_columns = s.pieces == 0 ? 0 : piece_columns(s.columns);
  const int most = s.columns == 0 ? 2 : 2 * max(kHalfBytes / s.columns, 1);
  s.groups = (s.end - s.begin + most - 1) / most;
  s.num_items = phase < kSharedDown ? (s.end - s.begin) * s.pieces
                                    : (is_shared ? 1 : a.experts) * s.groups * s.pieces;
  return s;
}

// What a slot holds: `columns` bytes from `column` on of `rows0` rows, then of `rows1` others.
struct Item {
  int chosen;  // expert of the token
  int unit;    // the first row of the first half: intermediate column, or row of the result
  int piece, column, columns;
  int rows0, rows1;
};

// A warp takes every kWarps-th item of a phase.
class Work {
 public:
  __device__ Work(const Arguments& a, const Tables& tables) : a_(a), tables_(tables) {}

  // Of the two phases of gate and up, or of down: the second's items follow in turn.
  __device__ int first(int phase) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    return phase % 2 == 0 ? warp : (warp - tables_.shares[phase - 1].num_items) & (kWarps - 1);
  }
  __device__ Item item(int phase, int index) const {
    const Share& s = tables_.shares[phase];
    Item item;
    const int whole = index / s.pieces;
    item.piece = index - whole * s.pieces;
    item.column = item.piece * s.piece_columns;
    item.columns = min(s.piece_columns, s.columns - item.column);
    if (phase < kSharedDown) {
      item.unit = s.begin + whole;
      item.chosen = phase == kSharedUp ? 0 : item.unit / a_.inter;
      item.rows0 = item.rows1 = 1;
    } else {
      item.chosen = whole / s.groups;
      const int group = whole - item.chosen * s.groups, rows = s.end - s.begin;
      const int first = rows * group / s.groups;
      const int count = rows * (group + 1) / s.groups - first;
      item.unit = s.begin + first;
      item.rows0 = (count + 1) / 2;
      item.rows1 = count / 2;
    }
    return item;
  }
  // Where the first half comes from, and how far from there the second does.
  __device__ const uint8_t* from(int phase, const Item& item, int64_t* second) const {
    const bool is_shared = phase == kSharedUp || phase == kSharedDown;
    const int64_t expert = is_shared ? 0 : this->expert(item.chosen);
    if (phase < kSharedDown) {
      const int inter = is_shared ? a_.shared_inter : a_.inter;
      *second = static_cast<int64_t>(inter) * a_.hidden;
      return (is_shared ? a_.shared_gate_up : a_.gate_up) +
             ((expert * 2 - item.chosen) * inter + item.unit) * a_.hidden + item.column;
    }
    const int columns = tables_.shares[phase].columns;
    *second = static_cast<int64_t>(item.rows0) * columns;
    return (is_shared ? a_.shared_down : a_.down) + (expert * a_.hidden + item.unit) * columns +
           item.column;
  }
  __device__ int expert(int chosen) const { return max(tables_.ids[chosen], 0); }

 private:
  const Arguments& a_;
  const Tables& tables_;
};

__device__ void Requests::begin(const Work& work, const Tables& tables, int first_phase) {
  for (phase = first_phase; phase < kEnd; ++phase) {
    index = work.first(phase);
    if (index < tables.shares[phase].num_items) break;
  }
}

// Asks for what is ready, and makes ready what comes next, if that is before the phase `before`.
__device__ __noinline__ void Requests::step(const Work& work, Tables& tables, uint8_t* slots,
                                            int before) {
  if (is_ready) {
    uint8_t* const slot = slots + at.slot * kSlotBytes;
    uint64_t* const arrived = &tables.arrived[threadIdx.x / kWarp][at.slot];
    const uint64_t policy = read_once_policy();
    barrier_expect(arrived, bytes0 + bytes1);
    copy_bytes_under(policy, slot, from, bytes0, arrived);
    if (bytes1 > 0) copy_bytes_under(policy, slot + kHalfBytes, from + second, bytes1, arrived);
    at.advance(kSlots);
  }
  is_ready = phase < before;
  if (!is_ready) return;
  const Item item = work.item(phase, index);
  from = work.from(phase, item, &second);
  bytes0 = item.rows0 * item.columns;
  bytes1 = item.rows1 * item.columns;
  index += kWarps;
  if (index >= tables.shares[phase].num_items) begin(work, tables, phase + 1);
}

// Pointers that come from here are known to be of shared memory wherever they are used.
__device__ uint8_t* block_memory() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}
__device__ uint8_t* vector_memory() { return block_memory() + kWarps * kSlots * kSlotBytes; }

// ---- vectors of f16 in shared memory: of 512 the first eight of each sixteen, then the others, so
// that lanes read sixteen neighbours each without conflicts.

__device__ unsigned vector_at(unsigned i) {  // bytes, of the eight that i is one of
  return i / 512 * 1024 + i / 8 % 2 * 512 + i % 512 / 16 * 16;
}

struct Sixteen {
  uint4 low, high;
};

__device__ Sixteen load_sixteen(unsigned first) {
  const auto* at = reinterpret_cast<const uint4*>(vector_memory() + vector_at(first));
  return {at[0], at[512 / 16]};
}

// ---- products

struct Pair {
  float first, second;
};

// 512 bytes of each half, 16 of a lane: the sums of products of 64 bytes, in the lane that is on
// the diagonal.
__device__ Pair multiply_step(const uint8_t* weights, const Sixteen& x, int lane) {
  const uint4 w[2] = {*reinterpret_cast<const uint4*>(weights),
                      *reinterpret_cast<const uint4*>(weights + kHalfBytes)};
  const auto a_of = [](uint32_t first, uint32_t second, uint32_t(&a)[4]) {
    a[0] = fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(first));
    a[1] = fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(second));
    a[2] = fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(first >> 16));
    a[3] = fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(second >> 16));
  };
  float d[2][4] = {};
  uint32_t a[4];
  a_of(w[0].x, w[1].x, a);
  warp_mma_16x8x16_f16(d[0], a, {x.low.x, x.low.y});
  a_of(w[0].y, w[1].y, a);
  warp_mma_16x8x16_f16(d[1], a, {x.low.z, x.low.w});
  a_of(w[0].z, w[1].z, a);
  warp_mma_16x8x16_f16(d[0], a, {x.high.x, x.high.y});
  a_of(w[0].w, w[1].w, a);
  warp_mma_16x8x16_f16(d[1], a, {x.high.z, x.high.w});
  const bool odd = (lane & 4) != 0;
  return {odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0], odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2]};
}

// A lane's row of the matrix, g, is the one whose column it has.
__device__ bool is_on_diagonal(int lane) { return lane % 4 == lane / 8; }

// Columns of one row of each half: the first half's and the second's sums, in every lane. The
// scales are those from the first of the columns on.
__device__ Pair multiply_rows(const uint8_t* weights, int first, int columns, const float* x_scales,
                              const float* scales0, const float* scales1, int lane) {
  Pair sums = {0, 0};
  const unsigned chunk = static_cast<unsigned>(lane) / 4 * 64;
  const bool diagonal = is_on_diagonal(lane);
#pragma unroll 2
  for (unsigned at = 0; at < static_cast<unsigned>(columns); at += kStepBytes) {
    const Pair more =
        multiply_step(weights + at + lane * 16, load_sixteen(first + at + lane * 16), lane);
    const unsigned column = at + chunk, block = column / 128;
    if (diagonal && column < static_cast<unsigned>(columns)) {
      const float x_scale = x_scales[block];
      sums.first = fmaf(more.first, x_scale * scales0[block], sums.first);
      sums.second = fmaf(more.second, x_scale * scales1[block], sums.second);
    }
  }
  return {warp_sum(sums.first), warp_sum(sums.second)};
}

__device__ float silu_times(float gate, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

// ---- the kernel

class OneRow {
 public:
  __device__ explicit OneRow(const Arguments& a)
      : a_(a),
        tables_(*reinterpret_cast<Tables*>(block_memory() + kWarps * kSlots * kSlotBytes +
                                           a.vector_bytes)),
        floats_(reinterpret_cast<float*>(&tables_ + 1)),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        work_(a, tables_) {}

  __device__ void run() {
    if (threadIdx.x < kEnd) {
      tables_.shares[threadIdx.x] = share_of(a_, static_cast<int>(threadIdx.x));
      if (threadIdx.x < 2) tables_.warps_done[threadIdx.x] = 0;
      if (threadIdx.x == 0) barrier_init(&tables_.scales_there, kThreads);
    }
    if (lane_ == 0) {
      for (int slot = 0; slot < kSlots; ++slot) barrier_init(&tables_.arrived[warp_][slot], 1);
      fence_barrier_init();
    }
    __syncthreads();
    // What is before kRoutedUp needs no experts' ids; the rest of the slots is asked for below.
    Requests& requests = tables_.requests[warp_];
    int asked = 0;
    if (lane_ == 0) {
      requests.at = {};
      requests.is_ready = false;
      requests.begin(work_, tables_, kSharedUp);
      request(kRoutedUp);
      for (; asked < kSlots && requests.is_ready; ++asked) request(kRoutedUp);
    }
    copy_scales(true);
    let_next_launch_begin();
    wait_for_earlier_launches();
    if (static_cast<int>(threadIdx.x) < a_.experts) {
      tables_.ids[threadIdx.x] = a_.expert_ids[threadIdx.x];
      tables_.weights[threadIdx.x] = a_.expert_weights[threadIdx.x];
    }
    load_x();
    wait_for_copies();
    __syncthreads();
    if (lane_ == 0) {
      if (!requests.is_ready) request(kEnd);
      for (; asked < kSlots && requests.is_ready; ++asked) request(kEnd);
    }
    copy_scales(false);
    barrier_arrive_after_copies(&tables_.scales_there);
#pragma unroll 1
    for (int phase = kSharedUp; phase <= kRoutedUp; ++phase) {
      if (phase == kRoutedUp) barrier_wait(&tables_.scales_there, 0);
      gate_up(phase);
    }
    __syncthreads();  // nobody reads x any more
#pragma unroll 1
    for (int phase = kSharedDown; phase <= kRoutedDown; ++phase) down(phase);
    __syncthreads();
    write_out();
  }

 private:
  __device__ uint8_t* slots() const { return block_memory() + warp_ * kSlots * kSlotBytes; }
  __device__ void request(int before) {
    tables_.requests[warp_].step(work_, tables_, slots(), before);
  }

  // ---- scales and vectors

  __device__ float* up_scales(int phase) const { return floats_ + a_.places.up_scales[phase]; }
  // Of the block's first row's block of 128 rows.
  __device__ int first_row_block() const { return tables_.shares[kRoutedDown].begin / 128; }

  // Of the shared expert or of the others, a warp a row of scales: what is to be divided is
  // divided once a row.
  __device__ void copy_scales(bool is_shared) const {
    const int inter = is_shared ? a_.shared_inter : a_.inter, blocks = inter / 128;
    const int row_blocks = a_.hidden / 128;
    if (inter == 0) return;
    const auto copy = [&](int to, const float* from, int count) {
      for (int i = lane_; i < count; i += kWarp) {
        copy_4(shared_address(floats_ + to + i), from + i);
      }
    };
    const int up = is_shared ? kSharedUp : kRoutedUp;
    const int begin = tables_.shares[up].begin, end = tables_.shares[up].end;
    const int first = begin / 128, rows = begin < end ? 2 * ((end - 1) / 128 + 1 - first) : 0;
    for (int i = warp_; i < rows; i += kWarps) {
      const int block = first + i / 2, chosen = block / blocks;  // of 128 units of all experts
      const int64_t at = (int64_t{is_shared ? 0 : work_.expert(chosen)} * 2 + i % 2) * blocks +
                         block - chosen * blocks;
      copy(a_.places.up_scales[up] + i * row_blocks,
           (is_shared ? a_.shared_gate_up_scales : a_.gate_up_scales) + at * row_blocks,
           row_blocks);
    }
    const int first_column = is_shared ? 0 : a_.shared_inter / 128;
    for (int i = warp_; i < 2 * (is_shared ? 1 : a_.experts); i += kWarps) {
      const int row = min(first_row_block() + i % 2, row_blocks - 1);
      const int64_t at = int64_t{is_shared ? 0 : work_.expert(i / 2)} * row_blocks + row;
      copy(a_.places.down_scales + i % 2 * a_.all_blocks() + first_column + i / 2 * blocks,
           (is_shared ? a_.shared_down_scales : a_.down_scales) + at * blocks, blocks);
    }
  }

  __device__ void load_x() const {
    for (int i = static_cast<int>(threadIdx.x); i < a_.hidden / 16; i += kThreads) {
      const uint4 x = reinterpret_cast<const uint4*>(a_.x)[i];
      auto* const to = reinterpret_cast<uint4*>(vector_memory() + vector_at(i * 16));
      const auto low = [](uint32_t four) {
        return fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(four));
      };
      to[0] = make_uint4(low(x.x), low(x.x >> 16), low(x.y), low(x.y >> 16));
      to[512 / 16] = make_uint4(low(x.z), low(x.z >> 16), low(x.w), low(x.w >> 16));
    }
    for (int i = static_cast<int>(threadIdx.x); i < a_.hidden / 128; i += kThreads) {
      floats_[a_.places.x_scales + i] = a_.x_scales[i * a_.x_scales_stride];
    }
  }

  // What all blocks have written: not through the L1. A warp takes 128 activations.
  __device__ void load_activations(int phase) const {
    const int first = phase == kSharedDown ? 0 : a_.shared_inter / 128;
    const int end = phase == kSharedDown ? a_.shared_inter / 128 : a_.all_blocks();
    constexpr int kTogether = 4;
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
        const QuantizedFour four = quantize_four(values[i], a_.form);
        const int column = at * 128 + lane_ * 4;
        *reinterpret_cast<uint2*>(vector_memory() + vector_at(column) + column % 8 * 2) =
            make_uint2(fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(four.values)),
                       fp8_to_f16<Fp8::kE4M3>(static_cast<uint16_t>(four.values >> 16)));
        if (lane_ == 0) {
          const int chosen = (at - a_.shared_inter / 128) / (a_.inter / 128);
          const float weight = phase == kSharedDown ? 1.0f : tables_.weights[chosen];
          floats_[a_.places.blocks_scales + at] = four.scale * weight;
        }
      }
    }
  }

  // ---- items

  __device__ const uint8_t* wait_for_slot() const {
    barrier_wait(&tables_.arrived[warp_][at_.slot], at_.parity);
    return slots() + at_.slot * kSlotBytes;
  }
  __device__ void give_back_slot() {
    __syncwarp();
    if (lane_ == 0) request(kEnd);
    at_.advance(kSlots);
  }

  __device__ void gate_up(int phase) {
    const int num_items = tables_.shares[phase].num_items, begin = tables_.shares[phase].begin;
    const int row_blocks = a_.hidden / 128;
    auto* const sums = reinterpret_cast<float2*>(floats_ + a_.places.up_sums[phase]);
    for (int i = work_.first(phase); i < num_items; i += kWarps) {
      const Item item = work_.item(phase, i);
      const int column = item.column / 128;
      const float* scales =
          up_scales(phase) + (item.unit / 128 - begin / 128) * 2 * row_blocks + column;
      const uint8_t* slot = wait_for_slot();
      const Pair pair =
          multiply_rows(slot, item.column, item.columns, floats_ + a_.places.x_scales + column,
                        scales, scales + row_blocks, lane_);
      give_back_slot();
      if (lane_ == 0) sums[i] = make_float2(pair.first, pair.second);
    }
    finish_gate_up(phase, sums);
  }

  // The last warp writes the block's activations.
  __device__ void finish_gate_up(int phase, const float2* sums) const {
    int done = 0;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence_block();
      done = atomicAdd(&tables_.warps_done[phase], 1);
      __threadfence_block();
    }
    if (__shfl_sync(~0u, done, 0) != kWarps - 1) return;
    const int begin = tables_.shares[phase].begin, end = tables_.shares[phase].end;
    const int pieces = tables_.shares[phase].pieces;
    for (int unit = begin + lane_; unit < end; unit += kWarp) {
      float2 sum = make_float2(0, 0);
      for (int i = 0; i < pieces; ++i) {
        const float2 more = sums[(unit - begin) * pieces + i];
        sum.x += more.x, sum.y += more.y;
      }
      const bool exists = phase == kSharedUp || tables_.ids[unit / a_.inter] >= 0;
      a_.activations[(phase == kRoutedUp ? a_.shared_inter : 0) + unit] =
          exists ? silu_times(sum.x, sum.y) : 0;
    }
    __threadfence();
    __syncwarp();
    if (lane_ == 0) {
      const uint64_t before = add_release(&a_.progress[phase], 1);
      tables_.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
    }
  }

  __device__ void down(int phase) {
    const int columns = a_.inter_of(phase);
    if (columns == 0) return;
    const int up = phase - kSharedDown;
    if (threadIdx.x == 0) {
      while (load_acquire(&a_.progress[up]) < tables_.awaited[up]) {
      }
    }
    __syncthreads();
    load_activations(phase);
    __syncthreads();
    const Share& share = tables_.shares[phase];
    // Its parts of a sum follow the shared expert's.
    const int first_part = phase == kSharedDown ? 0 : tables_.shares[kSharedDown].pieces;
    for (int i = work_.first(phase); i < share.num_items; i += kWarps) {
      const Item item = work_.item(phase, i);
      const int part = first_part + item.chosen * share.pieces + item.piece;
      const int column =
          (phase == kSharedDown ? 0 : a_.shared_inter + item.chosen * columns) + item.column;
      float* sums = floats_ + a_.places.down_sums + part * a_.most_rows + item.unit - share.begin;
      const uint8_t* slot = wait_for_slot();
      if (kStepBytes % columns == 0) {
        multiply_short_rows(item, slot, column, sums);
      } else {
        for (int j = 0; j < item.rows0; ++j) {
          const Pair pair =
              multiply_rows(slot + j * columns, column, item.columns,
                            floats_ + a_.places.blocks_scales + column / 128,
                            row_scales(item.unit + j) + column / 128,
                            row_scales(item.unit + item.rows0 + j) + column / 128, lane_);
          if (lane_ == 0) {
            sums[j] = pair.first;
            if (j < item.rows1) sums[item.rows0 + j] = pair.second;
          }
        }
      }
      give_back_slot();
    }
  }

  __device__ const float* row_scales(int row) const {
    const int block = min(row / 128 - first_row_block(), 1);
    return floats_ + a_.places.down_scales + block * a_.all_blocks();
  }

  // Of 128 or 256 columns: several in what is multiplied at a time, and always the same of the
  // vector.
  __device__ void multiply_short_rows(const Item& item, const uint8_t* slot, int column,
                                      float* sums) const {
    const int columns = item.columns, chunk = lane_ / 4;
    const Sixteen x = load_sixteen(column + lane_ * 16 % columns);
    const int block = (column + chunk * 64 % columns) / 128;
    const float x_scale = floats_[a_.places.blocks_scales + block];
    const int diagonal = lane_ / 4 * 4 + lane_ / 8;  // the lane that has this lane's row's sum
#pragma unroll 2
    for (int at = 0; at < item.rows0 * columns; at += kStepBytes) {
      const Pair more = multiply_step(slot + at + lane_ * 16, x, lane_);
      const int row = (at + chunk * 64) / columns;
      float first =
          __shfl_sync(~0u, more.first, diagonal) * (x_scale * row_scales(item.unit + row)[block]);
      float second = __shfl_sync(~0u, more.second, diagonal) *
                     (x_scale * row_scales(item.unit + item.rows0 + row)[block]);
      for (int distance = 4; distance < columns / 16; distance *= 2) {
        first += __shfl_xor_sync(~0u, first, distance);
        second += __shfl_xor_sync(~0u, second, distance);
      }
      if (lane_ * 16 % columns != 0) continue;
      if (row < item.rows0) sums[row] = first;
      if (row < item.rows1) sums[item.rows0 + row] = second;
    }
  }

  __device__ void write_out() const {
    const Share& share = tables_.shares[kRoutedDown];
    const int begin = share.begin, end = share.end;
    const int parts = tables_.shares[kSharedDown].pieces + a_.experts * share.pieces;
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
  const Work work_;
  SlotTurn at_;
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

bool scaled_moe_one_row_takes(const MoeShape& shape) {
  const int blocks = moe_few_rows_blocks();
  return shape.experts_per_token <= kMostExpertsOfOne && shape.hidden <= 128 * blocks &&
         SharedMemory(shape, blocks).bytes <= kMostShared;
}

void scaled_moe_one_row(const ScaledMoeArguments& arguments, cudaStream_t stream) {
  static const bool prepared = (allow_shared_memory(scaled_moe_one_row_kernel, kMostShared), true);
  static_cast<void>(prepared);
  const MoeShape& shape = arguments.shape;
  const int blocks = moe_few_rows_blocks();
  const SharedMemory memory(shape, blocks);
  const auto cast = [](const void* p) { return static_cast<const uint8_t*>(p); };
  const Arguments a = {.x = cast(arguments.x),
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
                       .places = memory.places,
                       .form = arguments.form,
                       .f32 = arguments.out_type == DType::kF32};
  launch(scaled_moe_one_row_kernel,
         {.blocks = static_cast<unsigned>(blocks),
          .threads = kThreads,
          .shared_bytes = static_cast<unsigned>(memory.bytes)},
         stream, a);
}

}  // namespace fathom::cuda
