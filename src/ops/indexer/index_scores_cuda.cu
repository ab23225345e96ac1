// What: scores[r, s] = scale(s) * sum over heads h of weight(r, h) * max(0, q(r, h) . k(s)).
//
// Inputs/outputs: index_scores_cuda.h.
//
// Layout: a CTA of two warpgroups has a slice of 256 keys, 128 a warpgroup, as rows of 128 bytes
// with the 128-byte swizzle, and takes the rows of a block two at a time: their heads lie in the
// same form in one of two stages. A warpgroup has its keys in registers. wgmma multiplies 64 keys
// with all heads of a row; a thread then has two keys and every fourth pair of heads.
//
// Algorithm: persistent CTAs go through the units (index_units_cuda.cuh). The heads of two rows are
// copied (cp.async) while those before them are multiplied, and the next unit's keys once this
// one's are in registers. A warpgroup has two tiles of 64 keys and two rows, four products, of
// which two are in flight: ReLU, weights and sum of one run beside the multiplication of the next.
// Keys that a row does not see are multiplied, and not stored. A product in flight from one
// iteration of the loop to the next would overlap more; ptxas 13.0 then serializes all wgmma
// (C7514).
//
// Determinism: a score's order of arithmetic follows from the number of heads alone. No atomics.
//
// Limits: 128 values; 16, 32 or 64 heads.
//
// Source: DeepSeek-V3.2-Exp (2025); DeepGEMM (2025) for keys along M and heads along N.
//
// Measured: docs/kernels/sparse_attention.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/tile_load.cuh"
#include "device/cuda/wgmma.cuh"
#include "ops/indexer/index_scores_cuda.h"
#include "ops/indexer/index_units_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kGroups = 2, kGroupThreads = 128, kThreads = kGroups * kGroupThreads;
constexpr int kRowsAStep = 2, kStages = 2;
constexpr int kPages = kSliceKeys / static_cast<int>(kPageSize);
constexpr int kTilesAGroup = kPages / kGroups;  // a page is a tile of 64 keys
static_assert(kTilesAGroup == 2 && kBlockRows % kRowsAStep == 0);
constexpr int kRowBytes = kIndexDim;  // of a key or a head
constexpr int kChunk = 16;            // bytes of a copy
constexpr int kSwizzleGroup = 8 * kRowBytes;

template <int kHeads>
struct __align__(1024) Shared {
  uint8_t keys[kPages][kPageSize * kRowBytes];
  uint8_t queries[kStages][kRowsAStep][kHeads * kRowBytes];
  float weights[kStages][kRowsAStep][kHeads];
  float scales[2][kPages][kPageSize];  // of this unit and the next
};

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// max(0, x), and NaN for NaN.
__device__ inline float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Copies rows of 128 bytes into swizzled rows, all threads of the CTA together.
template <int kRows>
__device__ inline void copy_rows(uint8_t* to, const void* from) {
  constexpr int kChunks = kRows * kRowBytes / kChunk;
  const uint32_t base = shared_address(to);
#pragma unroll
  for (int first = 0; first < kChunks; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (kChunks % kThreads != 0 && i >= kChunks) break;
    const int row = i / (kRowBytes / kChunk), chunk = i % (kRowBytes / kChunk);
    copy_16(base + row * kRowBytes + ((chunk ^ (row & 7)) * kChunk),
            static_cast<const uint8_t*>(from) + i * kChunk);
  }
}

template <int kHeads>
class Block {
 public:
  __device__ Block(const IndexScoresArguments& arguments, Shared<kHeads>& shared)
      : arguments_(arguments), shared_(shared) {}

  // Begins the first unit's copies.
  __device__ void begin(const IndexUnit& unit) {
    copy_queries(unit, 0, 0);
    commit_copies();
    copy_keys(unit, turn_);
    commit_copies();
  }

  // The copies of `unit` have begun; begins those of the next one. Each step commits two groups of
  // copies, the second of the next unit's keys or of nothing: they have a step more to arrive.
  __device__ void run(const IndexUnit& unit, const IndexUnit& next) {
    for (int i = 0; i < unit.num_rows; i += kRowsAStep, stage_ ^= 1) {
      if (i == 0) {
        wait_for_groups<0>();
      } else {
        wait_for_groups<1>();  // not for the next unit's keys
      }
      fence_async_proxy();
      __syncthreads();
      const bool is_last = i + kRowsAStep >= unit.num_rows;
      if (i == 0) {
        load_keys(unit);
        if (is_last) __syncthreads();  // the next unit's keys take the place of these
      }
      const auto copy = [&] {
        if (is_last) {
          copy_queries(next, 0, stage_ ^ 1);
        } else {
          copy_queries(unit, i + kRowsAStep, stage_ ^ 1);
        }
        commit_copies();
        if (i == kRowsAStep || (i == 0 && is_last)) copy_keys(next, turn_ ^ 1);
        commit_copies();
      };
      score(unit, i, copy);
    }
    turn_ ^= 1;
  }

 private:
  __device__ void copy_keys(const IndexUnit& unit, int turn) {
    if (unit.num_rows == 0) return;
    const int32_t length = arguments_.lengths[unit.first_row + unit.num_rows - 1];
    const int32_t* const table =
        arguments_.block_tables + arguments_.table_starts[unit.first_row] + unit.first_key / 64;
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      if (unit.first_key + page * static_cast<int>(kPageSize) >= length) break;
      int64_t number = table[page];
      if (FATHOM_PLANTED(arguments_, kWrongIndexPage) && page == 1) number = table[0];
      const std::byte* const from = arguments_.pages.data + number * arguments_.pages.stride;
      copy_rows<kPageSize>(shared_.keys[page], from);
      if (threadIdx.x < kPageSize * sizeof(float) / kChunk) {
        copy_16(shared_address(shared_.scales[turn][page]) + threadIdx.x * kChunk,
                from + kIndexValueBytes + threadIdx.x * kChunk);
      }
    }
  }

  // Of the unit's rows i and i + 1, where there are such, into a stage.
  __device__ void copy_queries(const IndexUnit& unit, int i, int stage) {
#pragma unroll
    for (int k = 0; k < kRowsAStep; ++k) {
      if (i + k >= unit.num_rows) return;
      const int64_t row = unit.first_row + i + k;
      copy_rows<kHeads>(shared_.queries[stage][k],
                        static_cast<const uint8_t*>(arguments_.values) + row * kHeads * kRowBytes);
      if (threadIdx.x < kHeads * sizeof(float) / kChunk) {
        copy_16(shared_address(shared_.weights[stage][k]) + threadIdx.x * kChunk,
                arguments_.weights + row * kHeads + threadIdx.x * (kChunk / sizeof(float)));
      }
    }
  }

  // The left operands of the warpgroup's keys, and the rows' lengths.
  __device__ void load_keys(const IndexUnit& unit) {
    lengths_ = arguments_.lengths[unit.first_row + min(lane_, unit.num_rows - 1)];
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int tile = 0; tile < kTilesAGroup; ++tile) {
      const uint32_t base = shared_address(shared_.keys[first_tile_ + tile]) + row * kRowBytes;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int chunk = 2 * step + lane_ / 16;
        load_matrices(keys_[tile][step], base + (chunk ^ (row & 7)) * kChunk);
      }
    }
  }

  // Of the unit's rows i and i + 1, where there are two. copy() is called behind the first
  // products.
  template <typename Copy>
  __device__ void score(const IndexUnit& unit, int i, const Copy& copy) {
    if (i + 1 == unit.num_rows) {
      score_one(unit, i, copy);
    } else {
      score_two(unit, i, copy);
    }
  }

  template <typename Copy>
  __device__ void score_one(const IndexUnit& unit, int i, const Copy& copy) {
    const uint64_t queries = matrix(shared_.queries[stage_][0]);
    float a[kHeads / 2], b[kHeads / 2];
    mma_fence();
    multiply(a, 0, queries);
    multiply(b, 1, queries);
    copy();
    mma_wait<1>();
    pin(a);
    store(unit, i, 0, a);
    mma_wait<0>();
    pin(b);
    store(unit, i, 1, b);
  }

  template <typename Copy>
  __device__ void score_two(const IndexUnit& unit, int i, const Copy& copy) {
    const uint64_t first = matrix(shared_.queries[stage_][0]);
    const uint64_t second = moved(first, kHeads * kRowBytes);
    float a[kHeads / 2], b[kHeads / 2];
    mma_fence();
    multiply(a, 0, first);
    multiply(b, 1, first);
    copy();
    mma_wait<1>();
    pin(a);
    store(unit, i, 0, a);
    mma_fence();
    multiply(a, 0, second);
    mma_wait<1>();
    pin(b);
    store(unit, i, 1, b);
    mma_fence();
    multiply(b, 1, second);
    mma_wait<1>();
    pin(a);
    store(unit, i + 1, 0, a);
    mma_wait<0>();
    pin(b);
    store(unit, i + 1, 1, b);
  }

  __device__ static uint64_t matrix(const uint8_t* rows) {
    return uniform_matrix(swizzled_matrix(shared_address(rows), kSwizzleGroup));
  }

  // A group of its own: the products of a tile of the warpgroup's keys and a row's heads.
  __device__ void multiply(float (&sums)[kHeads / 2], int tile, uint64_t queries) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      mma_64_fp8<Fp8::kE4M3>(sums, keys_[tile][step], queries + step * (kStepBytes >> 4), step > 0);
    }
    mma_commit();
  }

  // A thread has keys lane / 4 and 8 further of its warp's 16, and heads 8 j + 2 (lane % 4) and the
  // next.
  __device__ void store(const IndexUnit& unit, int i, int tile, const float (&sums)[kHeads / 2]) {
    const int pair = lane_ % 4;
    const float* const weights = shared_.weights[stage_][i % kRowsAStep];
    float low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
      const float2 weight = *reinterpret_cast<const float2*>(&weights[8 * j + 2 * pair]);
      low = fmaf(weight.x, relu(sums[4 * j]), low);
      high = fmaf(weight.x, relu(sums[4 * j + 2]), high);
      low = fmaf(weight.y, relu(sums[4 * j + 1]), low);
      high = fmaf(weight.y, relu(sums[4 * j + 3]), high);
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      low += __shfl_xor_sync(~0u, low, distance);
      high += __shfl_xor_sync(~0u, high, distance);
    }
    const int32_t length = __shfl_sync(~0u, lengths_, i % kWarp);
    if (pair > 1 || length <= arguments_.dense_keys) return;
    const int slot = warp_ * 16 + lane_ / 4 + pair * 8;
    const int32_t key = unit.first_key + (first_tile_ + tile) * static_cast<int>(kPageSize) + slot;
    if (key >= length) return;
    arguments_.scores[(unit.first_row + i) * arguments_.columns + key] =
        (pair == 0 ? low : high) * shared_.scales[turn_][first_tile_ + tile][slot];
  }

  static constexpr int kStepBytes = 32, kSteps = kIndexDim / kStepBytes;  // of an instruction

  const IndexScoresArguments& arguments_;
  Shared<kHeads>& shared_;
  const int lane_ = threadIdx.x % kWarp, warp_ = threadIdx.x % kGroupThreads / kWarp;  // of a group
  const int first_tile_ = threadIdx.x / kGroupThreads * kTilesAGroup;
  int stage_ = 0;        // of the step's rows
  int turn_ = 0;         // of the unit's scales
  int32_t lengths_ = 0;  // lane i: of the unit's row i, the last one's behind it
  uint32_t keys_[kTilesAGroup][kSteps][4];
};

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 2)
    index_scores_kernel(const __grid_constant__ IndexScoresArguments arguments) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<kHeads>*>(memory);
  let_next_launch_begin();
  wait_for_earlier_launches();
  IndexUnits units(arguments.lengths, arguments.table_starts, arguments.rows, arguments.dense_keys);
  Block<kHeads> block(arguments, shared);
  IndexUnit unit = units.at(blockIdx.x);
  if (!unit.exists) return;
  block.begin(unit);
  for (int64_t number = blockIdx.x + gridDim.x; unit.exists; number += gridDim.x) {
    const IndexUnit next = units.at(number);
    block.run(unit, next);
    unit = next;
  }
}

template <int kHeads>
void launch_scores(const IndexScoresArguments& arguments, int sms, GpuStream stream) {
  constexpr auto kBytes = static_cast<unsigned>(sizeof(Shared<kHeads>));
  auto* const kernel = index_scores_kernel<kHeads>;
  stream.device().allow_shared_memory(kernel, kBytes);
  const int64_t most = arguments.rows * ceil_div(arguments.columns, int64_t{kSliceKeys});
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, int64_t{2} * sms));
  launch(kernel, {.blocks = blocks, .threads = kThreads, .shared_bytes = kBytes}, stream,
         arguments);
}

}  // namespace

void index_scores(const IndexScoresArguments& arguments, int sms, GpuStream stream) {
  FATHOM_CHECK(arguments.columns % 4 == 0 && arguments.pages.stride % kChunk == 0,
               "{} columns of scores, index pages {} bytes apart", arguments.columns,
               arguments.pages.stride);
  if (arguments.rows == 0) return;
  switch (arguments.heads) {
    case 16:
      return launch_scores<16>(arguments, sms, stream);
    case 32:
      return launch_scores<32>(arguments, sms, stream);
    case 64:
      return launch_scores<64>(arguments, sms, stream);
    default:
      FATHOM_CHECK(false, "{} index heads", arguments.heads);
  }
}

}  // namespace fathom::cuda
