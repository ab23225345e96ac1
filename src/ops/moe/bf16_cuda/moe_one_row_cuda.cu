// What: out = mlp_shared(x) + sum over x's experts e of weight * mlp_e(x) for one token. One
// launch.
//
// Inputs/outputs: moe_cuda.h.
//
// Layout: one CTA per SM, eight warps, each with slots that bulk copies (TMA) fill
// (row_stream_cuda.cuh). x, and later the activations, lie in shared memory.
//
// Algorithm: four GEMV phases in one weight stream; a warp issues the next load as soon as it has
// read a slot, across phase boundaries.
//   1. Gate and up of the shared expert: a unit is the two rows of an intermediate column. CTAs
//      share units evenly, warps take theirs in turn. Activations go to the workspace.
//   2. The same of the token's experts.
//   3. Down of the shared expert: CTAs share the rows of the result evenly, a warp keeps its own.
//   4. The same of the token's experts, added up.
// The first loads are issued before the PDL wait. Activations are waited for with two counters,
// shared with moe_few_rows_cuda.cu: the shared expert's are complete long before phase 3 needs
// them.
//
// Determinism: every sum has one order, which depends on the shape alone. (Atomics count integers.)
//
// Limits: one row. CTAs wait for one another: all of them must be co-resident.
//
// Measured: docs/kernels/moe_few_rows.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "base/math.h"
#include "base/math_constants.h"
#include "device/cuda/co_resident.h"
#include "ops/linear/row_stream_cuda.cuh"
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kSlots = 3;  // slots of a warp
constexpr int kSlotBytes = kPieceColumns * 2;
constexpr int kMostShared = 227 * 1024;
constexpr int kMostExpertsOfOne = kWarp;
enum Phase { kSharedUp, kRoutedUp, kSharedDown, kRoutedDown, kEnd };

struct Arguments {
  const __nv_bfloat16 *x, *gate_up, *down, *shared_gate_up, *shared_down;
  const int32_t* expert_ids;
  const float* expert_weights;
  void* out;
  __nv_bfloat16* activations;  // [shared_inter + experts * inter]
  uint64_t* progress;          // [2]
  int32_t hidden, inter, shared_inter, experts;
  int32_t vector_bytes;  // of x or of the activations, whichever is larger
  bool f32;
};

struct Tables {
  uint64_t arrived[kWarps][kSlots];
  uint64_t awaited[2];  // value of progress when all CTAs' activations are written
  int32_t warps_done[2];
  int32_t ids[kMostExpertsOfOne];
  float weights[kMostExpertsOfOne];  // an absent expert (id -1) has 0
};

// A warp's share of the work: units of each phase, weight rows of each unit.
class WarpWork {
 public:
  __device__ WarpWork(const Arguments& a, const Tables& tables)
      : a_(a), tables_(tables), warp_(static_cast<int>(threadIdx.x) / kWarp) {}

  __device__ int first(int phase) const {
    const int turn = warp_ - (phase == kRoutedUp ? end(kSharedUp) - begin(kSharedUp) : 0);
    return begin(phase) + (turn & (kWarps - 1));  // round-robin over both phases of gate and up
  }
  __device__ int begin(int phase) const { return share(units(phase), blockIdx.x); }
  __device__ int end(int phase) const { return share(units(phase), blockIdx.x + 1); }
  __device__ int rows(int phase) const {
    return phase < kSharedDown ? 2 : phase == kSharedDown ? 1 : a_.experts;
  }
  __device__ int columns(int phase) const {
    return phase < kSharedDown ? a_.hidden : phase == kSharedDown ? a_.shared_inter : a_.inter;
  }
  __device__ const __nv_bfloat16* row(int phase, int unit, int row) const {
    const auto at = [](const __nv_bfloat16* matrix, int64_t row, int columns) {
      return matrix + row * columns;
    };
    if (phase == kSharedUp) return at(a_.shared_gate_up, row * a_.shared_inter + unit, a_.hidden);
    if (phase == kSharedDown) return at(a_.shared_down, unit, a_.shared_inter);
    if (phase == kRoutedDown) {
      return at(a_.down, int64_t{expert(row)} * a_.hidden + unit, a_.inter);
    }
    const int chosen = unit / a_.inter;
    return at(a_.gate_up, (int64_t{expert(chosen)} * 2 + row - chosen) * a_.inter + unit,
              a_.hidden);
  }

 private:
  __device__ int expert(int chosen) const { return max(tables_.ids[chosen], 0); }
  __device__ int units(int phase) const {
    return phase == kSharedUp     ? a_.shared_inter
           : phase == kRoutedUp   ? a_.experts * a_.inter
           : phase == kSharedDown ? (a_.shared_inter > 0 ? a_.hidden : 0)
                                  : a_.hidden;
  }
  static __device__ int share(int units, unsigned block) {
    return static_cast<int>(static_cast<int64_t>(units) * block / gridDim.x);
  }

  const Arguments& a_;
  const Tables& tables_;
  const int warp_;
};

// One lane issues loads, piece after piece of each row.
class Requests {
 public:
  __device__ Requests(const WarpWork& work, uint8_t* slots, uint64_t* arrived)
      : work_(work), slots_(slots), arrived_(arrived) {
    begin_phase(kSharedUp);
  }

  // Issues the next load if there is one before phase `before`.
  __device__ void ask(int before) {
    if (phase_ >= before) return;
    const int columns = min(columns_ - column_, kPieceColumns);
    barrier_expect(&arrived_[at_.slot], columns * 2);
    copy_bytes_under(policy_, slots_ + at_.slot * kSlotBytes,
                     work_.row(phase_, unit_, row_) + column_, columns * 2, &arrived_[at_.slot]);
    at_.advance(kSlots);
    if ((column_ += columns) < columns_) return;
    column_ = 0;
    if (++row_ < rows_) return;
    row_ = 0;
    if ((unit_ += kWarps) < end_) return;
    begin_phase(phase_ + 1);
  }

  __device__ int phase() const { return phase_; }

 private:
  __device__ void begin_phase(int phase) {
    for (; phase < kEnd; ++phase) {
      unit_ = work_.first(phase), end_ = work_.end(phase);
      if (unit_ < end_) break;
    }
    phase_ = phase;
    rows_ = work_.rows(phase), columns_ = work_.columns(phase);
  }

  const WarpWork& work_;
  uint8_t* const slots_;
  uint64_t* const arrived_;
  const uint64_t policy_ = read_once_policy();
  SlotTurn at_;
  int phase_, unit_, end_, rows_, columns_, row_ = 0, column_ = 0;
};

class OneRowProducts {
 public:
  __device__ OneRowProducts(Requests& requests, const uint8_t* slots, uint64_t* arrived)
      : requests_(requests),
        slots_(slots),
        arrived_(arrived),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  // A lane's share of the next weight row times a vector in shared memory.
  __device__ float multiply(const uint4* vector, int columns) {
    float2 sum = make_float2(0, 0);
    for (int column = 0; column < columns; column += kPieceColumns) {
      const int eights = min(columns - column, kPieceColumns) / 8;
      const auto* const w = reinterpret_cast<const uint4*>(slots_ + at_.slot * kSlotBytes);
      const uint4* const x = vector + column / 8;
      barrier_wait(&arrived_[at_.slot], at_.parity);
#pragma unroll 4
      for (int i = lane_; i < eights; i += kWarp) sum = multiply_eight(w[i], x[i], sum);
      __syncwarp();
      if (lane_ == 0) requests_.ask(kEnd);
      at_.advance(kSlots);
    }
    return sum.x + sum.y;
  }

 private:
  Requests& requests_;
  const uint8_t* const slots_;
  uint64_t* const arrived_;
  const int lane_;
  SlotTurn at_;
};

__device__ float silu_times(float gate, float up) {
  return gate / (1 + exp2_fast(-gate * kLog2E)) * up;
}

// Loads into shared memory, past the L1, because other CTAs may have written the source.
__device__ void load_vector(uint4* to, const __nv_bfloat16* from, int columns) {
  for (int i = threadIdx.x; i < columns / 8; i += kThreads) {
    to[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  }
}

__device__ void wait_for_all(const Arguments& a, const Tables& tables, int which) {
  if (threadIdx.x == 0) {
    while (load_acquire(&a.progress[which]) < tables.awaited[which]) {
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1)
    moe_one_row_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  uint8_t* const vectors = memory + kWarps * kSlots * kSlotBytes;
  auto* const vector = reinterpret_cast<uint4*>(vectors);
  Tables& tables = *reinterpret_cast<Tables*>(vectors + a.vector_bytes);
  auto* const sums = reinterpret_cast<float*>(&tables + 1);  // the CTA's rows of the result
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint8_t* const slots = memory + warp * kSlots * kSlotBytes;
  uint64_t* const arrived = tables.arrived[warp];

  const WarpWork work(a, tables);
  Requests requests(work, slots, arrived);
  if (lane == 0) {
    for (int slot = 0; slot < kSlots; ++slot) barrier_init(&arrived[slot], 1);
    fence_barrier_init();
  }
  // Phases before kRoutedUp need no expert ids; the remaining slots are filled below.
  constexpr int kBefore = kRoutedUp;
  int asked = 0;
  if (lane == 0) {
    for (; asked < kSlots && requests.phase() < kBefore; ++asked) requests.ask(kBefore);
  }
  if (threadIdx.x < 2) tables.warps_done[threadIdx.x] = 0;
  let_next_launch_begin();
  wait_for_earlier_launches();
  if (static_cast<int>(threadIdx.x) < a.experts) {
    const int32_t id = a.expert_ids[threadIdx.x];
    tables.ids[threadIdx.x] = id;
    tables.weights[threadIdx.x] = a.expert_weights[threadIdx.x];
  }
  load_vector(vector, a.x, a.hidden);
  __syncthreads();
  if (lane == 0) {
    for (; asked < kSlots; ++asked) requests.ask(kEnd);
  }

  OneRowProducts products(requests, slots, arrived);
  for (int phase = kSharedUp; phase <= kRoutedUp; ++phase) {
    const int end = work.end(phase);
    for (int unit = work.first(phase); unit < end; unit += kWarps) {
      const float gate = warp_sum(products.multiply(vector, a.hidden));
      const float up = warp_sum(products.multiply(vector, a.hidden));
      if (lane != 0) continue;
      float value = silu_times(gate, up);
      if (phase == kRoutedUp) {
        const int chosen = unit / a.inter;
        value = tables.ids[chosen] < 0 ? 0 : value * tables.weights[chosen];
      }
      a.activations[(phase == kRoutedUp ? a.shared_inter : 0) + unit] = __float2bfloat16(value);
    }
    if (lane == 0) {
      __threadfence();
      if (atomicAdd(&tables.warps_done[phase], 1) == kWarps - 1) {
        __threadfence();
        const uint64_t before = add_release(&a.progress[phase], 1);
        tables.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
      }
    }
  }
  __syncthreads();  // all warps have read x
  const int first_row = work.begin(kRoutedDown);
  if (a.shared_inter > 0) {
    wait_for_all(a, tables, kSharedUp);
    load_vector(vector, a.activations, a.shared_inter);
    __syncthreads();
    for (int row = work.first(kSharedDown); row < work.end(kSharedDown); row += kWarps) {
      const float sum = warp_sum(products.multiply(vector, a.shared_inter));
      if (lane == 0) sums[row - first_row] = sum;
    }
  }
  wait_for_all(a, tables, kRoutedUp);
  uint4* const routed = vector + a.shared_inter / 8;
  load_vector(routed, a.activations + a.shared_inter, a.experts * a.inter);
  __syncthreads();
  for (int row = work.first(kRoutedDown); row < work.end(kRoutedDown); row += kWarps) {
    float sum = 0;
    for (int i = 0; i < a.experts; ++i) {
      sum += products.multiply(routed + i * (a.inter / 8), a.inter);
    }
    sum = warp_sum(sum);
    if (lane != 0) continue;
    if (a.shared_inter > 0) sum += sums[row - first_row];
    if (a.f32) {
      static_cast<float*>(a.out)[row] = sum;
    } else {
      static_cast<__nv_bfloat16*>(a.out)[row] = __float2bfloat16(sum);
    }
  }
}

}  // namespace

namespace {

// With more activations than this, the few-row kernel is faster.
constexpr int64_t kMostActivationBytes = 96 * 1024;

int64_t vector_bytes(const MoeShape& shape) {
  return round_up(std::max<int64_t>(shape.hidden * 2, moe_one_row_workspace_bytes(shape)), 16);
}

int64_t shared_bytes(const MoeShape& shape, int blocks) {
  return kWarps * kSlots * kSlotBytes + vector_bytes(shape) + static_cast<int64_t>(sizeof(Tables)) +
         ceil_div(shape.hidden, blocks) * 4;
}

}  // namespace

int64_t moe_one_row_workspace_bytes(const MoeShape& shape) {
  return (shape.shared_inter + int64_t{shape.experts_per_token} * shape.inter) * 2;
}

bool moe_one_row_takes(const MoeShape& shape, const SmBudget& budget) {
  return shape.experts_per_token <= kMostExpertsOfOne &&
         moe_one_row_workspace_bytes(shape) <= kMostActivationBytes &&
         shared_bytes(shape, moe_few_rows_blocks(budget)) <= kMostShared;
}

void moe_one_row(const MoeArguments& arguments, GpuStream stream) {
  stream.device().allow_shared_memory(moe_one_row_kernel, kMostShared);
  const MoeShape& shape = arguments.shape;
  const auto cast = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  Arguments a = {.x = cast(arguments.x),
                 .gate_up = cast(arguments.gate_up),
                 .down = cast(arguments.down),
                 .shared_gate_up = cast(arguments.shared_gate_up),
                 .shared_down = cast(arguments.shared_down),
                 .expert_ids = arguments.expert_ids,
                 .expert_weights = arguments.expert_weights,
                 .out = arguments.out,
                 .activations = static_cast<__nv_bfloat16*>(arguments.workspace),
                 .progress = arguments.progress,
                 .hidden = shape.hidden,
                 .inter = shape.inter,
                 .shared_inter = shape.shared_inter,
                 .experts = shape.experts_per_token,
                 .vector_bytes = 0,
                 .f32 = arguments.out_type == DType::kF32};
  const int blocks = moe_few_rows_blocks(arguments.budget);
  a.vector_bytes = static_cast<int32_t>(vector_bytes(shape));
  launch_co_resident("moe_one_row", moe_one_row_kernel,
                     {.blocks = static_cast<unsigned>(blocks),
                      .threads = kThreads,
                      .shared_bytes = static_cast<unsigned>(shared_bytes(shape, blocks))},
                     arguments.budget.sms, stream, a);
}

}  // namespace fathom::cuda
