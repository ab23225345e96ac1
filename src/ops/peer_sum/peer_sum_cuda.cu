// What: residual += sum over ranks of delta; out = norm of the residual, as bf16, as e4m3, or both:
// a one-shot all-reduce with the operation after it.
//
// Inputs/outputs: peer_sum_cuda.h.
//
// Layout: one CTA a row, or several rows in turn where the SMs' share is smaller. Two arrangements
// of a row: packets of seven values, a thread each, and eights as add_rms_norm has them; sums pass
// from the one to the other through shared memory.
//
// Algorithm: a CTA writes its rows' packets to all other ranks' inboxes, all rows before it waits
// for any. Then, row by row: residual and weights are loaded, packets polled for, added in the
// order of ranks, and the norm is that of add_rms_norm.
//
// Determinism: sums in the order of ranks, the norm's sum in an order that depends on n alone.
//
// Limits: 8 ranks, n a multiple of 8 up to 8,192, in e4m3 of 128. CTAs wait for those of other
// launches: all must be co-resident.
//
// Source: packets from NCCL's LL128 protocol; the order of sums from this project's CPU ranks.
//
// Measured: docs/kernels/peer_sum.md.
#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/peer_packets.cuh"
#include "ops/peer_sum/peer_sum_cuda.h"
#include "ops/scaled_linear/quantize_block_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWideThreads = 1024;

struct Arguments {
  float* residual;
  float* sums;             // where residual + sum goes
  const int32_t* row_ids;  // of residual and delta; null: row i is row i
  const __nv_bfloat16* delta;
  const float* weight;  // null: no norm
  __nv_bfloat16* out;   // may be null
  QuantizedRows quantized;
  PeerRank peers;
  int64_t delta_stride;
  int32_t rows, n;
  float eps;
};

__device__ uint32_t bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// The row of residual and delta that exchange `row` is about; below 0: none.
__device__ int64_t source_of(const Arguments& a, int64_t row) {
  return a.row_ids == nullptr ? row : a.row_ids[row];
}

// This rank's values of packet p; zeros beyond the row.
__device__ Packet own_packet(const Arguments& a, int64_t row, int p, uint32_t epoch) {
  const __nv_bfloat16* from = a.delta + source_of(a, row) * a.delta_stride + p * kPacketValues;
  uint32_t bits[kPacketValues];
#pragma unroll
  for (int i = 0; i < kPacketValues; ++i) {
    bits[i] = p * kPacketValues + i < a.n ? bits_of(from[i]) : 0;
  }
  return make_packet(bits, epoch);
}

__device__ int packets_of_row(const Arguments& a) {
  return (a.n + kPacketValues - 1) / kPacketValues;
}

// A CTA writes its packets of a row to the other ranks.
template <int kThreads, int kMostRanks>
__device__ void send(const Arguments& a, int64_t row, uint32_t epoch) {
  for (int p = static_cast<int>(threadIdx.x); p < packets_of_row(a); p += kThreads) {
    const Packet packet = own_packet(a, row, p, epoch);
#pragma unroll
    for (int step = 1; step < kMostRanks; ++step) {
      if (step >= a.peers.ranks) break;
      // Ranks begin with different readers, so that no link takes all writes at once.
      const int reader = (a.peers.rank + step) % a.peers.ranks;
      store_packet_of_peer(packets_of(a.peers, reader, a.peers.rank, row, epoch) + p, packet);
    }
  }
}

// The row's sums over all ranks, to shared memory.
template <int kThreads, int kMostRanks>
__device__ void receive(const Arguments& a, int64_t row, uint32_t epoch, float* sums) {
  const int packets_a_row = packets_of_row(a);
  // The same number of turns for all lanes of a warp.
  for (int first = 0; first < packets_a_row; first += kThreads) {
    const int p = first + static_cast<int>(threadIdx.x);
    const bool has = p < packets_a_row;
    Packet packets[kMostRanks];
    wait_for_peers(a.peers, epoch, packets, [&](int r) -> const Packet* {
      if (!has || r >= a.peers.ranks || r == a.peers.rank) return nullptr;
      return packets_of(a.peers, a.peers.rank, r, row, epoch) + p;
    });
    if (!has) continue;
    const Packet own = own_packet(a, row, p, epoch);
    float sum[kPacketValues] = {};
#pragma unroll
    for (int turn = 0; turn < kMostRanks; ++turn) {
      if (turn >= a.peers.ranks) break;
      int r = turn;
      if (FATHOM_PLANTED(a.peers, kUnorderedPeers) && a.peers.rank == 1) {
        r = (turn + 2) % a.peers.ranks;
      }
      Packet packet = packets[r];
      if (r == a.peers.rank) packet = own;
      float values[kPacketValues];
      unpack_bf16(packet, values);
#pragma unroll
      for (int i = 0; i < kPacketValues; ++i) sum[i] = turn == 0 ? values[i] : sum[i] + values[i];
    }
#pragma unroll
    for (int i = 0; i < kPacketValues; ++i) sums[p * kPacketValues + i] = sum[i];
  }
}

template <int kThreads, int kMostRanks>
__global__ void __launch_bounds__(kThreads) peer_sum_kernel(const __grid_constant__ Arguments a) {
  constexpr int kWarps = kThreads / kWarp;
  extern __shared__ __align__(16) float sums[];
  __shared__ alignas(16) float parts[kWarps];
  if (!a.peers.shares_device) let_next_launch_begin();
  const int eight = static_cast<int>(threadIdx.x), eights = a.n / 8;
  Eight weight = {};
  if (a.weight != nullptr && eight < eights) weight = load_eight_weights(a.weight + eight * 8);
  wait_for_earlier_launches();
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (source_of(a, row) < 0) continue;
    send<kThreads, kMostRanks>(a, row, a.peers.epochs[row] + 1);
  }
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t source = source_of(a, row);
    if (source < 0) continue;
    const uint32_t epoch = a.peers.epochs[row] + 1;
    Eight x = {};
    if (eight < eights) x = load_eight(a.residual + source * a.n + eight * 8);
    receive<kThreads, kMostRanks>(a, row, epoch, sums);
    __syncthreads();  // all sums are there, and all threads have read the epoch
    if (threadIdx.x == 0) a.peers.epochs[row] = epoch;
    if (eight < eights) {
      const Eight sum = load_eight(sums + eight * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) x.v[i] += sum.v[i];
      store_eight(x, a.sums + row * a.n + eight * 8);
    }
    if (a.weight != nullptr) {
      const float square = warp_sum(eight < eights ? sum_of_squares(x) : 0);
      if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = square;
      __syncthreads();
      const float scale = inverse_rms(sum_of_block<kThreads>(parts), a.n, a.eps);
      if (eight < eights) {
        const uint4 out = narrow(normed(x, weight, scale));
        if (a.out != nullptr) *reinterpret_cast<uint4*>(a.out + row * a.n + eight * 8) = out;
        if (a.quantized.values != nullptr) store_quantized(out, a.quantized, row, eight * 8);
      }
    }
    __syncthreads();  // sums and parts have been read
  }
}

template <int kThreads, int kMostRanks>
void launch_for(const Arguments& a, int sms, GpuStream stream) {
  const auto kernel = peer_sum_kernel<kThreads, kMostRanks>;
  const LaunchShape shape = {
      .blocks = static_cast<unsigned>(std::min(a.rows, sms)),
      .threads = kThreads,
      .shared_bytes = static_cast<unsigned>(round_up(a.n, kPacketValues) * sizeof(float))};
  launch_co_resident("peer_sum", kernel, shape, sms, stream, a);
}

template <int kThreads>
void launch_for(const Arguments& a, int sms, GpuStream stream) {
  if (a.peers.ranks <= 2) return launch_for<kThreads, 2>(a, sms, stream);
  if (a.peers.ranks <= 4) return launch_for<kThreads, 4>(a, sms, stream);
  launch_for<kThreads, 8>(a, sms, stream);
}

}  // namespace

void peer_sum(const PeerSumArguments& arguments, GpuStream stream) {
  const AddRmsNormArguments& norm = arguments.norm;
  const PeerRank& peers = arguments.peers;
  FATHOM_CHECK(norm.n > 0 && norm.n % 8 == 0 && norm.n <= kMostPeerSumColumns, "rows of {}",
               norm.n);
  FATHOM_CHECK(peers.ranks >= 2 && peers.ranks <= kMostPeers && norm.rows <= peers.rows &&
                   ceil_div(norm.n, int64_t{kPacketValues}) <= peers.row_packets,
               "{} ranks, {} rows of {}; inboxes take {} rows of {} packets", peers.ranks,
               norm.rows, norm.n, peers.rows, peers.row_packets);
  FATHOM_CHECK(norm.delta != nullptr && norm.delta_type == DType::kBF16 &&
                   norm.delta_stride >= norm.n &&
                   (norm.row_ids == nullptr || norm.gathered != nullptr),
               "peer_sum takes a delta in bf16, and a place for the sums of rows by index");
  FATHOM_CHECK(norm.quantized.values == nullptr || norm.n % kScaleBlock == 0, "rows of {} in e4m3",
               norm.n);
  if (norm.rows == 0) return;
  const Arguments a = {.residual = norm.residual,
                       .sums = norm.row_ids != nullptr ? norm.gathered : norm.residual,
                       .row_ids = norm.row_ids,
                       .delta = static_cast<const __nv_bfloat16*>(norm.delta),
                       .weight = norm.weight,
                       .out = static_cast<__nv_bfloat16*>(norm.out),
                       .quantized = norm.quantized,
                       .peers = peers,
                       .delta_stride = norm.delta_stride,
                       .rows = static_cast<int32_t>(norm.rows),
                       .n = static_cast<int32_t>(norm.n),
                       .eps = norm.eps};
  if (norm.n / 8 <= kRowThreads) return launch_for<kRowThreads>(a, arguments.sms, stream);
  launch_for<kWideThreads>(a, arguments.sms, stream);
}

}  // namespace fathom::cuda
