// What: GEMV out[b][n] = sum over k of x[b][k] * W[b][n, k]: linear() of one row.
//
// Inputs/outputs: linear_cuda.h. Work of each CTA: one_row_plan.h.
//
// Layout: up to one CTA an SM, up to eight warps that share only the rows of x in shared memory.
// Each warp has slots of up to 4 KB, filled by bulk copies: a few short rows of weights or a piece
// of a long one.
//
// Algorithm: a warp fills its slots before the PDL wait, reads x after it, and goes through its
// units in turn: 32 / unit_rows lanes multiply a row's columns, 8 at a time, and add up.
// The path from x to the results is kept short, because the launches of a decode step wait for one
// another: plain FMAs take less than a tensor core's latency for every 128 columns, and loops are
// rolled, because the instruction cache is cold after a layer's other kernels.
//
// Determinism: a row's sum has one order, which depends on k alone; no atomics.
//
// Limits: n a multiple of 8, k of 64, one row.
//
// Measured: docs/kernels/few_rows.md.
#include "base/check.h"
#include "device/cuda/launch.h"
#include "ops/linear/one_row_cuda.h"
#include "ops/linear/one_row_plan.h"
#include "ops/linear/row_stream_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kMostShared = 227 * 1024;
static_assert(kPieceColumns == OneRowPlan::kPieceColumns);

struct Arguments {
  const __nv_bfloat16* x;
  const __nv_bfloat16* weight;
  void* out;
  int64_t x_batch_stride, out_batch_stride;
  int32_t n, k, units_a_batch, units;
  int32_t unit_rows, pieces, slots, slot_bytes, batches_a_block;
  bool f32, next_begins_late;
};

// Iterates over a warp's units and their pieces.
struct Turn {
  int unit, piece = 0;
  SlotTurn at = {};

  __device__ bool advance(const Arguments& a, int warps) {  // returns whether the unit ends
    at.advance(a.slots);
    if (++piece < a.pieces) return false;
    piece = 0;
    unit += warps;
    return true;
  }
};

__global__ void __launch_bounds__(OneRowPlan::kMaxWarps* kWarp, 1)
    one_row_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto* const x = reinterpret_cast<uint4*>(memory + warps * a.slots * a.slot_bytes);
  const int row_eights = a.k / 8;
  uint8_t* const ring = memory + warp * a.slots * a.slot_bytes;
  auto* const arrived =
      reinterpret_cast<uint64_t*>(x + a.batches_a_block * row_eights) + warp * a.slots;
  const auto share = [&](unsigned block) {
    return static_cast<int>(static_cast<int64_t>(a.units) * block / gridDim.x);
  };
  const int first = share(blockIdx.x), end = share(blockIdx.x + 1);

  // Pieces of the first warp. The next launch is released when all but one of them have been
  // issued, or at once (0).
  const int pieces = (end - first + warps - 1) / warps * a.pieces;
  const int next_begins_at =
      a.next_begins_late && pieces > a.slots ? max(pieces - 1, a.slots + 1) : 0;
  Turn asked = {first + warp};
  int num_asked = 0;
  const auto ask = [&] {
    const int columns = min(a.k - asked.piece * kPieceColumns, kPieceColumns);
    const int bytes = a.unit_rows * columns * 2;
    barrier_expect(&arrived[asked.at.slot], bytes);
    copy_bytes_under(read_once_policy(), ring + asked.at.slot * a.slot_bytes,
                     a.weight + static_cast<int64_t>(asked.unit) * a.unit_rows * a.k +
                         asked.piece * kPieceColumns,
                     bytes, &arrived[asked.at.slot]);
    asked.advance(a, warps);
    if (++num_asked == next_begins_at && warp == 0) let_next_launch_begin();
  };
  if (lane == 0) {
    for (int slot = 0; slot < a.slots; ++slot) barrier_init(&arrived[slot], 1);
    fence_barrier_init();
    for (int slot = 0; slot < a.slots && asked.unit < end; ++slot) ask();
  }
  if (next_begins_at == 0) let_next_launch_begin();
  wait_for_earlier_launches();

  const int first_batch = first / a.units_a_batch, last_batch = (end - 1) / a.units_a_batch;
  for (int batch = first_batch; batch <= last_batch; ++batch) {
    const auto* from = reinterpret_cast<const uint4*>(a.x + batch * a.x_batch_stride);
    uint4* const to = x + (batch - first_batch) * row_eights;
    for (int i = threadIdx.x; i < row_eights; i += blockDim.x) to[i] = from[i];
  }
  __syncthreads();

  const int sharers = kWarp / a.unit_rows, row = lane / sharers, sharer = lane % sharers;
  float2 sum = make_float2(0, 0);
  Turn turn = {first + warp};
  while (turn.unit < end) {
    const int batch = turn.unit / a.units_a_batch;
    const int eights = min(row_eights - turn.piece * (kPieceColumns / 8), kPieceColumns / 8);
    const auto* w =
        reinterpret_cast<const uint4*>(ring + turn.at.slot * a.slot_bytes) + row * eights;
    const uint4* const x_piece =
        x + (batch - first_batch) * row_eights + turn.piece * (kPieceColumns / 8);
    barrier_wait(&arrived[turn.at.slot], turn.at.parity);
#pragma unroll 4
    for (int i = sharer; i < eights; i += sharers) sum = multiply_eight(w[i], x_piece[i], sum);
    __syncwarp();
    if (lane == 0 && asked.unit < end) ask();
    const int unit = turn.unit;
    if (!turn.advance(a, warps)) continue;
    float value = sum.x + sum.y;
    for (int distance = sharers / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(~0u, value, distance);
    }
    if (sharer == 0) {
      const int column = (unit - batch * a.units_a_batch) * a.unit_rows + row;
      const int64_t at = batch * a.out_batch_stride + column;
      if (a.f32) {
        static_cast<float*>(a.out)[at] = value;
      } else {
        static_cast<__nv_bfloat16*>(a.out)[at] = __float2bfloat16(value);
      }
    }
    sum = make_float2(0, 0);
  }
}

}  // namespace

void linear_one_row(const LinearArguments& arguments, GpuStream stream) {
  FATHOM_CHECK(arguments.rows == 1, "{} rows", arguments.rows);
  stream.device().allow_shared_memory(one_row_kernel, kMostShared);
  const OneRowShape shape = {.n = arguments.n, .k = arguments.k, .batches = arguments.batches};
  const OneRowPlan plan = plan_one_row(shape, stream.device().num_multiprocessors());
  const int units_a_batch = arguments.n / plan.unit_rows;
  const Arguments a = {.x = static_cast<const __nv_bfloat16*>(arguments.x),
                       .weight = static_cast<const __nv_bfloat16*>(arguments.weight),
                       .out = arguments.out,
                       .x_batch_stride = arguments.x_batch_stride,
                       .out_batch_stride = arguments.out_batch_stride,
                       .n = arguments.n,
                       .k = arguments.k,
                       .units_a_batch = units_a_batch,
                       .units = units_a_batch * arguments.batches,
                       .unit_rows = plan.unit_rows,
                       .pieces = plan.pieces,
                       .slots = plan.slots,
                       .slot_bytes = plan.slot_bytes,
                       .batches_a_block = plan.batches_a_block,
                       .f32 = arguments.out_type == DType::kF32,
                       .next_begins_late = plan.next_begins_late};
  launch(one_row_kernel,
         {.blocks = static_cast<unsigned>(plan.blocks),
          .threads = static_cast<unsigned>(plan.warps * kWarp),
          .shared_bytes = static_cast<unsigned>(plan.shared_bytes(shape))},
         stream, a);
}

}  // namespace fathom::cuda
