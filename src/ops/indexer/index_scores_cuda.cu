// What: scores[r, s] = scale(s) * sum over heads h of weight(r, h) * max(0, q(r, h) . k(s)).
//
// Inputs/outputs: index_scores_cuda.h.
//
// Layout: a CTA of four warpgroups that multiply and a warp that copies. A unit of work is a block
// of up to 8 rows of a sequence and neighbouring pages of its keys. The block's queries lie in one
// of two stages, [row][head][128 B]; keys pass through a ring of pages, [64 keys][128 B]; both with
// the 128-byte swizzle, as TMA writes them and wgmma reads them.
//
// Algorithm: each CTA has an equal share of the work (index_units_cuda.cuh). The copying warp finds
// its units, tells the others by shared memory, and copies ahead as far as there are stages. A
// warpgroup has two neighbouring rows, whose weights it keeps in registers: wgmma multiplies a page
// (64 keys along M) with both rows' heads (along N), then a thread has two keys and every fourth
// pair of heads. ReLU, weights and sum are two instructions an element, and three shuffles add up
// what four lanes have of two keys and two rows. While one warpgroup does so, the others multiply.
// A block of up to 2 or 4 rows has fewer pairs than warpgroups: they share its pages then.
// Keys that a row does not see are multiplied, and not stored.
//
// Determinism: a score's order of arithmetic follows from the number of heads alone. No atomics.
//
// Limits: 128 values; 16, 32 or 64 heads.
//
// Source: DeepSeek-V3.2-Exp (2025); DeepGEMM (2025) for keys along M and heads along N, and for
// rows that stay while keys pass.
//
// Measured: docs/kernels/sparse_attention.md.
#include <algorithm>
#include <cstddef>
#include <limits>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/tensor_map.h"
#include "device/cuda/wgmma.cuh"
#include "ops/indexer/index_scores_copies_cuda.cuh"
#include "ops/indexer/index_scores_cuda.h"
#include "ops/indexer/index_scores_shared_cuda.cuh"

namespace fathom::cuda::index_scoring {
namespace {

// 2 max(0, x), and NaN for NaN, by an addition: Hopper does twice as many of these a clock as
// maxima. x is finite or NaN.
__device__ inline float twice_relu(float x) { return x + fabsf(x); }

// The value in a register, where the compiler would rather compute it again at each use.
template <typename T>
__device__ inline T kept(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// barrier_wait(), barrier_arrive_for() and a load of a float, by addresses in shared memory.
__device__ inline void wait_at(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void arrive_at(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline float load_at(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

template <int kHeads>
class Scores {
 public:
  __device__ Scores(const IndexScoresArguments& arguments, Shared<kHeads>& shared)
      : arguments_(arguments), shared_(shared) {}

  __device__ void run() {
    Place<kQueryStages> place;
    for (uint32_t passed = 0;; place.advance(1)) {
      const int stage = place.stage();
      barrier_wait(&shared_.task_is_there[stage][0], place.parity());
      const Task& task = shared_.tasks[stage];
      const int num_rows = uniform(task.num_rows);
      if (num_rows == 0) return;
      const int pairs = pairs_of(num_rows), pair = group_ % pairs;
      const Share share{.pair = pair,
                        .first = group_ / pairs,
                        .step = kGroups / pairs,
                        .num_pages = uniform(task.num_pages),
                        .passed = passed};
      barrier_wait(&shared_.task_is_there[stage][pair], place.parity());
      const int rows = num_rows - pair * kPairRows;
      if (rows >= kPairRows) {
        score<kPairRows>(task, share, stage);
      } else if (rows == 1) {
        score<1>(task, share, stage);
      } else {
        skip(share);
      }
      passed += share.num_pages;
      barrier_arrive(&shared_.task_is_done[stage]);
    }
  }

 private:
  // The warpgroup's: a pair of rows, and of the unit's pages each step-th from `first` on.
  struct Share {
    int pair, first, step, num_pages;
    uint32_t passed;  // pages of earlier units
  };

  __device__ static int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  using Memory = Shared<kHeads>;

  // `memory`: the address of shared_, kept.
  __device__ static void wait_for(uint32_t memory, const Place<kKeyStages>& place) {
    const auto barrier = static_cast<uint32_t>(place.stage() * 2 + place.parity());
    wait_at(memory + offsetof(Memory, keys_are_there) + 8 * barrier, place.turn() >> 1 & 1);
  }
  // The page is not needed any more: a warp arrives for those of the groups that have other pages.
  __device__ void release(uint32_t memory, int page, const Share& share) {
    __syncwarp();
    const uint32_t barrier =
        memory + offsetof(Memory, keys_are_read) + 8 * static_cast<uint32_t>(page);
    if (lane_ == 0) arrive_at(barrier, share.step);
  }

  // The last pair of a block of 5 or 6 rows has none.
  __device__ void skip(const Share& share) {
    const uint32_t memory = shared_address(&shared_);
    Place<kKeyStages> place(share.passed + share.first);
    for (int i = share.first; i < share.num_pages; i += share.step, place.advance(share.step)) {
      wait_for(memory, place);
      release(memory, place.stage(), share);
    }
  }

  // A thread has keys lane / 4 and 8 further of its warp's 16, and heads 8 j + 2 (lane % 4) and the
  // next of each row. In the end it stores one score.
  template <int kRows>
  __device__ void score(const Task& task, const Share& share, int stage) {
    const int bits[] = {lane_ & 1, lane_ >> 1 & 1};
    const int row = share.pair * kPairRows + (kRows == 2 ? bits[0] : 0);
    const int half = bits[kRows == 2 ? 1 : 0];
    const int slot = warp_ * 16 + lane_ / 4 + half * 8;
    int seen = task.lengths[row] - task.first_key - slot;  // keys from the thread's first on
    if (kRows == 1 && bits[1] != 0) seen = 0;
    float* const scores =
        arguments_.scores + (task.first_row + row) * arguments_.columns + task.first_key + slot;
    float2 weights[kRows][kHeads / 8];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* const from = shared_.weights[stage][share.pair * kPairRows + r];
#pragma unroll
      for (int j = 0; j < kHeads / 8; ++j) {
        weights[r][j] = *reinterpret_cast<const float2*>(&from[8 * j + 2 * (lane_ % 4)]);
      }
    }
    const uint64_t queries = matrix(shared_.queries[stage][share.pair * kPairRows]);
    const uint64_t all_keys = matrix(shared_.keys[0]);
    // What the loop would compute again for each page is kept in registers.
    const int kept_bits[] = {kept(bits[0]), kept(bits[1])};
    const uint32_t memory = kept(shared_address(&shared_));
    const uint32_t scales = memory + offsetof(Memory, scales) + 4 * static_cast<uint32_t>(slot);
    Place<kKeyStages> place(share.passed + share.first);
    float* score = scores + share.first * kKeys;
    seen -= share.first * kKeys;
    for (int left = share.num_pages - share.first; left > 0; left -= share.step) {
      const int page = place.stage();
      wait_for(memory, place);
      const float scale = load_at(scales + static_cast<uint32_t>(page) * (4 * kKeys));
      const uint64_t keys = moved(all_keys, page * (kKeys * kRowBytes));
      float sums[kRows * kHeads / 2];
      mma_fence();
#pragma unroll
      for (int step = 0; step < kRowBytes / kStepBytes; ++step) {
        mma_64_e4m3(sums, moved(keys, step * kStepBytes), moved(queries, step * kStepBytes),
                    step > 0);
      }
      mma_commit();
      place.advance(share.step);
      mma_wait();
      pin(sums);
      release(memory, page, share);
      const float twice = sum(sums, weights, kept_bits);
      if (seen > 0) *score = twice * (0.5f * scale);
      seen -= share.step * kKeys;
      score += share.step * kKeys;
    }
  }

  __device__ static uint64_t matrix(const uint8_t* rows) {
    return uniform_matrix(swizzled_matrix(shared_address(rows), kSwizzleGroup));
  }

  // Twice the sum over heads, of the row and the key that bits[] name.
  template <int kRows>
  __device__ static float sum(const float (&sums)[kRows * kHeads / 2],
                              const float2 (&weights)[kRows][kHeads / 8], const int (&bits)[2]) {
    float low[kRows] = {}, high[kRows] = {};
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* const four = &sums[r * (kHeads / 2) + 4 * j];
        low[r] = fmaf(weights[r][j].x, twice_relu(four[0]), low[r]);
        high[r] = fmaf(weights[r][j].x, twice_relu(four[2]), high[r]);
        low[r] = fmaf(weights[r][j].y, twice_relu(four[1]), low[r]);
        high[r] = fmaf(weights[r][j].y, twice_relu(four[3]), high[r]);
      }
    }
    if constexpr (kRows == 2) {
      const float a = exchanged(low[0], low[1], bits[0], 1);
      const float b = exchanged(high[0], high[1], bits[0], 1);
      return exchanged(a, b, bits[1], 2);
    } else {
      const float a = exchanged(low[0], high[0], bits[0], 1);
      return a + __shfl_xor_sync(~0u, a, 2);
    }
  }

  // Butterfly exchange between lanes `distance` apart, whose bits differ. The lane with bit 0 gets
  // the sum of both lanes' `value`, that with bit 1 the sum of both lanes' `other`.
  __device__ static float exchanged(float value, float other, int bit, int distance) {
    const float given = bit == 0 ? other : value, kept = bit == 0 ? value : other;
    return kept + __shfl_xor_sync(~0u, given, distance);
  }

  static constexpr int kStepBytes = 32;  // of an instruction

  const IndexScoresArguments& arguments_;
  Shared<kHeads>& shared_;
  const int lane_ = threadIdx.x % kWarp;
  const int warp_ = uniform(threadIdx.x % kGroupThreads / kWarp);  // of the group
  const int group_ = uniform(threadIdx.x / kGroupThreads);
};

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    index_scores_kernel(const __grid_constant__ IndexScoresArguments arguments,
                        const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<kHeads>*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroups * kGroupWarps;
    for (int i = 0; i < kKeyStages; ++i) {
      for (uint64_t& turn : shared.keys_are_there[i]) barrier_init(&turn, 1);
      barrier_init(&shared.keys_are_read[i], kWarps);
    }
    for (int i = 0; i < kQueryStages; ++i) {
      for (uint64_t& pair : shared.task_is_there[i]) barrier_init(&pair, 1);
      barrier_init(&shared.task_is_done[i], kGroups * kGroupThreads);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == kGroups * kGroupThreads) {
    prefetch_map(&maps.keys);
    prefetch_map(&maps.queries);
  }
  let_next_launch_begin();
  __syncthreads();
  wait_for_earlier_launches();
  if (threadIdx.x >= kGroups * kGroupThreads) {
    give_registers<kCopyRegisters>();
    if (threadIdx.x < kGroups * kGroupThreads + kWarp) {
      Copies<kHeads>(arguments, maps, shared).run();
    }
  } else {
    take_registers<kMathRegisters>();
    Scores<kHeads>(arguments, shared).run();
  }
}

template <int kHeads>
void launch_scores(const IndexScoresArguments& arguments, int sms, GpuStream stream) {
  constexpr auto kBytes = static_cast<unsigned>(sizeof(Shared<kHeads>));
  auto* const kernel = index_scores_kernel<kHeads>;
  stream.device().allow_shared_memory(kernel, kBytes);
  const int64_t most = arguments.rows * ceil_div(arguments.columns, kPageSize);
  FATHOM_CHECK(most <= std::numeric_limits<int32_t>::max(), "{} rows of {} scores", arguments.rows,
               arguments.columns);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, sms));
  constexpr int64_t kAnyPages = int64_t{1} << 31;  // the table has them, not the caller
  const Axis keys[] = {{.size = kRowBytes, .box = kRowBytes},
                       {.size = kKeys, .stride = kRowBytes, .box = kKeys},
                       {.size = kAnyPages, .stride = arguments.pages.stride}};
  const Axis queries[] = {
      {.size = kRowBytes, .box = kRowBytes},
      {.size = int64_t{arguments.rows} * kHeads, .stride = kRowBytes, .box = kHeads}};
  const Maps maps{.keys = e4m3_map(arguments.pages.data, keys),
                  .queries = e4m3_map(arguments.values, queries)};
  launch(kernel, {.blocks = blocks, .threads = kThreads, .shared_bytes = kBytes}, stream, arguments,
         maps);
}

}  // namespace
}  // namespace fathom::cuda::index_scoring

namespace fathom::cuda {

void index_scores(const IndexScoresArguments& arguments, int sms, GpuStream stream) {
  FATHOM_CHECK(arguments.columns % 4 == 0 && arguments.pages.stride % 16 == 0,
               "{} columns of scores, index pages {} bytes apart", arguments.columns,
               arguments.pages.stride);
  if (arguments.rows == 0) return;
  switch (arguments.heads) {
    case 16:
      return index_scoring::launch_scores<16>(arguments, sms, stream);
    case 32:
      return index_scoring::launch_scores<32>(arguments, sms, stream);
    case 64:
      return index_scoring::launch_scores<64>(arguments, sms, stream);
    default:
      FATHOM_CHECK(false, "{} index heads", arguments.heads);
  }
}

}  // namespace fathom::cuda
