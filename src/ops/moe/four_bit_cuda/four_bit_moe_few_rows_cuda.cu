// What: out[t] = addend[t] + sum over t's experts e of weight * mlp_e(x[t]) with four-bit experts
// of few tokens each, bandwidth-bound by the weights of the experts that have tokens. Three
// launches: gate and up, down, combine.
//
// Inputs/outputs: four_bit_moe_cuda.h. Weights: plans/four_bit_tiles.h.
//
// Layout: one CTA of 16 warps per SM. Each warp has a ring of blocks of its own in shared memory
// (1,152 bytes: 32 rows x 64 columns with their scales, contiguous in memory), filled by bulk
// copies of up to kCopyBlocks that one of its lanes issues; no warp waits for another's loads.
// Beside the rings, two buffers for sums [16 warps][32 rows][8 tokens] in fp32, and the list of
// experts with tokens.
//
// Algorithm: a unit of work is 32 rows of an expert's weights by up to 8 of its tokens. CTAs share
// all units evenly, in the order of expert, rows, tokens: the second eight tokens of an expert find
// the weights in the L2. Within a CTA a group of warps (FourBitSlices) takes a unit; its warps
// share the columns. A warp keeps the tokens' x of its columns in registers, loaded when expert or
// tokens change, and converts codes to bf16 on the way from shared memory: mma.sync of 16 rows x 16
// columns x 8 tokens. A group of 32 columns is two instructions into a zero sum, which is
// multiplied by the group's scale into the unit's sum. The group's warps then add up their sums
// through shared memory, in order. Each CTA finds the experts with tokens, and each warp its
// tokens, by itself.
//
// Determinism: a sum is formed in a fixed order that depends on the shape alone, so a row's bits do
// not depend on the other rows.
//
// Limits: 512 experts, 4,096 pairs, 7,168 columns.
//
// Source: weights in the order of the tensor cores' operands and the conversion through bf16's
// mantissa as in Marlin (Frantar et al., 2024).
//
// Measured: docs/kernels/four_bits.md.
#include <cuda_bf16.h>

#include "base/check.h"
#include "base/math_constants.h"
#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/launch.h"
#include "device/cuda/planted_fault.h"
#include "device/cuda/rows.cuh"
#include "device/cuda/warp_mma.cuh"
#include "ops/moe/experts_cuda/four_bit_codes_cuda.cuh"
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"
#include "ops/moe/plans/four_bit_tiles.h"

namespace fathom::cuda {
namespace {

constexpr int kWarps = kFourBitWarps, kThreads = 32 * kWarps;
constexpr int kCopyBlocks = 4;  // of a bulk copy
constexpr int kSlots = 2;       // of a ring, for a copy each: 144 KB a CTA in flight
constexpr int kTokens = 8;      // of a unit
constexpr int kSums = kFourBitPanelRows * kTokens;

struct Gemm {
  const uint8_t* weights;     // [experts][panels][blocks] blocks
  const __nv_bfloat16* x;     // rows of `blocks` * 64 columns
  const int32_t* expert_ids;  // [pairs]
  void* out;  // gate and up: [pairs, panels * 16] bf16; down: [pairs, panels * 32] f32
  int pairs, num_experts;
  int pairs_a_row;  // of x: its row of a pair is pair / pairs_a_row
  int panels, blocks;
  int slices;
  FATHOM_PLANTED_FAULT
};

struct Memory {
  alignas(128) uint8_t ring[kWarps][kSlots][kCopyBlocks * kFourBitBlockBytes];
  float sums[2][kWarps][kSums];
  uint64_t arrived[kWarps][kSlots];
  int32_t counts[kMostMoeExperts];  // tokens of an expert
  int32_t warp_totals[kWarps];
  int16_t experts[kMostMoeExperts];    // those with tokens, in order
  int16_t tiles[kMostMoeExperts + 1];  // of eight tokens, of all of `experts` before
  int16_t listed[kWarps][kTokens];     // the pairs of the warp's tile; -1: none
  int16_t ids[kFourBitFewPairs];       // of the pairs
};
static_assert(sizeof(Memory) <= 227 * 1024);
static_assert(kMostMoeExperts == kThreads);  // a thread an expert

// ---- the experts with tokens: all threads. Returns their number.

__device__ int list_experts(Memory& memory, const Gemm& a) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  memory.counts[thread] = 0;
  __syncthreads();
  for (int i = thread; i < a.pairs; i += kThreads) {
    const int id = a.expert_ids[i];
    memory.ids[i] = static_cast<int16_t>(id);
    if (id >= 0) atomicAdd(&memory.counts[id], 1);
  }
  __syncthreads();
  const int tiles = (memory.counts[thread] + kTokens - 1) / kTokens;
  // Running sums of experts, in the upper half, and tiles.
  const int own = tiles > 0 ? (1 << 16) + tiles : 0;
  int sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == 31) memory.warp_totals[warp] = sum;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) sum += total;
    total += memory.warp_totals[i];
  }
  if (tiles > 0) {
    const int at = (sum >> 16) - 1;
    memory.experts[at] = static_cast<int16_t>(thread);
    memory.tiles[at + 1] = static_cast<int16_t>(sum & 0xFFFF);
  }
  if (thread == 0) memory.tiles[0] = 0;
  __syncthreads();
  return total >> 16;
}

// ---- units in the order in which a group takes them

class Units {
 public:
  __device__ Units(const Memory& memory, const Gemm& a, int num_experts, int group, int groups)
      : memory_(memory), panels_(a.panels), step_(groups) {
    const int64_t all = static_cast<int64_t>(memory.tiles[num_experts]) * a.panels;
    end_ = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
    unit_ = static_cast<int>(all * blockIdx.x / gridDim.x) + group;
    find();
  }

  __device__ bool is_done() const { return unit_ >= end_; }
  __device__ void next() {
    unit_ += step_;
    find();
  }
  __device__ int expert() const { return memory_.experts[at_]; }
  __device__ int panel() const { return panel_; }
  __device__ int tile() const { return tile_; }  // of eight tokens of the expert

 private:
  __device__ void find() {
    if (is_done()) return;
    while (unit_ >= memory_.tiles[at_ + 1] * panels_) ++at_;
    const int within = unit_ - memory_.tiles[at_] * panels_;
    const int tiles = memory_.tiles[at_ + 1] - memory_.tiles[at_];
    panel_ = tiles == 1 ? within : within / tiles;
    tile_ = within - panel_ * tiles;
  }

  const Memory& memory_;
  const int panels_, step_;
  int unit_, end_, at_ = 0, panel_ = 0, tile_ = 0;
};

// ---- a warp's share of the columns of its group's units

struct Share {
  int group, groups, slice, first_block, blocks;

  __device__ explicit Share(const Gemm& a) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    groups = kWarps / a.slices;
    group = warp / a.slices;
    slice = warp % a.slices;
    first_block = a.blocks * slice / a.slices;
    blocks = a.blocks * (slice + 1) / a.slices - first_block;
  }
};

// Issues the warp's loads, block after block.
class Loads {
 public:
  __device__ Loads(Memory& memory, const Gemm& a, const Share& share, const Units& units)
      : a_(a), share_(share), units_(units), warp_(static_cast<int>(threadIdx.x) / 32) {
    ring_ = memory.ring[warp_][0];
    arrived_ = memory.arrived[warp_];
    left_ = share.blocks;
    if (left_ > 0) begin_unit();
  }

  // The next blocks' load into a slot that nobody reads, if there is one more.
  __device__ void issue(int slot) {
    if (left_ == 0) return;
    const int blocks = min(left_, kCopyBlocks), bytes = blocks * kFourBitBlockBytes;
    if (elect_one()) {
      barrier_expect(&arrived_[slot], bytes);
      copy_bytes_under(policy_, ring_ + slot * kCopyBlocks * kFourBitBlockBytes, from_, bytes,
                       &arrived_[slot]);
    }
    from_ += bytes;
    left_ -= blocks;
    if (left_ > 0) return;
    units_.next();
    left_ = share_.blocks;
    begin_unit();
  }

 private:
  __device__ void begin_unit() {
    if (units_.is_done()) {
      left_ = 0;
      return;
    }
    const int64_t panel = static_cast<int64_t>(units_.expert()) * a_.panels + units_.panel();
    from_ = a_.weights + (panel * a_.blocks + share_.first_block) * kFourBitBlockBytes;
  }

  const Gemm& a_;
  const Share& share_;
  Units units_;
  const int warp_;
  uint8_t* ring_;
  uint64_t* arrived_;
  const uint8_t* from_ = nullptr;
  const uint64_t policy_ = read_once_policy();
  int left_;  // of the unit; 0: no more units
};

// ---- tokens

// Lists the pairs of an expert's tile in the warp's own list; returns that of the lane's column.
__device__ int list_tokens(Memory& memory, const Gemm& a, int expert, int tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int16_t* const listed = memory.listed[warp];
  __syncwarp();
  if (lane < kTokens) listed[lane] = -1;
  __syncwarp();
  if (FATHOM_PLANTED(a, kRepeatedTokens)) tile = 0;
  int place = -kTokens * tile;  // of the next of the expert's pairs
  for (int first = 0; first < a.pairs && place < kTokens; first += 32) {
    const int pair = first + lane;
    const bool is_its = pair < a.pairs && memory.ids[pair] == expert;
    const uint32_t all = __ballot_sync(~0u, is_its);
    const int at = place + __popc(all & ((1u << lane) - 1));
    if (is_its && at >= 0 && at < kTokens) listed[at] = static_cast<int16_t>(pair);
    place += __popc(all);
  }
  __syncwarp();
  return listed[lane / 4];
}

using RowsOfX = uint32_t[kFourBitMostBlocks][4][2];

// Transposes four values of each of four lanes: lane q ends with value q of lanes 0 to 3.
__device__ void transpose_in_quad(uint32_t (&v)[4], int q) {
  const auto exchange = [](uint32_t& low, uint32_t& high, bool is_upper, int distance) {
    const uint32_t other = __shfl_xor_sync(~0u, is_upper ? low : high, distance);
    low = is_upper ? other : low;
    high = is_upper ? high : other;
  };
  exchange(v[0], v[1], (q & 1) != 0, 1);
  exchange(v[2], v[3], (q & 1) != 0, 1);
  exchange(v[0], v[2], (q & 2) != 0, 2);
  exchange(v[1], v[3], (q & 2) != 0, 2);
}

// The right operands of the warp's columns: zeros where there is no token. A lane loads 8
// neighbouring columns of 32 and gives its quad's other lanes theirs: loads of the two that it
// wants itself would touch four times as many lines.
__device__ void load_rows(const Gemm& a, const Share& share, int pair, RowsOfX& x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = pair < 0 ? 0 : pair / a.pairs_a_row;
  const auto* from = reinterpret_cast<const uint4*>(
      a.x + (row * a.blocks + share.first_block) * kFourBitBlockColumns + lane % 4 * 8);
#pragma unroll
  for (int block = 0; block < kFourBitMostBlocks; ++block) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (pair >= 0 && block < share.blocks) v = from[block * 8 + group * 4];
      x[block][2 * group][0] = v.x, x[block][2 * group][1] = v.y;
      x[block][2 * group + 1][0] = v.z, x[block][2 * group + 1][1] = v.w;
    }
  }
#pragma unroll
  for (int block = 0; block < kFourBitMostBlocks; ++block) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      auto& pairs = x[block];
      uint32_t v[4] = {pairs[2 * group][0], pairs[2 * group][1], pairs[2 * group + 1][0],
                       pairs[2 * group + 1][1]};
      transpose_in_quad(v, lane % 4);
      pairs[2 * group][0] = v[0], pairs[2 * group][1] = v[1];
      pairs[2 * group + 1][0] = v[2], pairs[2 * group + 1][1] = v[3];
    }
  }
}

// ---- products

// total += the block's codes * x * scales. `block` is in shared memory, `x` of its 64 columns.
template <FourBitCode kCode>
__device__ void multiply_block(const uint8_t* block, int lane, const uint32_t (&x)[4][2],
                               float (&total)[2][4], [[maybe_unused]] const Gemm& a) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint8_t* const at = block + tile * kFourBitTileBytes;
    const uint4 codes = *reinterpret_cast<const uint4*>(at + lane * 16);
    const uint2 scales = *reinterpret_cast<const uint2*>(at + 512 + lane / 4 * 8);
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int s = 2 * group; s < 2 * group + 2; ++s) {
        uint32_t fragment[4];
        four_bit_fragment<kCode>(words[s], fragment);
        warp_mma_16x8x16(sum, fragment, x[s]);
      }
      const bool is_first = group == 0 && !FATHOM_PLANTED(a, kSwappedScale);
      const float upper = is_first ? low_bf16(scales.x) : high_bf16(scales.x);
      const float lower = is_first ? low_bf16(scales.y) : high_bf16(scales.y);
      total[tile][0] += sum[0] * upper, total[tile][1] += sum[1] * upper;
      total[tile][2] += sum[2] * lower, total[tile][3] += sum[3] * lower;
    }
  }
}

// Adds up the sums of the group's warps and writes the unit's results.
template <bool kGated>
class Results {
 public:
  __device__ Results(Memory& memory, const Gemm& a, const Share& share)
      : memory_(memory),
        a_(a),
        share_(share),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void write(const Units& units, const float (&total)[2][4]) {
    float* const own = memory_.sums[turn_][warp_];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      auto* const to = reinterpret_cast<float2*>(own + tile * 128) + lane_;
      to[0] = make_float2(total[tile][0], total[tile][1]);
      to[32] = make_float2(total[tile][2], total[tile][3]);
    }
    // One barrier a unit: a buffer is written again only after the next unit's.
    if (a_.slices == 1) {
      __syncwarp();
    } else {
      named_barrier(1 + share_.group, 32 * a_.slices);
    }
    const float* const sums = memory_.sums[turn_][warp_ - share_.slice];
    turn_ ^= 1;
    for (int i = share_.slice * 32 + lane_; i < (kGated ? kSums / 2 : kSums); i += 32 * a_.slices) {
      const int pair = memory_.listed[warp_][i % kTokens];
      if (pair < 0) continue;
      if constexpr (kGated) {
        const int at = i / 64 * 128 + i % 64;
        float gate = 0, up = 0;
        for (int slice = 0; slice < a_.slices; ++slice) {
          gate += sums[slice * kSums + at];
          up += sums[slice * kSums + at + 64];
        }
        const float activation = gate / (1 + exp2_fast(-gate * kLog2E)) * up;
        static_cast<__nv_bfloat16*>(a_.out)[static_cast<int64_t>(pair) * a_.panels * 16 +
                                            units.panel() * 16 + i / kTokens] =
            __float2bfloat16(activation);
      } else {
        float sum = 0;
        for (int slice = 0; slice < a_.slices; ++slice) sum += sums[slice * kSums + i];
        static_cast<float*>(a_.out)[static_cast<int64_t>(pair) * a_.panels * 32 +
                                    units.panel() * 32 + i / kTokens] = sum;
      }
    }
  }

 private:
  Memory& memory_;
  const Gemm& a_;
  const Share& share_;
  const int warp_, lane_;
  int turn_ = 0;
};

// ---- gate and up, or down

template <FourBitCode kCode, bool kGated>
__global__ void __launch_bounds__(kThreads, 1) multiply_kernel(const __grid_constant__ Gemm a) {
  extern __shared__ __align__(128) uint8_t bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(bytes);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < kSlots) {
    barrier_init(&memory.arrived[warp][lane], 1);
    fence_barrier_init();
  }
  if constexpr (kGated) {
    // Down's CTAs begin when all of these have passed here, and may so read the experts' ids
    // before they wait.
    wait_for_earlier_launches();
    let_next_launch_begin();
  }
  const int num_experts = list_experts(memory, a);
  const Share share(a);
  Units units(memory, a, num_experts, share.group, share.groups);
  Loads loads(memory, a, share, units);
  for (int slot = 0; slot < kSlots; ++slot) loads.issue(slot);
  if constexpr (!kGated) {
    wait_for_earlier_launches();
    let_next_launch_begin();
  }
  Results<kGated> results(memory, a, share);
  RowsOfX x;
  int expert = -1, tile = -1, slot = 0, parity = 0;
  for (; !units.is_done(); units.next()) {
    if (units.expert() != expert || units.tile() != tile) {
      expert = units.expert();
      tile = units.tile();
      load_rows(a, share, list_tokens(memory, a, expert, tile), x);
    }
    float total[2][4] = {};
#pragma unroll
    for (int block = 0; block < kFourBitMostBlocks; ++block) {
      if (block >= share.blocks) break;
      const int within = block % kCopyBlocks;  // the slot
      if (within == 0) barrier_wait(&memory.arrived[warp][slot], parity);
      multiply_block<kCode>(memory.ring[warp][slot] + within * kFourBitBlockBytes, lane, x[block],
                            total, a);
      if (within + 1 < kCopyBlocks && block + 1 < share.blocks) continue;
      __syncwarp();
      loads.issue(slot);
      if (++slot == kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
    results.write(units, total);
  }
}

// ---- combine

struct Combine {
  const float* results;  // [rows, experts_per_token, hidden]
  const int32_t* expert_ids;
  const float* expert_weights;
  const __nv_bfloat16* addend;
  void* out;
  int rows, hidden, experts_per_token;
  bool f32;
};

constexpr int kCombineThreads = 256;
constexpr int kCombineLoads = 8;  // of a thread in flight

// A thread four columns of a row; experts in the order of the token's list, the loads of several
// in flight.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const Combine a) {
  wait_for_earlier_launches();
  let_next_launch_begin();
  const int row = static_cast<int>(blockIdx.x);
  const int column =
      (static_cast<int>(blockIdx.y) * kCombineThreads + static_cast<int>(threadIdx.x)) * 4;
  if (column >= a.hidden) return;
  const int64_t at = static_cast<int64_t>(row) * a.hidden + column;
  float4 sum = make_float4(0, 0, 0, 0);
  if (a.addend != nullptr) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(a.addend + at);
    sum = make_float4(low_bf16(pairs.x), high_bf16(pairs.x), low_bf16(pairs.y), high_bf16(pairs.y));
  }
  for (int first = 0; first < a.experts_per_token; first += kCombineLoads) {
    const int64_t pair = static_cast<int64_t>(row) * a.experts_per_token + first;
    const int count = a.experts_per_token - first;
    int32_t ids[kCombineLoads];
    float weights[kCombineLoads];
    float4 results[kCombineLoads];
#pragma unroll
    for (int i = 0; i < kCombineLoads; ++i) ids[i] = i < count ? a.expert_ids[pair + i] : -1;
#pragma unroll
    for (int i = 0; i < kCombineLoads; ++i) {
      if (ids[i] < 0) continue;
      weights[i] = a.expert_weights[pair + i];
      results[i] = *reinterpret_cast<const float4*>(a.results + (pair + i) * a.hidden + column);
    }
#pragma unroll
    for (int i = 0; i < kCombineLoads; ++i) {
      if (ids[i] < 0) continue;
      sum.x += weights[i] * results[i].x, sum.y += weights[i] * results[i].y;
      sum.z += weights[i] * results[i].z, sum.w += weights[i] * results[i].w;
    }
  }
  if (a.f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(a.out) + at) = sum;
  } else {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + at) =
        make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }
}

FourBitFewRowsPlan plan_for(const MoeShape& shape, int32_t rows) {
  return plan_four_bit_few_rows({.rows = rows,
                                 .hidden = shape.hidden,
                                 .experts_per_token = shape.experts_per_token,
                                 .inter = shape.inter});
}

template <FourBitCode kCode, bool kGated>
void launch_gemm(const Gemm& gemm, GpuStream stream) {
  stream.device().allow_shared_memory(multiply_kernel<kCode, kGated>, sizeof(Memory));
  launch(multiply_kernel<kCode, kGated>,
         {.blocks = static_cast<unsigned>(stream.device().num_multiprocessors()),
          .threads = kThreads,
          .shared_bytes = sizeof(Memory)},
         stream, gemm);
}

template <bool kGated>
void launch_gemm(FourBitCode code, const Gemm& gemm, GpuStream stream) {
  if (code == FourBitCode::kInteger) {
    launch_gemm<FourBitCode::kInteger, kGated>(gemm, stream);
  } else {
    launch_gemm<FourBitCode::kE2m1, kGated>(gemm, stream);
  }
}

}  // namespace

int64_t four_bit_moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return plan_for(shape, rows).workspace_bytes;
}

void four_bit_moe_few_rows(const FourBitMoeArguments& a, GpuStream stream) {
  const MoeShape& s = a.shape;
  const int pairs = a.rows * s.experts_per_token;
  FATHOM_CHECK(pairs <= kFourBitFewPairs && s.num_experts <= kMostMoeExperts,
               "{} pairs, {} experts", pairs, s.num_experts);
  if (a.rows == 0) return;
  const FourBitFewRowsPlan plan = plan_for(s, a.rows);
  auto* const workspace = static_cast<uint8_t*>(a.workspace);
  auto* const activations = reinterpret_cast<__nv_bfloat16*>(workspace + plan.activations_at);
  auto* const results = reinterpret_cast<float*>(workspace + plan.results_at);
  launch_gemm<true>(a.code,
                    {.weights = static_cast<const uint8_t*>(a.gate_up),
                     .x = static_cast<const __nv_bfloat16*>(a.x),
                     .expert_ids = a.expert_ids,
                     .out = activations,
                     .pairs = pairs,
                     .num_experts = s.num_experts,
                     .pairs_a_row = s.experts_per_token,
                     .panels = 2 * s.inter / kFourBitPanelRows,
                     .blocks = s.hidden / kFourBitBlockColumns,
                     .slices = plan.up.slices},
                    stream);
  launch_gemm<false>(a.code,
                     {.weights = static_cast<const uint8_t*>(a.down),
                      .x = activations,
                      .expert_ids = a.expert_ids,
                      .out = results,
                      .pairs = pairs,
                      .num_experts = s.num_experts,
                      .pairs_a_row = 1,
                      .panels = s.hidden / kFourBitPanelRows,
                      .blocks = s.inter / kFourBitBlockColumns,
                      .slices = plan.down.slices},
                     stream);
  launch(combine_kernel,
         {.blocks = {static_cast<unsigned>(a.rows),
                     static_cast<unsigned>((s.hidden / 4 + kCombineThreads - 1) / kCombineThreads)},
          .threads = kCombineThreads},
         stream,
         Combine{.results = results,
                 .expert_ids = a.expert_ids,
                 .expert_weights = a.expert_weights,
                 .addend = static_cast<const __nv_bfloat16*>(a.addend),
                 .out = a.out,
                 .rows = a.rows,
                 .hidden = s.hidden,
                 .experts_per_token = s.experts_per_token,
                 .f32 = a.out_type == DType::kF32});
}

}  // namespace fathom::cuda
