// What: scores[r, s] = scale(s) * sum over heads h of weight(r, h) * max(0, q(r, h) . k(s)).
//
// Inputs/outputs: index_scores_cuda.h.
//
// Layout: a CTA of two warpgroups has a slice of 256 keys, 128 a warpgroup, as rows of 128 bytes
// with the 128-byte swizzle, and takes the rows of a block one after another: a row's heads lie in
// the same form in one of four stages. wgmma multiplies 64 keys with all heads; a thread then has
// two keys and every fourth pair of heads.
//
// Algorithm: persistent CTAs go through the units (index_units_cuda.cuh). A row's heads are copied
// three rows ahead (cp.async). Two tiles of 64 keys are in flight in a warpgroup: the first one's
// ReLU, weights and sum run beside the second one's multiplication. Keys that a row does not see
// are multiplied, and not stored. Accumulators in flight from one row to the next would overlap
// more; ptxas 13.0 then serializes all wgmma (C7514).
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
#include "device/cuda/wgmma.cuh"
#include "ops/indexer/index_scores_cuda.h"
#include "ops/indexer/index_units_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kGroups = 2, kGroupThreads = 128, kThreads = kGroups * kGroupThreads;
constexpr int kStages = 4;
constexpr int kPages = kSliceKeys / static_cast<int>(kPageSize);
constexpr int kTilesAGroup = kPages / kGroups;  // a page is a tile of 64 keys
constexpr int kRowBytes = kIndexDim;            // of a key or a head
constexpr int kChunk = 16;                      // bytes of a copy
constexpr int kSwizzleGroup = 8 * kRowBytes;

template <int kHeads>
struct __align__(1024) Shared {
  uint8_t keys[kPages][kPageSize * kRowBytes];
  uint8_t queries[kStages][kHeads * kRowBytes];
  float weights[kStages][kHeads];
  float scales[kPages][kPageSize];
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

  __device__ void run(const IndexUnit& unit) {
    const int32_t last_row = unit.first_row + unit.num_rows - 1;
    const int32_t length = arguments_.lengths[last_row];
    copy_keys(unit, length);
    for (int i = 0; i < kStages - 1; ++i) copy_query(unit, i);
    for (int i = 0; i < unit.num_rows; ++i) {
      wait_for_groups<kStages - 2>();
      fence_async_proxy();
      __syncthreads();
      copy_query(unit, i + kStages - 1);
      score(unit, i);
    }
    wait_for_groups<0>();
    __syncthreads();  // before the next unit's keys
  }

 private:
  // The first copies of a unit; they are in the group of the first row's query.
  __device__ void copy_keys(const IndexUnit& unit, int32_t length) {
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
        copy_16(shared_address(shared_.scales[page]) + threadIdx.x * kChunk,
                from + kIndexValueBytes + threadIdx.x * kChunk);
      }
    }
  }

  // Commits a group in any case, so that their number follows the row's.
  __device__ void copy_query(const IndexUnit& unit, int i) {
    if (i < unit.num_rows) {
      const int64_t row = unit.first_row + i;
      const int stage = i % kStages;
      copy_rows<kHeads>(shared_.queries[stage],
                        static_cast<const uint8_t*>(arguments_.values) + row * kHeads * kRowBytes);
      if (threadIdx.x < kHeads * sizeof(float) / kChunk) {
        copy_16(shared_address(shared_.weights[stage]) + threadIdx.x * kChunk,
                arguments_.weights + row * kHeads + threadIdx.x * (kChunk / sizeof(float)));
      }
    }
    commit_copies();
  }

  __device__ void score(const IndexUnit& unit, int i) {
    const int64_t row = unit.first_row + i;
    const int32_t length = arguments_.lengths[row];
    if (length <= arguments_.dense_keys) return;
    const int group = threadIdx.x / kGroupThreads, stage = i % kStages;
    const int first_tile = group * kTilesAGroup;
    const uint64_t queries = matrix(shared_.queries[stage]);
    float sums[kTilesAGroup][kHeads / 2];
    mma_fence();
#pragma unroll
    for (int tile = 0; tile < kTilesAGroup; ++tile) {
      multiply(sums[tile], matrix(shared_.keys[first_tile + tile]), queries);
      mma_commit();
    }
    mma_wait<kTilesAGroup - 1>();
    pin(sums[0]);
    store(unit, row, length, stage, first_tile, sums[0]);
    mma_wait<0>();
    pin(sums[1]);
    store(unit, row, length, stage, first_tile + 1, sums[1]);
  }

  __device__ static uint64_t matrix(const uint8_t* rows) {
    return uniform_matrix(swizzled_matrix(shared_address(rows), kSwizzleGroup));
  }
  __device__ static int32_t first_key(const IndexUnit& unit, int tile) {
    return unit.first_key + tile * static_cast<int32_t>(kPageSize);
  }

  __device__ static void multiply(float (&sums)[kHeads / 2], uint64_t keys, uint64_t queries) {
    constexpr int kStep = 32, kSteps = kIndexDim / kStep;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      mma_64_e4m3(sums, keys + step * (kStep >> 4), queries + step * (kStep >> 4), step > 0);
    }
  }

  // A thread has keys lane / 4 and 8 further of its warp's 16, and heads 8 j + 2 (lane % 4) and the
  // next.
  __device__ void store(const IndexUnit& unit, int64_t row, int32_t length, int stage, int tile,
                        const float (&sums)[kHeads / 2]) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kGroupThreads / kWarp;
    const int pair = lane % 4;
    float low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
      const float2 weight =
          *reinterpret_cast<const float2*>(&shared_.weights[stage][8 * j + 2 * pair]);
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
    if (pair > 1) return;
    const int slot = warp * 16 + lane / 4 + pair * 8;
    const int32_t key = first_key(unit, tile) + slot;
    const float score = (pair == 0 ? low : high) * shared_.scales[tile][slot];
    if (key < length) arguments_.scores[row * arguments_.columns + key] = score;
  }

  const IndexScoresArguments& arguments_;
  Shared<kHeads>& shared_;
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
  for (int64_t number = blockIdx.x;; number += gridDim.x) {
    const IndexUnit unit = units.at(number);
    if (!unit.exists) return;
    block.run(unit);
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
