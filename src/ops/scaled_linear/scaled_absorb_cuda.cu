// What: for each head, quantizes rows of x to e4m3 with scales 1x128 and multiplies them with the
// head's e4m3 matrix with block-wise 128x128 scales.
//
// Inputs/outputs: scaled_absorb_cuda.h. Work of each CTA: scaled_absorb_plan.h.
//
// Layout: a head's weights, 64 KB at most, stay in shared memory, as up to four blocks of [128,
// 128] with the 128-byte swizzle; a tile of up to 64 rows of x (tokens) beside them. Two warpgroups
// take 64 rows of weights each. Two CTAs fit on an SM.
//
// Algorithm: transposed, so that few tokens waste nothing: rows of weights are M of the wgmma,
// tokens its N. Weights are loaded before the PDL wait. Then, tile after tile: sixteen lanes
// quantize 128 columns of a token into shared memory; wgmma results, times scales, become rows of
// tokens in shared memory; sixteen lanes write 128 columns of a token, in bf16 or quantized again.
//
// Determinism: a sum's k blocks are added in their order, whatever the tile: a row's bits depend on
// the row alone.
//
// Limits: n and k of 128 and 512. Bandwidth-bound: few rows by the weights (2.0 us for 128 heads at
// 4.3 TB/s), many by x and out, which are bf16.
//
// Measured: docs/kernels/scaled_absorb.md.
#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/tensor_map.h"
#include "device/cuda/wgmma.cuh"
#include "ops/scaled_linear/absorb_results_cuda.cuh"
#include "ops/scaled_linear/quantize_block_cuda.cuh"
#include "ops/scaled_linear/scaled_absorb_cuda.h"
#include "ops/scaled_linear/scaled_absorb_plan.h"

namespace fathom::cuda {
namespace {

constexpr int kWeightBlockBytes = kAbsorbSide * kAbsorbSide;
constexpr int kTerms = 2;               // e4m3 terms of an element of x
constexpr float kTermRatio = 1 / 16.f;  // second term's scale: e4m3 rounds off at most 2^-4

// Splits x times inverse into two e4m3 terms: the second is the first's rounding error, times 16.
__device__ void pack_terms(uint4 x, float inverse, uint2& first, uint2& second) {
  const Eight wide = widen(x);
  const auto four = [&](int i, uint32_t& packed, uint32_t& rest) {
    const float y[4] = {wide.v[i] * inverse, wide.v[i + 1] * inverse, wide.v[i + 2] * inverse,
                        wide.v[i + 3] * inverse};
    packed = pack_fp8<Fp8::kE4M3>(y[0], y[1], y[2], y[3]);
    const float4 has = widen_fp8<Fp8::kE4M3>(packed);
    constexpr float kUp = 1 / kTermRatio;
    rest = pack_fp8<Fp8::kE4M3>((y[0] - has.x) * kUp, (y[1] - has.y) * kUp, (y[2] - has.z) * kUp,
                                (y[3] - has.w) * kUp);
  };
  four(0, first.x, second.x);
  four(4, first.y, second.y);
}

// kKBlocks: k in blocks of 128, 1 or 4; n has 4 or 1.
template <int kTokens, int kKBlocks>
struct AbsorbMemory {
  static constexpr bool kTogether = kTokens < 32;  // all blocks' wgmmas are in flight together
  // Staged results of a tile, 128 columns each: as many as are in flight together.
  static constexpr int kStaged = kKBlocks > 1 ? 1 : kTogether ? kAbsorbBlocks : 2;
  // Results reuse the tile's tokens: the only result completes after the last read of them.
  static constexpr bool kInPlace = kKBlocks > 1;
  static constexpr int kTermBytes = kTokens * kAbsorbSide;  // of a k block
  static constexpr int kTokenBytes = kKBlocks * kTerms * kTermBytes;

  alignas(1024) uint8_t weights[kAbsorbBlocks][kWeightBlockBytes];
  alignas(1024) uint8_t
      tokens_and_results[kTokenBytes + (kInPlace ? 0 : kStaged * kAbsorbResultBytes<kTokens>)];
  __device__ uint8_t* tokens(int block) {
    return tokens_and_results + block * (kTerms * kTermBytes);
  }
  __device__ uint8_t* results(int slot) {
    return tokens_and_results + (kInPlace ? 0 : kTokenBytes) + slot * kAbsorbResultBytes<kTokens>;
  }
  float scales[kKBlocks][kTokens];
  uint64_t arrived[kAbsorbBlocks];
};

template <int kTokens, int kKBlocks>
class AbsorbTile {
 public:
  using Memory = AbsorbMemory<kTokens, kKBlocks>;

  __device__ AbsorbTile(Memory& memory, const AbsorbArguments& a, int head, int first_block)
      : memory_(memory),
        a_(a),
        head_(head),
        first_block_(first_block),
        weight_scales_(load_absorb_scales(a.weight_scales, head)) {}

  // Quantizes x's rows from first_row on into two terms of e4m3. Each lane computes the scale of
  // one of the blocks of 128 that sixteen lanes hold: a division takes as long as all the rest.
  __device__ void quantize(int first_row) {
    constexpr int kTogether = kAbsorbThreads / kBlockLanes;  // blocks of 128
    constexpr int kEach = (kTokens * kKBlocks + kTogether - 1) / kTogether;
    constexpr int kStep = kTogether / kKBlocks;  // tokens between a thread's consecutive ones
    static_assert(kEach <= kBlockLanes);
    const int lane = static_cast<int>(threadIdx.x) % kBlockLanes;
    const int block = static_cast<int>(threadIdx.x) / kBlockLanes % kKBlocks;
    const int first = static_cast<int>(threadIdx.x) / (kBlockLanes * kKBlocks);  // first token
    const __nv_bfloat16* from = a_.x + (first_row + first) * a_.x_row_stride +
                                head_ * a_.x_head_stride + block * kAbsorbSide + lane * 8;
    uint4 x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i, from += kStep * a_.x_row_stride) {
      const int token = first + i * kStep;
      x[i] = make_uint4(0, 0, 0, 0);
      if (token < kTokens && first_row + token < a_.rows) {
        x[i] = *reinterpret_cast<const uint4*>(from);
      }
    }
    float magnitude = 1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float of_block = block_magnitude(x[i]);
      if (lane % kEach == i) magnitude = of_block;
    }
    const BlockScale scale = block_scale(magnitude, ScaleForm::kF32);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float inverse = __shfl_sync(~0u, scale.inverse, i, kBlockLanes);
      const int token = first + i * kStep;
      if (token >= kTokens) continue;
      uint8_t* const to = memory_.tokens(block) + token * kAbsorbSide +
                          ((lane / 2) ^ (token % 8)) * 16 + lane % 2 * 8;
      uint2 first_term, second_term;
      pack_terms(x[i], inverse, first_term, second_term);
      *reinterpret_cast<uint2*>(to) = first_term;
      *reinterpret_cast<uint2*>(to + Memory::kTermBytes) = second_term;
      if (lane == i) memory_.scales[block][token] = scale.scale;
    }
    fence_async_proxy();
  }

  // Issues the wgmmas of block `block` of the weights with its 128 columns of the tokens.
  __device__ void begin(float (&products)[kTokens], int block) {
    barrier_wait(&memory_.arrived[block], 0);
    const uint32_t weights =
        shared_address(memory_.weights[block]) + warpgroup() * (64 * kAbsorbSide);
    const uint32_t tokens = shared_address(memory_.tokens(kKBlocks > 1 ? block : 0));
    mma_fence();
#pragma unroll
    for (int i = 0; i < kAbsorbSide / 32; ++i) {
      mma_64_e4m3(products, swizzled_matrix(weights + i * 32, 1024),
                  swizzled_matrix(tokens + i * 32, 1024), i > 0);
    }
    mma_commit();
  }

  // sums (+)= products times the scales of block `block`.
  template <bool kFirst>
  __device__ void scale(float (&sums)[kTokens / 2], const float (&products)[kTokens],
                        int block) const {
    const float* const of_tokens = memory_.scales[kKBlocks > 1 ? block : 0] + lane() % 4 * 2;
    const float of_weights = absorb_scale(weight_scales_, first_block_ + block);
#pragma unroll
    for (int g = 0; g < kTokens / 8; ++g) {
      const float2 s = *reinterpret_cast<const float2*>(of_tokens + g * 8);
      const float scales[2] = {s.x * of_weights, s.y * of_weights};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 4 * g + j;
        const float product = fmaf(products[at + kTokens / 2], kTermRatio, products[at]);
        sums[at] = kFirst ? product * scales[j % 2] : fmaf(product, scales[j % 2], sums[at]);
      }
    }
  }

  // The caller synchronises all threads between this and write().
  __device__ void stage(const float (&sums)[kTokens / 2], int slot) const {
    stage_absorbed<kTokens>(sums, memory_.results(slot));
  }
  __device__ void write(int first_row, int block, int slot) const {
    const int column = kKBlocks > 1 ? 0 : (first_block_ + block) * kAbsorbSide;
    write_absorbed<kTokens, (kKBlocks > 1)>(a_, memory_.results(slot), first_row, head_, column);
  }

 private:
  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x) / 128; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  Memory& memory_;
  const AbsorbArguments& a_;
  const int head_, first_block_;
  const float4 weight_scales_;
};

// W_UK: one k block; each block of weights gives a result of 128 columns.
template <int kTokens>
__device__ void absorb_tile(AbsorbTile<kTokens, 1>& tile, int first_row, int blocks) {
  float sums[kTokens / 2];
  if constexpr (AbsorbMemory<kTokens, 1>::kTogether) {
    float products[kAbsorbBlocks][kTokens];
#pragma unroll
    for (int b = 0; b < kAbsorbBlocks; ++b) {
      if (b < blocks) tile.begin(products[b], b);
    }
    mma_wait();
#pragma unroll
    for (int b = 0; b < kAbsorbBlocks; ++b) {
      pin(products[b]);
      if (b >= blocks) continue;
      tile.template scale<true>(sums, products[b], b);
      tile.stage(sums, b);
    }
    __syncthreads();
    for (int b = 0; b < blocks; ++b) tile.write(first_row, b, b);
  } else {
    // One block after the other; while results are written the next are computed into the other
    // slot.
    for (int b = 0; b < blocks; ++b) {
      float products[kTokens];
      tile.begin(products, b);
      mma_wait();
      pin(products);
      tile.template scale<true>(sums, products, b);
      tile.stage(sums, b % 2);
      __syncthreads();
      tile.write(first_row, b, b % 2);
    }
  }
}

// W_UV: all blocks of weights contribute to one result.
template <int kTokens>
__device__ void absorb_tile(AbsorbTile<kTokens, 4>& tile, int first_row, int) {
  float sums[kTokens / 2];
  if constexpr (AbsorbMemory<kTokens, 4>::kTogether) {
    float products[kAbsorbBlocks][kTokens];
#pragma unroll
    for (int b = 0; b < kAbsorbBlocks; ++b) tile.begin(products[b], b);
    mma_wait();
#pragma unroll
    for (int b = 0; b < kAbsorbBlocks; ++b) {
      pin(products[b]);
      if (b == 0) {
        tile.template scale<true>(sums, products[b], b);
      } else {
        tile.template scale<false>(sums, products[b], b);
      }
    }
  } else {
#pragma unroll
    for (int b = 0; b < kAbsorbBlocks; ++b) {
      float products[kTokens];
      tile.begin(products, b);
      mma_wait();
      pin(products);
      if (b == 0) {
        tile.template scale<true>(sums, products, b);
      } else {
        tile.template scale<false>(sums, products, b);
      }
    }
  }
  __syncthreads();
  tile.stage(sums, 0);
  __syncthreads();
  tile.write(first_row, 0, 0);
  __syncthreads();
}

template <int kTokens, int kKBlocks>
__global__ void __launch_bounds__(kAbsorbThreads, 2)
    scaled_absorb_kernel(const __grid_constant__ CUtensorMap weights,
                         const __grid_constant__ AbsorbArguments a) {
  using Memory = AbsorbMemory<kTokens, kKBlocks>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(bytes);
  const int index = static_cast<int>(blockIdx.x);
  const int row_part = index % a.row_parts, n_part = index / a.row_parts % a.n_parts;
  const int head = index / (a.row_parts * a.n_parts);
  const int blocks = kAbsorbBlocks / a.n_parts, first_block = n_part * blocks;
  let_next_launch_begin();
  if (threadIdx.x == 0) {
    for (int b = 0; b < blocks; ++b) barrier_init(&memory.arrived[b], 1);
    fence_barrier_init();
    const uint64_t policy = a.row_parts == 1 ? read_once_policy() : keep_policy();
    for (int b = 0; b < blocks; ++b) {
      barrier_expect(&memory.arrived[b], kWeightBlockBytes);
      const int block = first_block + b;
      copy_box_under(policy, memory.weights[b], &weights, &memory.arrived[b],
                     kKBlocks > 1 ? block * kAbsorbSide : 0, kKBlocks > 1 ? 0 : block * kAbsorbSide,
                     head);
    }
  }
  AbsorbTile<kTokens, kKBlocks> tile(memory, a, head, first_block);
  wait_for_earlier_launches();
  for (int row = row_part * kTokens; row < a.rows; row += a.row_parts * kTokens) {
    tile.quantize(row);
    __syncthreads();
    absorb_tile(tile, row, blocks);
  }
}

template <int kTokens, int kKBlocks>
void launch_absorb(const CUtensorMap& weights, const AbsorbArguments& a, int heads,
                   GpuStream stream) {
  const auto kernel = scaled_absorb_kernel<kTokens, kKBlocks>;
  constexpr int kBytes = sizeof(AbsorbMemory<kTokens, kKBlocks>);
  stream.device().allow_shared_memory(kernel, kBytes);
  launch(kernel,
         {.blocks = static_cast<unsigned>(heads * a.n_parts * a.row_parts),
          .threads = kAbsorbThreads,
          .shared_bytes = kBytes},
         stream, weights, a);
}

template <int kKBlocks>
void launch_absorb_tile(int tokens, const CUtensorMap& weights, const AbsorbArguments& a, int heads,
                        GpuStream stream) {
  switch (tokens) {
    case 8:
      return launch_absorb<8, kKBlocks>(weights, a, heads, stream);
    case 16:
      return launch_absorb<16, kKBlocks>(weights, a, heads, stream);
    default:
      return launch_absorb<32, kKBlocks>(weights, a, heads, stream);
  }
}

}  // namespace

void scaled_absorb(const ScaledAbsorbPlan& plan, const ScaledAbsorbArguments& a, GpuStream stream) {
  const bool into_latent = a.n == kAbsorbedLatent && a.k == kAbsorbedHead;
  FATHOM_CHECK(into_latent || (a.n == kAbsorbedHead && a.k == kAbsorbedLatent),
               "absorption by [{}, {}]", a.n, a.k);
  FATHOM_CHECK(a.x_row_stride % 8 == 0 && a.x_head_stride % 8 == 0 && a.out_row_stride % 8 == 0 &&
                   a.out_head_stride % 8 == 0,
               "strides {}, {} of x and {}, {} of out are no multiples of 8", a.x_row_stride,
               a.x_head_stride, a.out_row_stride, a.out_head_stride);
  FATHOM_CHECK(
      a.quantized.values == nullptr ||
          (!into_latent && a.quantized.values_row_stride % 16 == 0 &&
           a.quantized.scales_block_stride >= a.rows && a.quantized.scales_block_stride % 4 == 0),
      "results of [{}, {}] in e4m3 with strides {} and {}", a.n, a.k, a.quantized.values_row_stride,
      a.quantized.scales_block_stride);
  if (a.rows == 0 || a.heads == 0) return;
  const Axis axes[] = {{.size = a.k, .stride = 1, .box = kAbsorbSide},
                       {.size = a.n, .stride = a.k, .box = kAbsorbSide},
                       {.size = a.heads, .stride = int64_t{a.n} * a.k, .box = 1}};
  const CUtensorMap weights = e4m3_map(a.weight, axes);
  const AbsorbArguments arguments = absorb_arguments(plan, a);
  if (into_latent) {
    launch_absorb_tile<1>(plan.tokens, weights, arguments, a.heads, stream);
  } else {
    launch_absorb_tile<4>(plan.tokens, weights, arguments, a.heads, stream);
  }
}

void scaled_absorb(const ScaledAbsorbArguments& a, GpuStream stream) {
  const ScaledAbsorbShape shape = {
      .rows = a.rows, .heads = a.heads, .splits_n = a.n == kAbsorbedLatent};
  scaled_absorb(plan_scaled_absorb(shape, stream.device().num_multiprocessors()), a, stream);
}

}  // namespace fathom::cuda
