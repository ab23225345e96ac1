// What: out[b][m, n] = sum over k of x[b][m, k] * W[b][n, k] for up to 64 rows m, at the rate at
// which W can be read.
//
// Inputs/outputs: linear_cuda.h. Which block takes what: few_rows_plan.h.
//
// Layout: up to one block a multiprocessor, kWarpgroups warpgroups of tensor cores and a warp that
// copies. A ring of stages (weight_stream_cuda.cuh), each 128 columns of kColumns rows of x and of
// as many rows of W as the largest tile has: little of a small matrix must not mean few bytes on
// their way.
//
// Algorithm: transposed, so that few rows waste nothing: rows of W are the M of the tensor core's
// instruction, rows of x its N. A tile of the block's rows of W goes through the ring, its product
// stays in registers. Where k is split over the blocks of a cluster, each block sends each other
// its part of a share of the tile into that one's shared memory, adds up the parts of its own
// share and writes it.
// The copies of weights begin before earlier launches have ended: nothing of this step writes them.
//
// Determinism: a block adds in the order of k, parts are added in the order of k; no atomics. Bits
// depend on the number of splits, so on the shape and the number of rows; of one split, on k alone.
//
// Limits: n a multiple of 8, k of 64, up to 64 rows.
//
// Source: weights on M for few tokens as in TensorRT-LLM's and HPC-Ops' small products; loading
// weights before the dependency's end as in TensorRT-LLM's fused_a kernel.
//
// Measured: docs/kernels/few_rows.md.
#include <cuda_bf16.h>

#include <algorithm>

#include "device/cuda/cluster.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/weight_stream_cuda.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarpgroupThreads = 128;
constexpr int kMostShared = 227 * 1024;
constexpr int kMaxStages = FewRowsPlan::kMaxStages;

struct Maps {
  CUtensorMap weights[2];  // boxes of as many rows as the largest tile has, and of 8 less
  CUtensorMap tokens;
};

struct Arguments {
  void* out;
  int64_t row_stride, batch_stride;
  int32_t rows, n, columns;  // columns: k / 64
  int32_t splits, clusters, tiles, tile_groups, stages, exchanges;

  __device__ int token_groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
  // In a stage tokens come first, then weights.
  __device__ int token_bytes() const { return token_groups() * kStageHalves * kGroupBytes; }
  __device__ int stage_bytes() const {
    return token_bytes() + tile_groups * kStageHalves * kGroupBytes;
  }
  bool f32;
};

template <int kColumns, int kWarpgroups>
struct Layout {
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;  // that multiply
  static constexpr int kTileBytes = kThreads * (kColumns / 2) * 4;  // in fp32
};

// A block's share of the work.
struct Share {
  int batch, rank;
  int first_group, num_groups;  // of 8 rows of W
  int first_stage, num_stages;  // of k

  __device__ explicit Share(const Arguments& a) : num_tiles_(a.tiles) {
    const int cluster = blockIdx.x / a.splits % a.clusters;
    batch = blockIdx.x / (a.splits * a.clusters);
    rank = blockIdx.x % a.splits;
    const int64_t groups = a.n / kGroupRows;
    first_group = static_cast<int>(groups * cluster / a.clusters);
    num_groups = static_cast<int>(groups * (cluster + 1) / a.clusters) - first_group;
    const int stages = (a.columns + kStageHalves - 1) / kStageHalves;
    first_stage = stages * rank / a.splits;
    num_stages = stages * (rank + 1) / a.splits - first_stage;
  }
  __device__ int tile_begin(int tile) const { return first_group + num_groups * tile / num_tiles_; }

 private:
  int num_tiles_;
};

// ---- copies

class Copies {
 public:
  __device__ Copies(uint8_t* ring, uint64_t* arrived, const Maps& maps, const Share& share,
                    const Arguments& a)
      : ring_(ring),
        arrived_(arrived),
        maps_(maps),
        share_(share),
        a_(a),
        stage_bytes_(a.stage_bytes()) {}

  // By one thread.
  __device__ void run(uint64_t* read) const {
    const int total = a_.tiles * share_.num_stages, first = min(a_.stages, total);
    for (int i = 0; i < first; ++i) copy_weights(i, i);
    wait_for_earlier_launches();
    for (int i = 0; i < first; ++i) copy_tokens(i, i);
    RingPosition at;
    for (int i = first; i < total; ++i) {
      barrier_wait(&read[at.stage], at.parity);
      copy_weights(at.stage, i);
      copy_tokens(at.stage, i);
      at.advance(a_.stages);
    }
  }

 private:
  __device__ int column(int i) const {
    return (share_.first_stage + i % share_.num_stages) * kStageHalves;
  }
  // Of the block's i-th stage; says how much will come in all.
  __device__ void copy_weights(int stage, int i) const {
    const int tile = i / share_.num_stages;
    const int begin = share_.tile_begin(tile), groups = share_.tile_begin(tile + 1) - begin;
    barrier_expect(&arrived_[stage], groups * (kStageHalves * kGroupBytes) + a_.token_bytes());
    copy_box_under(policy_, ring_ + stage * stage_bytes_ + a_.token_bytes(),
                   &maps_.weights[groups == a_.tile_groups ? 0 : 1], &arrived_[stage], 0,
                   share_.batch * a_.n + begin * kGroupRows, column(i));
  }
  __device__ void copy_tokens(int stage, int i) const {
    copy_box(ring_ + stage * stage_bytes_, &maps_.tokens, &arrived_[stage], 0, 0, column(i),
             share_.batch);
  }

  uint8_t* const ring_;
  uint64_t* const arrived_;
  const Maps& maps_;
  const Share& share_;
  const Arguments& a_;
  const int stage_bytes_;
  const uint64_t policy_ = read_once_policy();
};

// ---- results

__device__ void write_one(const Arguments& a, int batch, int row, int column, float value) {
  if (row >= a.rows) return;
  const int64_t at = batch * a.batch_stride + row * a.row_stride + column;
  if (a.f32) {
    static_cast<float*>(a.out)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(a.out)[at] = __float2bfloat16(value);
  }
}

// Four values as a thread holds them, of rows (tokens) `row` and the next at columns `column` and 8
// further, of which those below `end` exist.
__device__ void write_four(const Arguments& a, int batch, int row, int column, int end, float4 v) {
  if (column < end) {
    write_one(a, batch, row, column, v.x);
    write_one(a, batch, row + 1, column, v.y);
  }
  if (column + 8 < end) {
    write_one(a, batch, row, column + 8, v.z);
    write_one(a, batch, row + 1, column + 8, v.w);
  }
}

// ---- the kernel

template <int kColumns, int kWarpgroups>
__global__ void __launch_bounds__(kWarpgroups* kWarpgroupThreads + 32, 1)
    few_rows_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  using L = Layout<kColumns, kWarpgroups>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* const exchange = memory + a.stages * a.stage_bytes();
  auto* const arrived = reinterpret_cast<uint64_t*>(exchange + a.exchanges * L::kTileBytes);
  uint64_t* const read = arrived + kMaxStages;
  uint64_t* const joined = read + kMaxStages;  // [2]

  if (threadIdx.x == 0) {
    prefetch_map(&maps.tokens);  // the first that is wanted after the wait
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(&arrived[i], 1);
      barrier_init(&read[i], kWarpgroups * 4);
    }
    for (int i = 0; i < 2; ++i) barrier_init(&joined[i], 1);
    fence_barrier_init();
    for (int i = 0; i < a.exchanges; ++i) barrier_expect(&joined[i], L::kTileBytes);
    let_next_launch_begin();
  }
  __syncthreads();
  if (a.splits > 1) cluster_arrive();
  const Share share(a);

  if (threadIdx.x >= L::kThreads) {
    if (threadIdx.x == L::kThreads) Copies(memory, arrived, maps, share, a).run(read);
    __syncwarp();
    if (a.splits > 1) cluster_wait();
    return;
  }
  if (a.splits > 1) cluster_wait();  // the others' barriers exist
  wait_for_earlier_launches();

  const int thread = threadIdx.x % kWarpgroupThreads, group = threadIdx.x / kWarpgroupThreads;
  constexpr int kVectors = kColumns / 8;  // of 16 bytes that a thread holds of a tile
  const auto row_of = [](int v, int t) { return v * 8 + 2 * (t % 4); };
  RingPosition at;
  for (int tile = 0; tile < a.tiles; ++tile) {
    float d[kColumns / 2];
    const int groups = share.tile_begin(tile + 1) - share.tile_begin(tile);
    multiply_tile<kColumns, false>(
        d, at, share.num_stages, a.stages, shared_address(memory), a.stage_bytes(),
        {.begin = a.token_bytes() + group * (kWarpgroupGroups * kGroupBytes),
         .half_stride = groups * kGroupBytes,
         .group_stride = kGroupBytes},
        {.begin = 0, .half_stride = a.token_groups() * kGroupBytes, .group_stride = kGroupBytes},
        arrived, read);
    const int first = share.tile_begin(tile) * kGroupRows;
    const int end = share.tile_begin(tile + 1) * kGroupRows;
    const auto column_of = [&](int t) {  // of a thread of a warpgroup
      return first + group * 64 + t / 32 * 16 + t % 32 / 4;
    };
    if (a.splits == 1) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        write_four(a, share.batch, row_of(v, thread), column_of(thread), end,
                   make_float4(d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3]));
      }
      continue;
    }
    // A warpgroup's threads are divided among the blocks: what a thread holds goes to one of them.
    // There it lies by sender, warpgroup, vector and thread.
    const int sharers = kWarpgroupThreads / a.splits, turn = tile & 1;
    const uint32_t buffer = shared_address(exchange) + turn * L::kTileBytes;
    const auto slot = [&](int sender, int v, int within) {
      return (((sender * kWarpgroups + group) * kVectors + v) * sharers + within) * 16;
    };
    const uint32_t owner = thread / sharers;
    const uint32_t there = address_in_block(buffer, owner);
    const uint32_t barrier = address_in_block(shared_address(&joined[turn]), owner);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      store_in_block(there + slot(share.rank, v, thread % sharers), barrier,
                     make_float4(d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3]));
    }
    barrier_wait(&joined[turn], tile >> 1 & 1);
    for (int i = thread; i < kVectors * sharers; i += kWarpgroupThreads) {
      const int v = i / sharers, within = i % sharers;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int sender = 0; sender < a.splits; ++sender) {
        const float4 part = *reinterpret_cast<const float4*>(exchange + turn * L::kTileBytes +
                                                             slot(sender, v, within));
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      write_four(a, share.batch, row_of(v, within), column_of(share.rank * sharers + within), end,
                 sum);
    }
    // Nobody sends into a buffer that is still being read: a block that sends the tile after next
    // has this block's part of the next one.
    named_barrier(1, L::kThreads);
    if (threadIdx.x == 0 && tile + 2 < a.tiles) {
      barrier_expect(&joined[turn], L::kTileBytes);
    }
  }
}

template <int kColumns, int kWarpgroups>
void launch_for(const FewRowsPlan& plan, const LinearArguments& arguments, cudaStream_t stream) {
  using L = Layout<kColumns, kWarpgroups>;
  const auto kernel = few_rows_kernel<kColumns, kWarpgroups>;
  static const bool prepared = (allow_shared_memory(kernel, kMostShared), true);
  static_cast<void>(prepared);

  Arguments a;
  a.out = arguments.out;
  a.row_stride = arguments.out_row_stride;
  a.batch_stride = arguments.out_batch_stride;
  a.rows = arguments.rows;
  a.n = arguments.n;
  a.columns = arguments.k / 64;
  a.splits = plan.splits;
  a.clusters = plan.clusters;
  const FewRowsShape shape = {.rows = arguments.rows, .n = arguments.n, .k = arguments.k};
  a.tiles = plan.tiles(shape.n);
  a.tile_groups = plan.tile_groups(shape.n);
  a.exchanges = plan.exchange_bytes(shape.n) / L::kTileBytes;
  a.stages = plan.stages(shape);
  a.f32 = arguments.out_type == DType::kF32;
  const int token_groups = (a.rows + kGroupRows - 1) / kGroupRows;

  const int64_t k = arguments.k;
  const auto weight_map = [&](int groups) {
    const Axis axes[] = {{64, 1, 64},
                         {int64_t{arguments.batches} * arguments.n, k, groups * kGroupRows},
                         {k / 64, 64, kStageHalves}};
    return bf16_map(arguments.weight, axes);
  };
  const Axis token_axes[] = {
      {64, 1, 64},
      {arguments.rows, arguments.x_row_stride, token_groups * kGroupRows},
      {k / 64, 64, kStageHalves},
      {arguments.batches, arguments.batches == 1 ? k : arguments.x_batch_stride, 1}};
  const Maps maps = {{weight_map(a.tile_groups), weight_map(std::max(a.tile_groups - 1, 1))},
                     bf16_map(arguments.x, token_axes)};
  launch(kernel,
         {.blocks = static_cast<unsigned>(arguments.batches * plan.clusters * plan.splits),
          .threads = L::kThreads + 32,
          .shared_bytes =
              static_cast<unsigned>(a.stages * plan.stage_bytes(shape) + plan.bytes_behind(shape)),
          .cluster = static_cast<unsigned>(plan.splits)},
         stream, maps, a);
}

template <int kColumns>
void launch_for(const FewRowsPlan& plan, const LinearArguments& arguments, cudaStream_t stream) {
  if (plan.warpgroups == 1) {
    launch_for<kColumns, 1>(plan, arguments, stream);
  } else {
    launch_for<kColumns, 2>(plan, arguments, stream);
  }
}

// How many clusters of blocks that leave no room for others run at a time.
int count_clusters(int blocks) {
  const auto kernel = few_rows_kernel<8, 1>;
  constexpr int kBytes = 200 * 1024;
  allow_shared_memory(kernel, kBytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(160);
  config.dynamicSmemBytes = kBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "counting clusters");
  return count;
}

}  // namespace

ClusterCounts count_clusters() {
  return {.of_1 = count_clusters(1),
          .of_2 = count_clusters(2),
          .of_4 = count_clusters(4),
          .of_8 = count_clusters(8)};
}

void linear_few_rows(const FewRowsPlan& plan, const LinearArguments& arguments,
                     cudaStream_t stream) {
  switch (plan.columns) {
    case 8:
      return launch_for<8>(plan, arguments, stream);
    case 16:
      return launch_for<16>(plan, arguments, stream);
    case 32:
      return launch_for<32>(plan, arguments, stream);
    default:
      return launch_for<64>(plan, arguments, stream);
  }
}

void linear_few_rows(const LinearArguments& arguments, cudaStream_t stream) {
  static const ClusterCounts counts = count_clusters();
  linear_few_rows(plan_few_rows({.rows = arguments.rows,
                                 .n = arguments.n,
                                 .k = arguments.k,
                                 .batches = arguments.batches},
                                counts, arguments.batch_invariant ? 1 : 8),
                  arguments, stream);
}

}  // namespace fathom::cuda
