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
#include "ops/scaled_linear/quantize_cuda.cuh"

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

struct Tables {
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

// What a slot holds: `columns` bytes from `column` on of rows[0] rows, then of rows[1] others.
struct Item {
  int chosen;  // expert of the token
  int unit;    // the first row of the first half: intermediate column, or row of the result
  int column, columns;
  int rows[2];
  const uint8_t* from[2];
};

// A block's share of the work, of which a warp takes every kWarps-th item.
class Work {
 public:
  __device__ Work(const Arguments& a, const Tables& tables) : a_(a), tables_(tables) {}

  __device__ int begin(int phase) const { return share(units(phase), blockIdx.x); }
  __device__ int end(int phase) const { return share(units(phase), blockIdx.x + 1); }
  __device__ int columns(int phase) const {
    return phase < kSharedDown ? a_.hidden : a_.inter_of(phase);
  }
  // Of the two phases of gate and up, or of down: the second's items follow in turn.
  __device__ int first(int phase) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    return phase % 2 == 0 ? warp : (warp - num_items(phase - 1)) & (kWarps - 1);
  }
  __device__ int num_items(int phase) const {
    const int count = end(phase) - begin(phase);
    if (columns(phase) == 0 || count == 0) return 0;
    return phase < kSharedDown ? count * pieces_of(a_.hidden)
                               : experts(phase) * groups(phase) * pieces_of(columns(phase));
  }
  __device__ Item item(int phase, int index) const {
    Item item;
    const int all_columns = columns(phase), pieces = pieces_of(all_columns);
    const int whole = index / pieces, piece = index - whole * pieces;
    item.column = piece * piece_columns(all_columns);
    item.columns = min(piece_columns(all_columns), all_columns - item.column);
    if (phase < kSharedDown) {
      item.unit = begin(phase) + whole;
      item.chosen = phase == kSharedUp ? 0 : item.unit / a_.inter;
      item.rows[0] = item.rows[1] = 1;
      const int64_t gate =
          phase == kSharedUp
              ? item.unit
              : (int64_t{expert(item.chosen)} * 2 - item.chosen) * a_.inter + item.unit;
      const uint8_t* matrix = phase == kSharedUp ? a_.shared_gate_up : a_.gate_up;
      item.from[0] = matrix + gate * a_.hidden + item.column;
      item.from[1] = item.from[0] + int64_t{a_.inter_of(phase)} * a_.hidden;
    } else {
      const int of_expert = groups(phase), rows = end(phase) - begin(phase);
      item.chosen = whole / of_expert;
      const int group = whole - item.chosen * of_expert;
      const int first = rows * group / of_expert;
      const int count = rows * (group + 1) / of_expert - first;
      item.unit = begin(phase) + first;
      item.rows[0] = (count + 1) / 2;
      item.rows[1] = count / 2;
      const int64_t row =
          (phase == kSharedDown ? 0 : int64_t{expert(item.chosen)} * a_.hidden) + item.unit;
      item.from[0] =
          (phase == kSharedDown ? a_.shared_down : a_.down) + row * all_columns + item.column;
      item.from[1] = item.from[0] + int64_t{item.rows[0]} * all_columns;
    }
    return item;
  }
  __device__ int experts(int phase) const { return phase == kRoutedDown ? a_.experts : 1; }
  __device__ int expert(int chosen) const { return max(tables_.ids[chosen], 0); }

 private:
  // Groups of rows of the result that fit a slot.
  __device__ int groups(int phase) const {
    const int most = 2 * max(kHalfBytes / columns(phase), 1);
    return (end(phase) - begin(phase) + most - 1) / most;
  }
  __device__ int units(int phase) const {
    return phase == kSharedUp   ? a_.shared_inter
           : phase == kRoutedUp ? a_.experts * a_.inter
                                : a_.hidden;
  }
  static __device__ int share(int units, unsigned block) {
    return static_cast<int>(static_cast<int64_t>(units) * block / gridDim.x);
  }

  const Arguments& a_;
  const Tables& tables_;
};

// One lane's requests. Where the next one lies is known before its slot is free.
class Requests {
 public:
  __device__ Requests(const Work& work, uint8_t* slots, uint64_t* arrived)
      : work_(work), slots_(slots), arrived_(arrived) {
    begin_phase(kSharedUp);
  }

  // Until `before`, a phase.
  __device__ void prepare(int before) {
    if (is_ready_ || phase_ >= before) return;
    item_ = work_.item(phase_, index_);
    is_ready_ = true;
    index_ += kWarps;
    if (index_ >= end_) begin_phase(phase_ + 1);
  }
  // Whether there was one.
  __device__ bool ask() {
    if (!is_ready_) return false;
    uint64_t* const arrived = &arrived_[at_.slot];
    uint8_t* const slot = slots_ + at_.slot * kSlotBytes;
    const int bytes[2] = {item_.rows[0] * item_.columns, item_.rows[1] * item_.columns};
    barrier_expect(arrived, bytes[0] + bytes[1]);
    copy_bytes_under(policy_, slot, item_.from[0], bytes[0], arrived);
    if (bytes[1] > 0) {
      copy_bytes_under(policy_, slot + kHalfBytes, item_.from[1], bytes[1], arrived);
    }
    at_.advance(kSlots);
    is_ready_ = false;
    return true;
  }

 private:
  __device__ void begin_phase(int phase) {
    for (; phase < kEnd; ++phase) {
      index_ = work_.first(phase), end_ = work_.num_items(phase);
      if (index_ < end_) break;
    }
    phase_ = phase;
  }

  const Work& work_;
  uint8_t* const slots_;
  uint64_t* const arrived_;
  const uint64_t policy_ = read_once_policy();
  SlotTurn at_;
  Item item_;
  bool is_ready_ = false;
  int phase_, index_, end_;
};

// ---- vectors of f16 in shared memory: of 512 the first eight of each sixteen, then the others, so
// that lanes read sixteen neighbours each without conflicts.

__device__ int vector_at(int i) {  // bytes, of the eight that i is one of
  return i / 512 * 1024 + i / 8 % 2 * 512 + i % 512 / 16 * 16;
}

struct Sixteen {
  uint4 low, high;
};

__device__ Sixteen load_sixteen(const uint8_t* vector, int first) {
  const auto* at = reinterpret_cast<const uint4*>(vector + vector_at(first));
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
  const int odd = lane / 4 % 2;
  return {odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0], odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2]};
}

// A lane's row of the matrix, g, is the one whose column it has.
__device__ bool is_on_diagonal(int lane) { return lane % 4 == lane / 8; }

// Columns of one row of each half: the first half's and the second's sums, in every lane. The
// scales are those from the first of the columns on.
__device__ Pair multiply_rows(const uint8_t* weights, const uint8_t* vector, int first, int columns,
                              const float* x_scales, const float* scales0, const float* scales1,
                              int lane) {
  Pair sums = {0, 0};
  const int chunk = lane / 4;  // of 64 bytes
  const bool diagonal = is_on_diagonal(lane);
#pragma unroll 2
  for (int at = 0; at < columns; at += kStepBytes) {
    const Pair more =
        multiply_step(weights + at + lane * 16, load_sixteen(vector, first + at + lane * 16), lane);
    const int column = at + chunk * 64;
    if (diagonal && column < columns) {
      const float x_scale = x_scales[column / 128];
      sums.first = fmaf(more.first, x_scale * scales0[column / 128], sums.first);
      sums.second = fmaf(more.second, x_scale * scales1[column / 128], sums.second);
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
  __device__ OneRow(const Arguments& a, uint8_t* memory)
      : a_(a),
        vector_(memory + kWarps * kSlots * kSlotBytes),
        tables_(*reinterpret_cast<Tables*>(vector_ + a.vector_bytes)),
        floats_(reinterpret_cast<float*>(&tables_ + 1)),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        slots_(memory + warp_ * kSlots * kSlotBytes),
        work_(a, tables_),
        requests_(work_, slots_, tables_.arrived[warp_]) {}

  __device__ void run() {
    if (lane_ == 0) {
      for (int slot = 0; slot < kSlots; ++slot) barrier_init(&tables_.arrived[warp_][slot], 1);
      if (warp_ == 0) barrier_init(&tables_.scales_there, kThreads);
      fence_barrier_init();
    }
    // What is before kRoutedUp needs no experts' ids; the rest of the slots is asked for below.
    int asked = 0;
    if (lane_ == 0) {
      for (; asked < kSlots; ++asked) {
        requests_.prepare(kRoutedUp);
        if (!requests_.ask()) break;
      }
    }
    copy_scales(kSharedUp);
    copy_scales(kSharedDown);
    if (threadIdx.x < 2) tables_.warps_done[threadIdx.x] = 0;
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
      for (; asked < kSlots; ++asked) {
        requests_.prepare(kEnd);
        requests_.ask();
      }
      requests_.prepare(kEnd);
    }
    copy_scales(kRoutedUp);
    copy_scales(kRoutedDown);
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
  // ---- scales and vectors

  __device__ float* up_scales(int phase) const { return floats_ + a_.places.up_scales[phase]; }
  // Of the block's first row's block of 128 rows.
  __device__ int first_row_block() const { return work_.begin(kRoutedDown) / 128; }

  __device__ void copy_scales(int phase) const {
    const int inter = a_.inter_of(phase), blocks = inter / 128, row_blocks = a_.hidden / 128;
    if (inter == 0) return;
    const int thread = static_cast<int>(threadIdx.x);
    if (phase < kSharedDown) {
      const int begin = work_.begin(phase), end = work_.end(phase);
      const float* from = phase == kSharedUp ? a_.shared_gate_up_scales : a_.gate_up_scales;
      const int first = begin / 128, count = begin < end ? (end - 1) / 128 + 1 - first : 0;
      for (int i = thread; i < count * 2 * row_blocks; i += kThreads) {
        const int row = i / row_blocks, column = i - row * row_blocks;
        const int block = first + row / 2, chosen = block / blocks;  // of 128 units of all experts
        const int expert = phase == kSharedUp ? 0 : work_.expert(chosen);
        const int64_t at = (int64_t{expert} * 2 + row % 2) * blocks + block - chosen * blocks;
        copy_4(shared_address(up_scales(phase) + i), from + at * row_blocks + column);
      }
    } else {
      const float* from = phase == kSharedDown ? a_.shared_down_scales : a_.down_scales;
      const int experts = work_.experts(phase);
      const int first = phase == kSharedDown ? 0 : a_.shared_inter / 128;
      for (int i = thread; i < 2 * experts * blocks; i += kThreads) {
        const int row = i / (experts * blocks), rest = i - row * experts * blocks;
        const int chosen = rest / blocks, column = rest - chosen * blocks;
        const int expert = phase == kSharedDown ? 0 : work_.expert(chosen);
        const int64_t at =
            int64_t{expert} * row_blocks + min(first_row_block() + row, row_blocks - 1);
        copy_4(
            shared_address(floats_ + a_.places.down_scales + row * a_.all_blocks() + first + rest),
            from + at * blocks + column);
      }
    }
  }

  __device__ void load_x() const {
    for (int i = static_cast<int>(threadIdx.x); i < a_.hidden / 16; i += kThreads) {
      const uint4 x = reinterpret_cast<const uint4*>(a_.x)[i];
      auto* const to = reinterpret_cast<uint4*>(vector_ + vector_at(i * 16));
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
        const QuantisedFour four = quantise_four(values[i], a_.form);
        const int column = at * 128 + lane_ * 4;
        *reinterpret_cast<uint2*>(vector_ + vector_at(column) + column % 8 * 2) =
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
    return slots_ + at_.slot * kSlotBytes;
  }
  __device__ void give_back_slot() {
    __syncwarp();
    if (lane_ == 0) {
      requests_.ask();
      requests_.prepare(kEnd);
    }
    at_.advance(kSlots);
  }

  __device__ void gate_up(int phase) {
    const int num_items = work_.num_items(phase), begin = work_.begin(phase);
    const int row_blocks = a_.hidden / 128;
    auto* const sums = reinterpret_cast<float2*>(floats_ + a_.places.up_sums[phase]);
    for (int i = work_.first(phase); i < num_items; i += kWarps) {
      const Item item = work_.item(phase, i);
      const int column = item.column / 128;
      const float* scales =
          up_scales(phase) + (item.unit / 128 - begin / 128) * 2 * row_blocks + column;
      const uint8_t* slot = wait_for_slot();
      const Pair pair =
          multiply_rows(slot, vector_, item.column, item.columns,
                        floats_ + a_.places.x_scales + column, scales, scales + row_blocks, lane_);
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
    const int begin = work_.begin(phase), pieces = pieces_of(a_.hidden);
    for (int unit = begin + lane_; unit < work_.end(phase); unit += kWarp) {
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
    const int num_items = work_.num_items(phase), pieces = pieces_of(columns);
    const int first_row = work_.begin(phase);
    for (int i = work_.first(phase); i < num_items; i += kWarps) {
      const Item item = work_.item(phase, i);
      const int part = phase == kSharedDown
                           ? i % pieces
                           : (a_.shared_inter > 0 ? pieces_of(a_.shared_inter) : 0) +
                                 item.chosen * pieces + i % pieces;
      const int column =
          (phase == kSharedDown ? 0 : a_.shared_inter + item.chosen * columns) + item.column;
      float* sums = floats_ + a_.places.down_sums + part * a_.most_rows + item.unit - first_row;
      const uint8_t* slot = wait_for_slot();
      if (kStepBytes % columns == 0) {
        multiply_short_rows(item, slot, column, sums);
      } else {
        for (int j = 0; j < item.rows[0]; ++j) {
          const Pair pair =
              multiply_rows(slot + j * columns, vector_, column, item.columns,
                            floats_ + a_.places.blocks_scales + column / 128,
                            row_scales(item.unit + j) + column / 128,
                            row_scales(item.unit + item.rows[0] + j) + column / 128, lane_);
          if (lane_ == 0) {
            sums[j] = pair.first;
            if (j < item.rows[1]) sums[item.rows[0] + j] = pair.second;
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
    const Sixteen x = load_sixteen(vector_, column + lane_ * 16 % columns);
    const int block = (column + chunk * 64 % columns) / 128;
    const float x_scale = floats_[a_.places.blocks_scales + block];
    const int diagonal = lane_ / 4 * 4 + lane_ / 8;  // the lane that has this lane's row's sum
#pragma unroll 2
    for (int at = 0; at < item.rows[0] * columns; at += kStepBytes) {
      const Pair more = multiply_step(slot + at + lane_ * 16, x, lane_);
      const int row = (at + chunk * 64) / columns;
      float first =
          __shfl_sync(~0u, more.first, diagonal) * (x_scale * row_scales(item.unit + row)[block]);
      float second = __shfl_sync(~0u, more.second, diagonal) *
                     (x_scale * row_scales(item.unit + item.rows[0] + row)[block]);
      for (int distance = 4; distance < columns / 16; distance *= 2) {
        first += __shfl_xor_sync(~0u, first, distance);
        second += __shfl_xor_sync(~0u, second, distance);
      }
      if (lane_ * 16 % columns != 0) continue;
      if (row < item.rows[0]) sums[row] = first;
      if (row < item.rows[1]) sums[item.rows[0] + row] = second;
    }
  }

  __device__ void write_out() const {
    const int begin = work_.begin(kRoutedDown), end = work_.end(kRoutedDown);
    const int parts =
        (a_.shared_inter > 0 ? pieces_of(a_.shared_inter) : 0) + a_.experts * pieces_of(a_.inter);
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
  uint8_t* const vector_;
  Tables& tables_;
  float* const floats_;
  const int warp_, lane_;
  uint8_t* const slots_;
  const Work work_;
  Requests requests_;
  SlotTurn at_;
};

__global__ void __launch_bounds__(kThreads, 1)
    scaled_moe_one_row_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  OneRow(a, memory).run();
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
