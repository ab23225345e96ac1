// What: the k highest scores of each row, exactly; of equal ones the lower position; ascending.
//
// Inputs/outputs: top_keys_cuda.h.
//
// Layout: a cluster of 1 to 8 CTAs a row, by the number of columns. Each has a run of neighbouring
// scores in shared memory, as whole numbers in the order of scores (score_order.h).
//
// Algorithm: rounds of 11, 11 and 10 bits from the highest down find the k-th score. In each, the
// CTAs count the digits of the scores that share the digits found so far; the first warp adds up
// the counts of all CTAs, of 32 digits together and then of single ones, and finds the digit at
// which the counts from the highest down reach k. A digit all of whose scores are wanted ends the
// search: two rounds are enough for scores that differ. Two passes then count and emit: each warp
// has a run of its CTA's scores, and the counts of earlier runs say where its positions go. Scores
// are read from memory once.
//
// Keys before the first that a row sees are neither counted nor emitted.
//
// A row that sees at most k keys is written by its cluster's first CTA, and the others leave.
//
// Determinism: the result is a function of the scores. Counters are whole numbers.
//
// Limits: kMostScoreColumns.
//
// Measured: docs/kernels/sparse_attention.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/cluster.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/rows.cuh"
#include "ops/indexer/top_keys_cuda.h"
#include "ops/indexer/top_keys_limit.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kDigits = 2048, kGroupDigits = 32, kGroups = kDigits / kGroupDigits;

// A round's digit: `bits` from `shift` on.
struct Round {
  int shift, bits;
};
constexpr int kRounds = 3;
__device__ inline Round round_of(int i) {
  return i == 0 ? Round{21, 11} : i == 1 ? Round{10, 11} : Round{0, 10};
}

// Small enough that with the orders of 160K columns two CTAs fit on an SM: otherwise the clusters
// of 16 rows wait for one another.
struct Shared {
  uint4 counts[kDigits / 4];
  uint4 own[2][kDigits / 4];     // this CTA's, of even and odd rounds; read by the others
  uint4 groups[2][kGroups / 4];  // the same, of kGroupDigits digits together
  uint2 warps[kWarps];           // above and equal, of each warp's run
  uint4 totals;                  // x, y: above and equal in this CTA; read by the others
  uint32_t digit, wanted;        // found in a round
  bool is_last;
};

// The place, from the highest down, at which counts reach `wanted`; how many of it are wanted, and
// how many it has.
struct Place {
  uint32_t index, wanted, count;
};

// order_of() of ops/indexer/score_order.h.
__device__ inline uint32_t order_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t order = (bits >> 31) != 0 && magnitude != 0 ? ~bits : magnitude | 0x80000000;
  return magnitude > 0x7F800000 ? 0 : order;
}

__device__ inline uint4 load_words_from_block(uint32_t address) {
  const float4 v = load_from_block(address);
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                    __float_as_uint(v.w));
}

// The positions [first, end), then -1.
__device__ void write_all(int32_t* list, int32_t first, int32_t end, int32_t k) {
  for (int32_t i = threadIdx.x; i < k; i += blockDim.x) list[i] = first + i < end ? first + i : -1;
}

// Finds the bin among 4 * kLanes in which the count from the last bin down reaches `wanted`. Counts
// are summed over the CTAs of a cluster. Called by all lanes of a warp.
template <int kLanes>
__device__ Place find_place(uint32_t address, uint32_t blocks, uint32_t wanted) {
  const int lane = threadIdx.x % kWarp;
  uint4 counts = {};
  if (lane < kLanes) {
    const uint32_t own = address + (kLanes - 1 - lane) * static_cast<uint32_t>(sizeof(uint4));
    for (uint32_t block = 0; block < blocks; ++block) {
      const uint4 v = load_words_from_block(address_in_block(own, block));
      counts = make_uint4(counts.x + v.x, counts.y + v.y, counts.z + v.z, counts.w + v.w);
    }
  }
  const uint32_t down[4] = {counts.w, counts.z, counts.y, counts.x};
  const uint32_t sum = (counts.x + counts.y) + (counts.z + counts.w);
  uint32_t up_to = sum;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  Place place = {};
  uint32_t before = up_to - sum;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < wanted && before + down[i] >= wanted) {
      place = {static_cast<uint32_t>(4 * (kLanes - 1 - lane) + 3 - i), wanted - before, down[i]};
    }
    before += down[i];
  }
  const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, place.count > 0))) - 1;
  return {__shfl_sync(~0u, place.index, owner), __shfl_sync(~0u, place.wanted, owner),
          __shfl_sync(~0u, place.count, owner)};
}

class Chooser {
 public:
  __device__ Chooser(Shared& shared, uint32_t* orders, uint32_t rank, uint32_t blocks)
      : shared_(shared), orders_(orders), rank_(rank), blocks_(blocks) {}

  // scores [length], of which more than k are seen -> list [k].
  __device__ void choose(const TopKeysArguments& arguments, const float* scores, int32_t length,
                         int32_t* list) {
    const int32_t share = round_up_4(ceil_of(length, static_cast<int32_t>(blocks_)));
    first_ = min(static_cast<int32_t>(rank_) * share, length);
    count_ = min(share, length - first_);
    unseen_ = FATHOM_PLANTED(arguments, kSeenHiddenKey) ? 0 : max(0, arguments.first_key - first_);
    load(scores + first_);
    uint32_t limit = 0, wanted = static_cast<uint32_t>(arguments.k);
    int shift = 0;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      shift = round_of(round).shift;
      count_digits(limit, round_of(round), round == 0);
      find_digit(round, wanted);
      limit |= shared_.digit << shift;
      wanted = shared_.wanted;
      if (shared_.is_last || (FATHOM_PLANTED(arguments, kCoarseLimit) && round == 1)) break;
    }
    emit(limit, shift, wanted, arguments.k, list);
  }

 private:
  __device__ static int32_t ceil_of(int32_t x, int32_t by) { return (x + by - 1) / by; }
  __device__ static int32_t round_up_4(int32_t x) { return (x + 3) / 4 * 4; }

  __device__ void load(const float* scores) {
    const int32_t whole = count_ / 4;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < whole; i += kThreads) {
      const float4 v = reinterpret_cast<const float4*>(scores)[i];
      reinterpret_cast<uint4*>(orders_)[i] =
          make_uint4(order_of(v.x), order_of(v.y), order_of(v.z), order_of(v.w));
    }
    for (int32_t i = whole * 4 + static_cast<int32_t>(threadIdx.x); i < count_; i += kThreads) {
      orders_[i] = order_of(scores[i]);
    }
  }

  // The digits of the scores whose higher digits are the limit's.
  __device__ void count_digits(uint32_t limit, Round round, bool is_first) {
    static_assert(kDigits == 4 * kThreads);
    shared_.counts[threadIdx.x] = {};
    __syncthreads();  // also: the scores are there
    auto* const counts = reinterpret_cast<uint32_t*>(shared_.counts);
    const uint32_t mask = (1u << round.bits) - 1;
#pragma unroll 4
    for (int32_t i = unseen_ + static_cast<int32_t>(threadIdx.x); i < count_; i += kThreads) {
      const uint32_t order = orders_[i];
      if (!is_first && (order ^ limit) >> (round.shift + round.bits) != 0) continue;
      atomicAdd(&counts[order >> round.shift & mask], 1);
    }
    __syncthreads();
  }

  // Where the counts from the highest digit down reach `wanted`: sets digit, how many of it are
  // wanted, and whether those are all.
  __device__ void find_digit(int round, uint32_t wanted) {
    static_assert(kGroupDigits == 4 * 8);
    const uint4 sum = shared_.counts[threadIdx.x];
    shared_.own[round % 2][threadIdx.x] = sum;
    uint32_t of_group = (sum.x + sum.y) + (sum.z + sum.w);
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      of_group += __shfl_xor_sync(~0u, of_group, distance);
    }
    if (threadIdx.x % 8 == 0) {
      reinterpret_cast<uint32_t*>(shared_.groups[round % 2])[threadIdx.x / 8] = of_group;
    }
    meet();
    if (threadIdx.x < kWarp) {
      const Place group =
          find_place<kGroups / 4>(shared_address(shared_.groups[round % 2]), blocks_, wanted);
      const Place digit = find_place<kGroupDigits / 4>(
          shared_address(&shared_.own[round % 2][group.index * (kGroupDigits / 4)]), blocks_,
          group.wanted);
      if (threadIdx.x == 0) {
        shared_.digit = group.index * kGroupDigits + digit.index;
        shared_.wanted = digit.wanted;
        shared_.is_last = digit.wanted == digit.count;
      }
    }
    __syncthreads();
  }

  // Every score above the limit, and the first `wanted` that equal it, from bit `shift` on.
  __device__ void emit(uint32_t limit, int shift, uint32_t wanted, int32_t k, int32_t* list) {
    limit >>= shift;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int32_t run = ceil_of(ceil_of(count_, kWarps), kWarp) * kWarp;
    const int32_t begin = min(warp * run, count_), end = min(begin + run, count_);
    uint32_t above = 0, equal = 0;
    for (int32_t first = begin; first < end; first += kWarp) {
      const Flags flags = flags_of(first + lane, end, limit, shift);
      above += __popc(flags.above);
      equal += __popc(flags.equal);
    }
    if (lane == 0) shared_.warps[warp] = make_uint2(above, equal);
    __syncthreads();
    above = equal = 0;
    uint32_t total_above = 0, total_equal = 0;
    for (int w = 0; w < kWarps; ++w) {
      const uint2 of_warp = shared_.warps[w];
      if (w < warp) above += of_warp.x, equal += of_warp.y;
      total_above += of_warp.x, total_equal += of_warp.y;
    }
    if (threadIdx.x == 0) shared_.totals = make_uint4(total_above, total_equal, 0, 0);
    meet();
    for (uint32_t block = 0; block < rank_; ++block) {
      const uint4 of_block =
          load_words_from_block(address_in_block(shared_address(&shared_.totals), block));
      above += of_block.x, equal += of_block.y;
    }
    const uint32_t before = (1u << lane) - 1;
    for (int32_t first = begin; first < end; first += kWarp) {
      const Flags flags = flags_of(first + lane, end, limit, shift);
      const uint32_t my_equal = equal + __popc(flags.equal & before);
      const uint32_t place = above + __popc(flags.above & before) + min(my_equal, wanted);
      const bool is_chosen =
          (flags.above >> lane & 1) != 0 || ((flags.equal >> lane & 1) != 0 && my_equal < wanted);
      if (is_chosen && place < static_cast<uint32_t>(k)) list[place] = first_ + first + lane;
      above += __popc(flags.above);
      equal += __popc(flags.equal);
    }
    meet();  // the others have read this CTA's totals
  }

  struct Flags {
    uint32_t above, equal;  // a bit a lane
  };
  __device__ Flags flags_of(int32_t i, int32_t end, uint32_t limit, int shift) const {
    const bool is_seen = i >= unseen_ && i < end;
    const uint32_t order = is_seen ? orders_[i] >> shift : 0;
    return {__ballot_sync(~0u, is_seen && order > limit),
            __ballot_sync(~0u, is_seen && order == limit)};
  }

  __device__ void meet() const {
    if (blocks_ == 1) return __syncthreads();
    cluster_arrive();
    cluster_wait();
  }

  Shared& shared_;
  uint32_t* const orders_;
  const uint32_t rank_, blocks_;
  int32_t first_ = 0, count_ = 0;  // this CTA's scores
  int32_t unseen_ = 0;             // the first of them
};

__global__ void __launch_bounds__(kThreads)
    top_keys_kernel(const __grid_constant__ TopKeysArguments arguments, uint32_t blocks) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  auto* const orders = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  const int64_t row = blockIdx.x / blocks;
  const uint32_t rank = blockIdx.x % blocks;
  let_next_launch_begin();
  wait_for_earlier_launches();
  const int32_t length = arguments.lengths[row];
  int32_t* const list = arguments.keys + row * arguments.k;
  if (length - arguments.first_key <= arguments.k) {
    if (rank == 0) write_all(list, arguments.first_key, length, arguments.k);
    return;
  }
  Chooser(shared, orders, rank, blocks)
      .choose(arguments, arguments.scores + row * arguments.columns, length, list);
}

__global__ void __launch_bounds__(kThreads)
    all_keys_kernel(const __grid_constant__ TopKeysArguments arguments) {
  const int64_t row = blockIdx.x;
  let_next_launch_begin();
  wait_for_earlier_launches();
  write_all(arguments.keys + row * arguments.k, arguments.first_key, arguments.lengths[row],
            arguments.k);
}

// CTAs a row: one for every 8,192 columns, a power of two.
int64_t cluster_of(int64_t columns) {
  constexpr int64_t kColumnsABlock = 8192;
  int64_t blocks = 1;
  while (blocks < kMostBlocks && blocks * kColumnsABlock < columns) blocks *= 2;
  return blocks;
}

void check_rows(const TopKeysArguments& arguments) {
  FATHOM_CHECK(arguments.k > 0 && arguments.rows >= 0 && arguments.first_key >= 0 &&
                   arguments.first_key <= 1,
               "{} rows of {} keys, from key {} on", arguments.rows, arguments.k,
               arguments.first_key);
}

}  // namespace

void select_top_keys(const TopKeysArguments& arguments, GpuStream stream) {
  check_rows(arguments);
  FATHOM_CHECK(
      arguments.columns > 0 && arguments.columns % 4 == 0 && arguments.columns <= kMostScoreColumns,
      "{} columns of scores", arguments.columns);
  if (arguments.rows == 0) return;
  const int64_t blocks = cluster_of(arguments.columns);
  const int64_t share = round_up(ceil_div(arguments.columns, blocks), int64_t{4});
  const auto bytes =
      static_cast<unsigned>(sizeof(Shared)) + static_cast<unsigned>(share * sizeof(uint32_t));
  stream.device().allow_shared_memory(top_keys_kernel, bytes);
  launch(top_keys_kernel,
         {.blocks = static_cast<unsigned>(arguments.rows * blocks),
          .threads = kThreads,
          .shared_bytes = bytes,
          .cluster = static_cast<unsigned>(blocks)},
         stream, arguments, static_cast<uint32_t>(blocks));
}

void select_all_keys(const TopKeysArguments& arguments, GpuStream stream) {
  check_rows(arguments);
  if (arguments.rows == 0) return;
  launch(all_keys_kernel, {.blocks = static_cast<unsigned>(arguments.rows), .threads = kThreads},
         stream, arguments);
}

}  // namespace fathom::cuda
