// What: residual += sum over ranks of delta; out = norm of the residual, for many rows: a two-shot
// all-reduce (reduce-scatter and all-gather) with the operation after it. And columns of all ranks,
// gathered on the first.
//
// Inputs/outputs: peer_rows_cuda.h.
//
// Layout: one CTA a row, several rows in turn; a thread for each eight values, as add_rms_norm.
//
// Algorithm: all ranks begin together (peer_barrier.cuh). A rank takes its share of the rows: it
// reads the deltas of all ranks out of their memory, adds them in the order of ranks and to its
// residual, and writes the norm into the memory of all ranks. The launch ends when all ranks have
// written. With row_ids every rank reads what it needs and writes for itself.
//
// Determinism: as peer_sum, and the same bits.
//
// Limits: 8 ranks, n a multiple of 8 up to 8,192, in e4m3 of 128.
//
// Source: two-shot all-reduce over peer memory, as in TensorRT-LLM's and vLLM's custom kernels.
//
// Measured: docs/kernels/peer_sum.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/peer_barrier.cuh"
#include "ops/peer_sum/peer_rows_cuda.h"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWideThreads = 1024;

struct Arguments {
  PeerRows ranks[kMostPeers];
  const float* weight;
  const int32_t* row_ids;  // null: this rank's share of the rows
  float* gathered;
  PeerRank peers;
  int64_t first, end;    // rows of the results that this launch computes
  int64_t rows_of_each;  // residuals of a rank
  int32_t n;
  float eps;
};

__device__ void store_norm(const PeerRows& to, uint4 out, int64_t row, int32_t n, int column) {
  if (to.out != nullptr) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(to.out) + row * n + column) = out;
  }
  if (to.quantized.values != nullptr) store_quantized(out, to.quantized, row, column);
}

template <int kThreads, int kMostRanks>
__global__ void __launch_bounds__(kThreads) peer_rows_kernel(const __grid_constant__ Arguments a) {
  __shared__ alignas(16) float parts[kThreads / kWarp];
  if (!a.peers.shares_device) let_next_launch_begin();
  const int column = static_cast<int>(threadIdx.x) * 8;
  const bool has = column < a.n;
  Eight weight = {};
  if (has) weight = load_eight_weights(a.weight + column);
  wait_for_earlier_launches();
  const uint32_t barrier = next_barrier(a.peers);
  begin_together(a.peers, barrier);
  for (int64_t i = a.first + blockIdx.x; i < a.end; i += gridDim.x) {
    const int64_t row = a.row_ids == nullptr ? i : a.row_ids[i];
    if (row < 0) continue;
    int64_t owner = a.row_ids == nullptr ? a.peers.rank : row / a.rows_of_each;
    if (FATHOM_PLANTED(a.peers, kWrongOwner) && a.row_ids != nullptr) {
      owner = (owner + 1) % a.peers.ranks;
    }
    const int64_t at = row * a.n + column;
    Eight x = {};
    if (has) {
      x = load_eight(a.ranks[owner].residual + at);
      Eight sum = {};
#pragma unroll
      for (int turn = 0; turn < kMostRanks; ++turn) {
        if (turn >= a.peers.ranks) break;
        int r = turn;
        if (FATHOM_PLANTED(a.peers, kUnorderedPeers) && a.peers.rank == 1) {
          r = (turn + 2) % a.peers.ranks;
        }
        const Eight delta = load_eight(static_cast<const __nv_bfloat16*>(a.ranks[r].delta) + at);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum.v[k] = turn == 0 ? delta.v[k] : sum.v[k] + delta.v[k];
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) x.v[k] += sum.v[k];
      store_eight(
          x, a.row_ids == nullptr ? a.ranks[owner].residual + at : a.gathered + i * a.n + column);
    }
    const float square = warp_sum(has ? sum_of_squares(x) : 0);
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = square;
    __syncthreads();
    const float scale = inverse_rms(sum_of_block<kThreads>(parts), a.n, a.eps);
    if (has) {
      const uint4 out = narrow(normed(x, weight, scale));
      if (a.row_ids != nullptr) {
        store_norm(a.ranks[a.peers.rank], out, i, a.n, column);
      } else {
        for (int step = 0; step < a.peers.ranks; ++step) {
          // Ranks begin with different readers, so that no link takes all writes at once.
          store_norm(a.ranks[(a.peers.rank + step) % a.peers.ranks], out, i, a.n, column);
        }
      }
    }
    __syncthreads();  // the parts have been read
  }
  end_together(a.peers, barrier);
}

template <int kThreads, int kMostRanks>
void launch_for(const Arguments& a, int sms, GpuStream stream) {
  const auto blocks = std::clamp<int64_t>(a.end - a.first, 1, sms);
  launch_co_resident("peer_sum_rows", peer_rows_kernel<kThreads, kMostRanks>,
                     {.blocks = static_cast<unsigned>(blocks), .threads = kThreads}, sms, stream,
                     a);
}

template <int kThreads>
void launch_for(const Arguments& a, int sms, GpuStream stream) {
  if (a.peers.ranks <= 2) return launch_for<kThreads, 2>(a, sms, stream);
  if (a.peers.ranks <= 4) return launch_for<kThreads, 4>(a, sms, stream);
  launch_for<kThreads, 8>(a, sms, stream);
}

constexpr int kCopyThreads = 256;

__global__ void __launch_bounds__(kCopyThreads)
    gather_columns_kernel(const __grid_constant__ PeerColumnsArguments a) {
  if (!a.peers.shares_device) let_next_launch_begin();
  wait_for_earlier_launches();
  const uint32_t barrier = next_barrier(a.peers);
  const int64_t fours = a.from == a.to ? 0 : a.columns / 4;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const auto* const from = reinterpret_cast<const float4*>(a.from + row * a.from_stride);
    auto* const to = reinterpret_cast<float4*>(a.to + row * a.to_stride);
    for (int64_t i = threadIdx.x; i < fours; i += kCopyThreads) to[i] = from[i];
  }
  end_together(a.peers, barrier);
}

}  // namespace

void peer_sum_rows(const PeerRowsArguments& arguments, GpuStream stream) {
  const PeerRank& peers = arguments.peers;
  FATHOM_CHECK(arguments.n > 0 && arguments.n % 8 == 0 && arguments.n <= kMostPeerSumColumns,
               "rows of {}", arguments.n);
  FATHOM_CHECK(peers.ranks >= 2 && peers.ranks <= kMostPeers, "{} ranks", peers.ranks);
  FATHOM_CHECK(arguments.row_ids == nullptr || arguments.gathered != nullptr,
               "rows by index want a place for the sums");
  Arguments a = {.weight = arguments.weight,
                 .row_ids = arguments.row_ids,
                 .gathered = arguments.gathered,
                 .peers = peers,
                 .n = static_cast<int32_t>(arguments.n),
                 .eps = arguments.eps};
  std::copy_n(arguments.ranks, kMostPeers, a.ranks);
  const bool by_id = arguments.row_ids != nullptr;
  a.rows_of_each = rows_of_each(by_id ? arguments.divided_rows : arguments.rows, peers.ranks);
  if (by_id) {
    a.first = 0;
    a.end = arguments.rows;
  } else {
    a.first = std::min(arguments.rows, peers.rank * a.rows_of_each);
    a.end = std::min(arguments.rows, a.first + a.rows_of_each);
  }
  if (arguments.n / 8 <= kRowThreads) return launch_for<kRowThreads>(a, arguments.sms, stream);
  launch_for<kWideThreads>(a, arguments.sms, stream);
}

void gather_columns(const PeerColumnsArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(
      arguments.columns % 4 == 0 && arguments.from_stride % 4 == 0 && arguments.to_stride % 4 == 0,
      "{} columns, rows {} and {} apart", arguments.columns, arguments.from_stride,
      arguments.to_stride);
  const auto blocks = std::clamp<int64_t>(arguments.rows, 1, arguments.sms);
  launch_co_resident("gather_columns", gather_columns_kernel,
                     {.blocks = static_cast<unsigned>(blocks), .threads = kCopyThreads},
                     arguments.sms, stream, arguments);
}

}  // namespace fathom::cuda
