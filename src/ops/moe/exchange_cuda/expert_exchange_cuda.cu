// What: rows of all ranks to the ranks of their experts, and the experts' results back.
//
// Inputs/outputs: expert_exchange_cuda.h.
//
// Algorithm:
//   dispatch   1. list: a CTA or a few publish this rank's rows, meet the other ranks, and find the
//                 slots of the round's pairs on this rank
//              2. sort (expert_rows_cuda.h), of as many pairs as there are
//              3. gather: CTAs take the round's rows in turn and copy those with a slot here
//   combine    4. meet: one CTA waits for the other ranks
//              5. combine: a CTA a row
// Only launches 1 and 4 wait for other ranks, with few CTAs: those of ranks that share a device
// leave it to the ranks that they wait for.
//
// Determinism: a rank's sorted rows follow the numbers of rows over all ranks; a row's sum is in
// ascending order of its experts, whoever computes them.
//
// Limits: kMostPeers ranks, kMostMoeExperts experts, kMostExpertsOfToken experts a token, rows of a
// round x experts a token below 2^31. A stopped group's results are undefined, but all reads stay
// inside the buffers.
//
// Measured: docs/kernels/expert_exchange.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/peer_barrier.cuh"
#include "ops/moe/exchange_cuda/expert_exchange_cuda.h"
#include "ops/moe/experts_cuda/expert_rows_cuda.h"
#include "ops/moe/experts_cuda/expert_sum_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kMostExpertsOfToken = 64;

// The rows of a round. Row w belongs to the rank r with begins[r] <= w < begins[r + 1], and is row
// first[r] + w - begins[r] of its x.
struct ExchangeWindow {
  int32_t num_pairs;
  int32_t begins[kMostPeers + 1];
  int32_t first[kMostPeers];
  OfferedRows own;  // in all rounds
  int64_t scales_strides[kMostPeers];
};

__device__ int owner_of(const ExchangeWindow& window, int ranks, int row) {
  int owner = 0;
  while (owner + 1 < ranks && row >= window.begins[owner + 1]) ++owner;
  return owner;
}

// ---- list

constexpr int kListThreads = 512;

struct ListArguments {
  const int32_t* ids[kMostPeers];
  OfferedRows* offered[kMostPeers];
  PeerRank peers;
  const ExpertHost* hosts;
  const int32_t* num_valid_rows;
  int32_t* slots;  // [room of a round, experts_per_token]
  ExchangeWindow* window;
  OfferedRows own;  // before padding is taken off
  int32_t round, rounds, most_rows, num_experts, experts_per_token;
};

__device__ void make_window(const ListArguments& a, const OfferedRows (&offered)[kMostPeers],
                            ExchangeWindow& window) {
  int32_t rows = 0;
  for (int r = 0; r < a.peers.ranks; ++r) {
    const int64_t count = offered[r].count;
    const auto from = static_cast<int32_t>(count * a.round / a.rounds);
    const auto to = static_cast<int32_t>(count * (a.round + 1) / a.rounds);
    window.begins[r] = rows;
    window.first[r] = offered[r].first + from;
    window.scales_strides[r] = offered[r].scales_stride;
    // The bound holds but for a stopped group, whose counts may be an earlier step's.
    rows = min(rows + to - from, a.most_rows);
  }
  for (int r = a.peers.ranks; r <= kMostPeers; ++r) window.begins[r] = rows;
  window.num_pairs = rows * a.experts_per_token;
  window.own = offered[a.peers.rank];
}

__global__ void __launch_bounds__(kListThreads)
    list_pairs_kernel(const __grid_constant__ ListArguments a) {
  __shared__ OfferedRows offered[kMostPeers];
  __shared__ ExchangeWindow window;
  const int thread = static_cast<int>(threadIdx.x), k = a.experts_per_token;
  if (!a.peers.shares_device) let_next_launch_begin();
  wait_for_earlier_launches();
  const uint32_t barrier = next_barrier(a.peers);
  if (thread == 0) {
    OfferedRows own = a.own;
    if (a.num_valid_rows != nullptr) {
      own.count = max(0, min(own.count, *a.num_valid_rows - own.first));
    }
    offered[a.peers.rank] = own;
    if (blockIdx.x == 0) *a.offered[a.peers.rank] = own;
  }
  __syncthreads();
  begin_together(a.peers, barrier);
  if (thread < a.peers.ranks && thread != a.peers.rank) {
    static_assert(sizeof(OfferedRows) == sizeof(uint4));
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(a.offered[thread]));
    offered[thread] = {static_cast<int32_t>(words.x), static_cast<int32_t>(words.y),
                       static_cast<int64_t>(words.z | uint64_t{words.w} << 32)};
  }
  __syncthreads();
  if (thread == 0) {
    make_window(a, offered, window);
    if (blockIdx.x == 0) *a.window = window;
  }
  __syncthreads();
  const auto step = static_cast<int>(gridDim.x) * kListThreads;
  for (int pair = static_cast<int>(blockIdx.x) * kListThreads + thread; pair < window.num_pairs;
       pair += step) {
    const int row = pair / k, owner = owner_of(window, a.peers.ranks, row);
    const int64_t at = int64_t{window.first[owner] + row - window.begins[owner]} * k + pair % k;
    const auto id = static_cast<uint32_t>(__ldcg(a.ids[owner] + at));
    int32_t slot = -1;
    if (id < static_cast<uint32_t>(a.num_experts)) {
      const ExpertHost host = a.hosts[id];
      if (host.rank == a.peers.rank) slot = host.slot;
    }
    a.slots[pair] = slot;
  }
  end_alone(a.peers, barrier);
}

// ---- gather

constexpr int kGatherThreads = 128;

struct GatherArguments {
  const uint4* x[kMostPeers];
  const float* x_scales[kMostPeers];
  const ExchangeWindow* window;
  const int32_t* positions;  // [capacity, experts_per_token]
  uint4* sorted_x;
  float* sorted_scales;
  int64_t sorted_scales_stride;
  int32_t ranks, experts_per_token, vectors, scale_blocks;
  FATHOM_PLANTED_FAULT
};

__global__ void __launch_bounds__(kGatherThreads)
    gather_from_ranks_kernel(const __grid_constant__ GatherArguments a) {
  __shared__ ExchangeWindow window;
  const int thread = static_cast<int>(threadIdx.x), k = a.experts_per_token;
  // In this order: the next launch then begins when sort has ended, and can read its lists.
  wait_for_earlier_launches();
  let_next_launch_begin();
  if (thread == 0) window = *a.window;
  __syncthreads();
  const int rows = window.begins[kMostPeers];
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    const int32_t* const positions = a.positions + int64_t{row} * k;
    bool is_here = false;
    for (int j = 0; j < k; ++j) is_here |= positions[j] >= 0;
    if (!is_here) continue;
    int owner = owner_of(window, a.ranks, row);
    const int64_t from = window.first[owner] + row - window.begins[owner];
    if (FATHOM_PLANTED(a, kWrongPeer)) owner = (owner + 1) % a.ranks;
    const uint4* const x = a.x[owner] + from * a.vectors;
    constexpr int kAtOnce = 4;
    for (int first = thread; first < a.vectors; first += kGatherThreads * kAtOnce) {
      uint4 values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int v = first + kGatherThreads * i;
        if (v < a.vectors) values[i] = __ldcg(x + v);
      }
      for (int j = 0; j < k; ++j) {
        if (positions[j] < 0) continue;
        uint4* const to = a.sorted_x + int64_t{positions[j]} * a.vectors;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int v = first + kGatherThreads * i;
          if (v < a.vectors) to[v] = values[i];
        }
      }
    }
    for (int block = thread; block < a.scale_blocks; block += kGatherThreads) {
      const float scale = __ldcg(a.x_scales[owner] + block * window.scales_strides[owner] + from);
      for (int j = 0; j < k; ++j) {
        if (positions[j] >= 0) {
          a.sorted_scales[block * a.sorted_scales_stride + positions[j]] = scale;
        }
      }
    }
  }
}

// ---- meet and combine

constexpr int kMeetThreads = 32;

__global__ void __launch_bounds__(kMeetThreads)
    meet_ranks_kernel(const __grid_constant__ PeerRank peers) {
  if (!peers.shares_device) let_next_launch_begin();
  wait_for_earlier_launches();
  const uint32_t barrier = next_barrier(peers);
  signal_begin(peers, barrier);
  if (!FATHOM_PLANTED(peers, kSkippedMeet)) wait_for_begin(peers, barrier);
  end_alone(peers, barrier);
}

constexpr int kCombineThreads = 256;

struct CombineArguments {
  const int32_t* positions[kMostPeers];
  const uint4* results[kMostPeers];
  int32_t sorted_rows[kMostPeers];
  const int32_t* ids;  // [rows, experts_per_token]
  const float* weights;
  const ExpertHost* hosts;
  const ExchangeWindow* window;
  const uint4* shared_results;  // [own.count, vectors] or null
  void* out;
  RowShare own;
  int32_t rank, round, num_experts, experts_per_token, vectors;
  FATHOM_PLANTED_FAULT
};

// A row's results in the memory of their ranks, in ascending order of the experts.
struct RowResults {
  const uint4* from[kMostExpertsOfToken];
  float weights[kMostExpertsOfToken];
  int count;
};

// `row` is this rank's, row `window_row` of the round. The first threads find one result each.
__device__ void find_results(const CombineArguments& a, int64_t row, int64_t window_row,
                             RowResults& found) {
  const int thread = static_cast<int>(threadIdx.x), k = a.experts_per_token;
  if (thread >= k) return;
  const int32_t* const ids = a.ids + row * k;
  const auto id_of = [&](int j) { return static_cast<uint32_t>(ids[j]); };
  const auto experts = static_cast<uint32_t>(a.num_experts);
  const bool is_listed = FATHOM_PLANTED(a, kUnorderedExperts) && a.rank == 1;
  int before = 0, present = 0;
  for (int j = 0; j < k; ++j) {
    if (id_of(j) >= experts) continue;
    before += is_listed ? j < thread : id_of(j) < id_of(thread);
    ++present;
  }
  if (thread == 0) found.count = present;
  if (id_of(thread) >= experts) return;
  const ExpertHost host = a.hosts[id_of(thread)];
  const int32_t position = __ldcg(a.positions[host.rank] + window_row * k + thread);
  // Any place inside the results, should the group be stopped.
  const bool is_inside =
      static_cast<uint32_t>(position) < static_cast<uint32_t>(a.sorted_rows[host.rank]);
  found.from[before] = a.results[host.rank] + (is_inside ? int64_t{position} : 0) * a.vectors;
  found.weights[before] = a.weights[row * k + thread];
}

template <bool kF32>
__global__ void __launch_bounds__(kCombineThreads)
    combine_from_ranks_kernel(const __grid_constant__ CombineArguments a) {
  __shared__ RowResults found;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  let_next_launch_begin();
  wait_for_earlier_launches();
  const ExchangeWindow& window = *a.window;
  const int begin = window.begins[a.rank], count = window.begins[a.rank + 1] - begin;
  const int64_t in_window = row - window.first[a.rank];
  const bool is_of_round = count > 0 && in_window >= 0 && in_window < count;
  const bool is_offered = row >= window.own.first && row < window.own.first + window.own.count;
  if (!is_of_round && (a.round > 0 || is_offered)) return;  // another round's
  if (thread == 0) found.count = 0;
  __syncthreads();
  if (is_of_round) find_results(a, row, begin + in_window, found);
  __syncthreads();
  const int64_t own_row = row - a.own.first;
  const bool has_shared = a.shared_results != nullptr && own_row >= 0 && own_row < a.own.count;
  for (int v = thread; v < a.vectors; v += kCombineThreads) {
    float sum[8] = {};
    uint4 last = {};
    if (has_shared) last = a.shared_results[own_row * a.vectors + v];
    add_results(sum, found.weights, found.count,
                [&](int expert) { return __ldcg(found.from[expert] + v); });
    add_scaled(sum, last, 1);
    store_sum<kF32>(sum, a.out, row * a.vectors + v);
  }
}

template <typename T>
T* at(const ExpertExchange& exchange, int64_t offset) {
  return reinterpret_cast<T*>(exchange.workspace + offset);
}

template <typename T>
T* at_moe(const ExpertExchange& exchange, int64_t offset) {
  return at<T>(exchange, exchange.plan.moe_at + offset);
}

ExchangeWindow* window_of(const ExpertExchange& exchange) {
  return at<ExchangeWindow>(exchange, exchange.plan.window_at);
}

void check_exchange(const ExpertExchange& e) {
  FATHOM_CHECK(e.peers.ranks >= 2 && e.peers.ranks <= kMostPeers, "{} ranks", e.peers.ranks);
  FATHOM_CHECK(e.num_experts <= kMostMoeExperts && e.experts_per_token >= 1 &&
                   e.experts_per_token <= std::min(kMostExpertsOfToken, e.num_experts),
               "{} of {} experts a token", e.experts_per_token, e.num_experts);
  FATHOM_CHECK(e.capacity >= 1 && e.hidden % 8 == 0, "{} rows a round, hidden {}", e.capacity,
               e.hidden);
}

void launch_list(const DispatchExpertsArguments& a, GpuStream stream) {
  const ExpertExchange& e = a.exchange;
  ListArguments list = {.peers = e.peers,
                        .hosts = a.hosts,
                        .num_valid_rows = a.num_valid_rows,
                        .slots = at<int32_t>(e, e.plan.slots_at),
                        .window = window_of(e),
                        .own = {static_cast<int32_t>(a.own.first),
                                static_cast<int32_t>(a.own.count), a.scales_stride},
                        .round = a.round,
                        .rounds = a.rounds,
                        .most_rows = a.most_rows,
                        .num_experts = e.num_experts,
                        .experts_per_token = e.experts_per_token};
  for (int r = 0; r < e.peers.ranks; ++r) {
    list.ids[r] = e.ranks[r].expert_ids;
    list.offered[r] = e.ranks[r].offered;
  }
  // A thread's loads from other ranks' memory follow one another: a few pairs each.
  constexpr int64_t kPairsOfThread = 4;
  const int64_t wanted =
      ceil_div(int64_t{a.most_rows} * e.experts_per_token, kListThreads * kPairsOfThread);
  launch_co_resident("expert_dispatch", list_pairs_kernel,
                     {.blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, a.sms)),
                      .threads = kListThreads},
                     a.sms, stream, list);
}

void launch_gather(const DispatchExpertsArguments& a, GpuStream stream) {
  const ExpertExchange& e = a.exchange;
  GatherArguments gather = {.window = window_of(e),
                            .positions = at_moe<int32_t>(e, a.moe.positions_at),
                            .sorted_x = at_moe<uint4>(e, a.moe.sorted_x_at),
                            .sorted_scales = at_moe<float>(e, a.moe.x_scales_at),
                            .sorted_scales_stride = a.moe.sorted_rows,
                            .ranks = e.peers.ranks,
                            .experts_per_token = e.experts_per_token,
                            .vectors = e.x_vectors,
                            .scale_blocks = e.scale_blocks};
  for (int r = 0; r < e.peers.ranks; ++r) {
    gather.x[r] = static_cast<const uint4*>(e.ranks[r].x);
    gather.x_scales[r] = e.ranks[r].x_scales;
  }
  // So many CTAs can run at once: the next launch begins when all have begun.
  constexpr int kCtasOfSm = 8;
  const int most = kCtasOfSm * stream.device().num_multiprocessors();
  launch(gather_from_ranks_kernel,
         {.blocks = static_cast<unsigned>(std::clamp<int32_t>(a.most_rows, 1, most)),
          .threads = kGatherThreads},
         stream, gather);
}

}  // namespace

ExchangePeer exchange_peer(const ExpertExchangePlan& plan, std::byte* workspace) {
  return {.offered = reinterpret_cast<OfferedRows*>(workspace + plan.offered_at),
          .positions =
              reinterpret_cast<const int32_t*>(workspace + plan.moe_at + plan.moe.positions_at),
          .results = workspace + plan.moe_at + plan.moe.sorted_x_at,
          .sorted_rows = static_cast<int32_t>(plan.moe.sorted_rows)};
}

void dispatch_experts(const DispatchExpertsArguments& a, GpuStream stream) {
  const ExpertExchange& e = a.exchange;
  check_exchange(e);
  FATHOM_CHECK(a.most_rows >= 1 && a.most_rows <= room_of_exchange(e.capacity) && a.num_slots >= 1,
               "{} rows in a round of {}, {} experts here", a.most_rows, e.capacity, a.num_slots);
  static_assert(sizeof(ExchangeWindow) <= 1024);
  launch_list(a, stream);
  const auto* const window = window_of(e);
  sort_by_expert({.expert_ids = at<int32_t>(e, e.plan.slots_at),
                  .pairs = a.most_rows * e.experts_per_token,
                  .num_experts = a.num_slots,
                  .num_pairs = &window->num_pairs,
                  .tile_units = a.moe.tile_tokens / kExpertRowUnit,
                  .positions = at_moe<int32_t>(e, a.moe.positions_at),
                  .row_tiles = at_moe<ExpertRowTile>(e, a.moe.row_tiles_at),
                  .num_row_tiles = at_moe<int32_t>(e, a.moe.num_row_tiles_at),
                  .tiles_taken = at_moe<int32_t>(e, a.moe.tiles_taken_at)},
                 stream);
  launch_gather(a, stream);
}

void combine_experts_of_ranks(const CombineExpertsOfRanksArguments& a, GpuStream stream) {
  const ExpertExchange& e = a.exchange;
  check_exchange(e);
  launch_co_resident("expert_meeting", meet_ranks_kernel, {.threads = kMeetThreads}, 1, stream,
                     e.peers);
  if (a.rows == 0) return;
  CombineArguments combine = {.ids = e.ranks[e.peers.rank].expert_ids,
                              .weights = a.weights,
                              .hosts = a.hosts,
                              .window = window_of(e),
                              .shared_results = static_cast<const uint4*>(a.shared_results),
                              .out = a.out,
                              .own = a.own,
                              .rank = e.peers.rank,
                              .round = a.round,
                              .num_experts = e.num_experts,
                              .experts_per_token = e.experts_per_token,
                              .vectors = e.hidden / 8};
  for (int r = 0; r < e.peers.ranks; ++r) {
    combine.positions[r] = e.ranks[r].positions;
    combine.results[r] = static_cast<const uint4*>(e.ranks[r].results);
    combine.sorted_rows[r] = e.ranks[r].sorted_rows;
  }
  launch(a.out_type == DType::kF32 ? combine_from_ranks_kernel<true>
                                   : combine_from_ranks_kernel<false>,
         {.blocks = static_cast<unsigned>(a.rows), .threads = kCombineThreads}, stream, combine);
}

}  // namespace fathom::cuda
