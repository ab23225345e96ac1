// What: for each head, rows of x in bf16 times the head's e4m3 matrix with block-wise 128x128
// scales.
//
// Inputs/outputs: wide_absorb_cuda.h.
//
// Layout: a CTA has a head, all four blocks of [128, 128] of W_UV or two of W_UK, and every
// row_parts-th tile of 64 rows of x (tokens). Its weights stay in shared memory, in bf16 (e4m3 is
// exact in it), as boxes of [128 rows, 64 columns] with the 128-byte swizzle; beside them a ring
// buffer of boxes of [64 tokens, 64 columns] of x, and 128 columns of a tile's results. For W_UK
// two CTAs fit on an SM. Two consumer warpgroups take 64 rows of weights each; one more warp is the
// producer.
//
// Algorithm: the two warpgroups load the weights in e4m3 before the PDL wait, and upconvert them
// into shared memory while the first tiles are in flight. Then, tile after tile: transposed wgmmas
// as in scaled_absorb_cuda.cu, 128 of k at a time, times the block's scale in fp32; the next
// block's wgmmas run meanwhile. Results become rows of tokens in shared memory. W_UK's are stored
// by TMA; for W_UV sixteen lanes write 128 columns of a token, in bf16 or quantized.
//
// Determinism: a sum's k blocks are added in their order: a row's bits depend on the row alone.
//
// Limits: [n, k] of [512, 128] and [128, 512]. Bandwidth-bound by x and out.
//
// Measured: docs/kernels/scaled_absorb.md.
#include "device/cuda/launch.h"
#include "device/cuda/tensor_copy.cuh"
#include "device/cuda/tensor_map.h"
#include "device/cuda/wgmma.cuh"
#include "ops/scaled_linear/absorb_results_cuda.cuh"
#include "ops/scaled_linear/wide_absorb_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kTokens = ScaledAbsorbPlan::kWideTokens;  // per tile
constexpr int kBoxColumns = 64;                         // 128 bytes of bf16
constexpr int kWeightBoxBytes = kAbsorbSide * 128;
constexpr int kTokenBoxBytes = kTokens * 128;
constexpr int kBoxesABlock = kAbsorbSide / kBoxColumns;
constexpr int kWideThreads = kAbsorbThreads + kWarp;
constexpr int kProducts = kTokens / 2;                             // per thread
constexpr int kMeeting = 1, kBarriersMade = 2, kWeightsAsked = 3;  // named barriers
constexpr int kResults = kAbsorbResultBytes<kTokens>;

struct WideMaps {
  CUtensorMap x, out;
};

// kKBlocks: k in blocks of 128, 1 or 4.
template <int kKBlocks>
struct WideMemory {
  static constexpr int kBlocks = kKBlocks > 1 ? kKBlocks : kAbsorbBlocks / 2;  // of weights
  static constexpr int kWeightBoxes = kBlocks * kBoxesABlock;
  static constexpr int kStages = kKBlocks > 1 ? 10 : 4;
  static constexpr int kTogether = kKBlocks > 1 ? 1 : 2;  // CTAs on an SM

  alignas(1024) uint8_t weights[kWeightBoxes][kWeightBoxBytes];
  alignas(1024) uint8_t tokens[kStages][kTokenBoxBytes];
  alignas(1024) uint8_t results[kResults];
  uint64_t arrived[kStages], read[kStages];
};

__device__ void meet() { named_barrier(kMeeting, kAbsorbThreads); }

// Upconverts sixteen bytes of e4m3, exactly.
__device__ void widen_e4m3(uint4 from, uint4& low, uint4& high) {
  const auto two = [](uint32_t bytes, uint32_t& a, uint32_t& b) {
    const float4 v = widen_fp8<Fp8::kE4M3>(bytes);
    a = pack_bf16(v.x, v.y);
    b = pack_bf16(v.z, v.w);
  };
  two(from.x, low.x, low.y);
  two(from.y, low.z, low.w);
  two(from.z, high.x, high.y);
  two(from.w, high.z, high.w);
}

// A warp upconverts 8 rows of 64 columns at a time, rows and boxes by turns.
template <int kKBlocks>
class Weights {
 public:
  using Memory = WideMemory<kKBlocks>;

  __device__ explicit Weights(const uint8_t* weight)
      : warp_(static_cast<int>(threadIdx.x) / kWarp), lane_(static_cast<int>(threadIdx.x) % kWarp) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int box = box_of(i), row = row_of(i);
      // [128, 512], or rows of 128, two boxes each.
      const int at = kKBlocks > 1 ? row * (kKBlocks * kAbsorbSide) + box * kBoxColumns
                                  : (box / kBoxesABlock * kAbsorbSide + row) * kAbsorbSide +
                                        box % kBoxesABlock * kBoxColumns;
      values_[i] = load_weights_16(weight + at + lane_ % 4 * 16);
    }
  }

  __device__ void widen_into(Memory& memory) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = row_of(i), unit = lane_ % 4 * 2;
      uint8_t* const to = memory.weights[box_of(i)] + row * 128;
      uint4 low, high;
      widen_e4m3(values_[i], low, high);
      *reinterpret_cast<uint4*>(to + (unit ^ row % 8) * 16) = low;
      *reinterpret_cast<uint4*>(to + ((unit + 1) ^ row % 8) * 16) = high;
    }
  }

 private:
  static constexpr int kWarps = kAbsorbThreads / kWarp, kGroups = kAbsorbSide / 8;
  static constexpr int kPieces = Memory::kWeightBoxes * kGroups / kWarps;
  __device__ int box_of(int i) const { return (i * kWarps + warp_) / kGroups; }
  __device__ int row_of(int i) const { return (i * kWarps + warp_) % kGroups * 8 + lane_ / 4; }

  const int warp_, lane_;
  uint4 values_[kPieces];
};

// The producer: loads boxes of x in the order of their use.
template <int kKBlocks>
__device__ void copy_tokens(WideMemory<kKBlocks>& memory, const CUtensorMap& x,
                            const AbsorbArguments& a, int head, int row_part) {
  constexpr int kStages = WideMemory<kKBlocks>::kStages;
  int count = 0;
  for (int row = row_part * kTokens; row < a.rows; row += a.row_parts * kTokens) {
    for (int box = 0; box < kKBlocks * kBoxesABlock; ++box, ++count) {
      const int stage = count % kStages;
      if (count >= kStages) barrier_wait(&memory.read[stage], (count / kStages & 1) ^ 1);
      barrier_expect(&memory.arrived[stage], kTokenBoxBytes);
      copy_box(memory.tokens[stage], &x, &memory.arrived[stage], box * kBoxColumns, head, row);
    }
  }
}

template <int kKBlocks>
class WideTiles {
 public:
  using Memory = WideMemory<kKBlocks>;

  __device__ WideTiles(Memory& memory, const AbsorbArguments& a, const CUtensorMap& out, int head,
                       int first_block)
      : memory_(memory),
        a_(a),
        out_(out),
        head_(head),
        first_block_(first_block),
        scales_(load_absorb_scales(a.weight_scales, head)) {}

  // W_UV: four k blocks, one result.
  __device__ void run(int first_row) requires(kKBlocks > 1) {
    float sums[kProducts], products[2][kProducts];
    begin(products[0], 0, 0);
#pragma unroll
    for (int b = 0; b < kKBlocks; ++b) {
      if (b + 1 < kKBlocks) begin(products[(b + 1) % 2], b + 1, b + 1);
      end(products[b % 2], b);
      release(b);
      const float scale = absorb_scale(scales_, b);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        sums[i] = b == 0 ? products[0][i] * scale : fmaf(products[b % 2][i], scale, sums[i]);
      }
    }
    count_ += kKBlocks * kBoxesABlock;
    meet();  // the result before has been written
    stage_absorbed<kTokens>(sums, memory_.results);
    meet();
    write_absorbed<kTokens, true>(a_, memory_.results, first_row, head_, 0);
  }

  // W_UK: one k block, one result for each block of the weights.
  __device__ void run(int first_row) requires(kKBlocks == 1) {
    float products[2][kProducts];
    begin(products[0], 0, 0);
#pragma unroll
    for (int b = 0; b < Memory::kBlocks; ++b) {
      if (b + 1 < Memory::kBlocks) begin(products[(b + 1) % 2], b + 1, 0);
      end(products[b % 2], b);
      if (b + 1 == Memory::kBlocks) release(0);
      const float scale = absorb_scale(scales_, first_block_ + b);
#pragma unroll
      for (float& product : products[b % 2]) product *= scale;
      if (threadIdx.x == 0) wait_until_boxes_are_read();
      meet();
      stage_absorbed<kTokens>(products[b % 2], memory_.results);
      fence_async_proxy();
      meet();
      if (threadIdx.x == 0) copy_out(first_row, (first_block_ + b) * kAbsorbSide);
    }
    count_ += kBoxesABlock;
  }

 private:
  __device__ void copy_out(int first_row, int column) {
#pragma unroll
    for (int box = 0; box < kBoxesABlock; ++box) {
      store_box(&out_, shared_address(memory_.results) + box * kTokenBoxBytes,
                column + box * kBoxColumns, head_, first_row);
    }
    commit_boxes();
  }

  // Issues the wgmmas of block `block` of the weights with the tile's k_block-th 128 columns.
  __device__ void begin(float (&products)[kProducts], int block, int k_block) {
    const uint32_t weights =
        shared_address(memory_.weights[block * kBoxesABlock]) + warpgroup() * (64 * 128);
    uint32_t tokens[kBoxesABlock];
#pragma unroll
    for (int box = 0; box < kBoxesABlock; ++box) {
      const int count = count_ + k_block * kBoxesABlock + box, stage = count % Memory::kStages;
      barrier_wait(&memory_.arrived[stage], count / Memory::kStages & 1);
      tokens[box] = shared_address(memory_.tokens[stage]);
    }
    pin(products);
    mma_fence();
#pragma unroll
    for (int box = 0; box < kBoxesABlock; ++box) {
#pragma unroll
      for (int i = 0; i < kBoxColumns / 16; ++i) {
        mma_64(products, swizzled_matrix(weights + box * kWeightBoxBytes + i * 32, 1024),
               swizzled_matrix(tokens[box] + i * 32, 1024), box + i > 0);
      }
    }
    mma_commit();
  }

  // Waits for block b's wgmmas; the next block's have been issued.
  __device__ void end(float (&products)[kProducts], int b) {
    if (b + 1 < Memory::kBlocks) {
      mma_wait<1>();
    } else {
      mma_wait<0>();
    }
    pin(products);
  }

  __device__ void release(int k_block) {
    if (threadIdx.x % kWarp != 0) return;
#pragma unroll
    for (int box = 0; box < kBoxesABlock; ++box) {
      barrier_arrive(&memory_.read[(count_ + k_block * kBoxesABlock + box) % Memory::kStages]);
    }
  }

  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x) / 128; }

  Memory& memory_;
  const AbsorbArguments& a_;
  const CUtensorMap& out_;
  const int head_, first_block_;
  const float4 scales_;
  int count_ = 0;  // boxes of x before this tile's
};

template <int kKBlocks>
__global__ void __launch_bounds__(kWideThreads, WideMemory<kKBlocks>::kTogether)
    wide_absorb_kernel(const __grid_constant__ WideMaps maps, const uint8_t* weight,
                       const __grid_constant__ AbsorbArguments a) {
  using Memory = WideMemory<kKBlocks>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(bytes);
  const int index = static_cast<int>(blockIdx.x);
  const int row_part = index % a.row_parts, n_part = index / a.row_parts % a.n_parts;
  const int head = index / (a.row_parts * a.n_parts), first_block = n_part * Memory::kBlocks;
  let_next_launch_begin();
  if (threadIdx.x == kAbsorbThreads) {
    for (int stage = 0; stage < Memory::kStages; ++stage) {
      barrier_init(&memory.arrived[stage], 1);
      barrier_init(&memory.read[stage], kAbsorbThreads / kWarp);
    }
    fence_barrier_init();
  }
  if (threadIdx.x >= kAbsorbThreads) {
    __syncwarp();  // with the lane that initialised the barriers
    named_barrier_arrive(kBarriersMade, kWideThreads);
    // Weights are issued first: boxes of x issued before them cost a microsecond.
    named_barrier(kWeightsAsked, kWideThreads);
    if (threadIdx.x != kAbsorbThreads) return;
    wait_for_earlier_launches();
    copy_tokens(memory, maps.x, a, head, row_part);
    return;
  }
  constexpr int kBlockValues = kAbsorbSide * kAbsorbSide;
  const Weights<kKBlocks> weights(weight +
                                  (int64_t{head} * kAbsorbBlocks + first_block) * kBlockValues);
  WideTiles<kKBlocks> tiles(memory, a, maps.out, head, first_block);
  named_barrier_arrive(kWeightsAsked, kWideThreads);
  named_barrier(kBarriersMade, kWideThreads);
  weights.widen_into(memory);
  fence_async_proxy();
  meet();
  wait_for_earlier_launches();
  for (int row = row_part * kTokens; row < a.rows; row += a.row_parts * kTokens) tiles.run(row);
  if (threadIdx.x == 0) wait_until_boxes_are_read();
}

template <int kKBlocks>
void launch_wide(const WideMaps& maps, const uint8_t* weight, const AbsorbArguments& a, int heads,
                 GpuStream stream) {
  const auto kernel = wide_absorb_kernel<kKBlocks>;
  constexpr int kBytes = sizeof(WideMemory<kKBlocks>);
  stream.device().allow_shared_memory(kernel, kBytes);
  launch(kernel,
         {.blocks = static_cast<unsigned>(heads * a.n_parts * a.row_parts),
          .threads = kWideThreads,
          .shared_bytes = kBytes},
         stream, maps, weight, a);
}

// Tensor map of [rows, heads, columns]: boxes of one head.
CUtensorMap head_map(const void* memory, const ScaledAbsorbArguments& a, int64_t columns,
                     int64_t row_stride, int64_t head_stride) {
  const Axis axes[] = {{.size = columns, .stride = 1, .box = kBoxColumns},
                       {.size = a.heads, .stride = head_stride, .box = 1},
                       {.size = a.rows, .stride = row_stride, .box = kTokens}};
  return bf16_map(memory, axes);
}

}  // namespace

void wide_absorb(const ScaledAbsorbPlan& plan, const ScaledAbsorbArguments& a, GpuStream stream) {
  const AbsorbArguments arguments = absorb_arguments(plan, a);
  const auto* const weight = static_cast<const uint8_t*>(a.weight);
  WideMaps maps = {.x = head_map(a.x, a, a.k, a.x_row_stride, a.x_head_stride)};
  if (a.k == kAbsorbedHead) {
    maps.out = head_map(a.out, a, a.n, a.out_row_stride, a.out_head_stride);
    launch_wide<1>(maps, weight, arguments, a.heads, stream);
  } else {
    launch_wide<4>(maps, weight, arguments, a.heads, stream);
  }
}

}  // namespace fathom::cuda
