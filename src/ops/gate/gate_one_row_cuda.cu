// What: gate() of one row with fp32 weights: logits = weight x and the choice.
//
// Inputs/outputs: gate_cuda.h.
//
// Layout: one cluster; a warp has an expert, whose weights the copy engine brings into shared
// memory before earlier launches have ended. The first block's first warp chooses
// (gate_choice_cuda.cuh).
//
// Algorithm: what counts is how soon after the row is there the choice is, and that is a matter of
// instructions that come from far away, once a launch: loops are rolled, and the warp that will
// choose does so beforehand with made-up logits, so that its code is there when it is wanted.
//
// Determinism: the order of a logit's sum depends on the number of columns alone, but is not the
// one that more rows have.
//
// Limits: 128 experts, 4,096 columns.
//
// Measured: docs/kernels/fused.md.
#include "base/math.h"
#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/launch.h"
#include "ops/gate/gate_one_row_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMaxClusterBlocks = 16, kMostColumns = 4096;
constexpr int kMostExperts = kWarps * kMaxClusterBlocks;

struct Memory {
  float logits[kMostExperts], made_up[kMostExperts];
  float weights[kWarp];  // of the made-up choice
  int32_t ids[kWarp];
  uint64_t arrived[kWarps];
};

__device__ __noinline__ void choose(const GateShape& shape, float* logits) {
  choose_experts(shape, 0, logits);
}

__device__ void choose_beforehand(const GateShape& shape, Memory& memory, int lane) {
  for (int i = lane; i < kMostExperts; i += kWarp) memory.made_up[i] = static_cast<float>(i);
  __syncwarp();
  GateShape made_up = shape;
  made_up.expert_ids = memory.ids;
  made_up.expert_weights = memory.weights;
  choose(made_up, memory.made_up);
}

__global__ void __launch_bounds__(kThreads, 1)
    gate_one_row_kernel(const __grid_constant__ GateShape shape) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto columns = static_cast<int>(shape.hidden);
  auto* const weights = reinterpret_cast<float4*>(shared) + warp * (columns / 4);
  auto* const x = reinterpret_cast<uint4*>(shared + kWarps * columns * sizeof(float));
  Memory& memory = *reinterpret_cast<Memory*>(x + columns / 8);
  const auto rank = static_cast<int>(cluster_rank());
  const int expert = rank * kWarps + warp;
  cluster_arrive();
  if (lane == 0 && expert < shape.experts) {
    uint64_t* const arrived = &memory.arrived[warp];
    barrier_init(arrived, 1);
    fence_barrier_init();
    const int bytes = columns * static_cast<int>(sizeof(float));
    barrier_expect(arrived, bytes);
    copy_bytes_under(read_once_policy(), weights,
                     static_cast<const float*>(shape.weight) + int64_t{expert} * columns, bytes,
                     arrived);
  }
  __syncwarp();
  let_next_launch_begin();
  const bool chooses = rank == 0 && warp == 0;
  if (chooses) choose_beforehand(shape, memory, lane);
  wait_for_earlier_launches();
  for (int i = threadIdx.x; i < columns / 8; i += kThreads) {
    x[i] = reinterpret_cast<const uint4*>(shape.x)[i];
  }
  __syncthreads();
  cluster_wait();
  if (expert < shape.experts) {
    barrier_wait(&memory.arrived[warp], 0);
    float even = 0, odd = 0;
#pragma unroll 2
    for (int i = lane; i < columns / 4; i += kWarp) {
      const float4 w = weights[i];
      const uint2 pair = reinterpret_cast<const uint2*>(x)[i];
      even += w.x * low_bf16(pair.x), odd += w.y * high_bf16(pair.x);
      even += w.z * low_bf16(pair.y), odd += w.w * high_bf16(pair.y);
    }
    const float logit = warp_sum(even + odd);
    if (lane == 0) {
      store_word_in_block(address_in_block(shared_address(&memory.logits[expert]), 0), logit);
    }
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (!chooses) return;
  if (shape.num_valid_rows == nullptr || *shape.num_valid_rows > 0) {
    choose(shape, memory.logits);
  } else {
    write_no_experts(shape, 0, lane);
  }
}

}  // namespace

bool gate_one_row_takes(const GateShape& shape) {
  return shape.rows == 1 && shape.hidden <= kMostColumns && shape.experts <= kMostExperts;
}

void gate_one_row(const GateShape& shape, cudaStream_t stream) {
  static const bool prepared = [] {
    allow_shared_memory(gate_one_row_kernel,
                        kMostColumns * (kWarps * 4 + 2) + static_cast<int>(sizeof(Memory)));
    allow_large_clusters(gate_one_row_kernel);
    return true;
  }();
  static_cast<void>(prepared);
  const auto blocks = static_cast<unsigned>(ceil_div(shape.experts, kWarps));
  launch(gate_one_row_kernel,
         {.blocks = blocks,
          .threads = kThreads,
          .shared_bytes =
              static_cast<unsigned>(shape.hidden * (kWarps * 4 + 2) + int64_t{sizeof(Memory)}),
          .cluster = blocks},
         stream, shape);
}

}  // namespace fathom::cuda
