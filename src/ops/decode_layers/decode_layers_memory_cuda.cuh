// Per-CTA layout for decode_layers_cuda.cu: shares of the matrices, shared memory, and the packets
// that CTAs exchange.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/block_packets.cuh"
#include "ops/decode_layers/decode_layers_cuda.h"

namespace fathom::cuda::decode_layers_kernel {

// ---- shares of the shape in decode_layers_support.h

static_assert(kGroups == kRouted / kWarp);
constexpr int kExperts = kChosen + 1;  // the shared expert first

constexpr int kHeadBlocks = kBlocks / kHeads;
constexpr int kWarps = 16, kThreads = kWarps * 32, kAllThreads = kThreads + 128;
// Registers a thread. The total must not exceed the launch's 96 a thread.
constexpr int kRegisters = 104, kFeederRegisters = 64;
static_assert(kRegisters * kThreads + kFeederRegisters * 128 <= 96 * kAllThreads);
constexpr int kPairs = kWarps / 2;  // pairs of warps that share a chunk

constexpr int kQkvPairs = (kQLora + kLatent + kRope) / 2;  // pairs of rows
constexpr int kMostQkvRows = 2 * (kQkvPairs / kBlocks + 1);
constexpr int kQueryRows = (kNope + kRope) / kHeadBlocks;
constexpr int kAbsorbRows = kLatent / kHeadBlocks, kValueRows = kV / kHeadBlocks;
constexpr int kHiddenRows = kHidden / kBlocks;  // of o and of down
constexpr int kInterRows = kInter / kBlocks;    // of gate, and of up, of an expert

// Pairs of rows of q_kv_a before CTA b's.
__device__ constexpr int first_qkv_pair(int b) { return b * kQkvPairs / kBlocks; }

constexpr int kScaleRow = 128;  // rows and columns that share a scale

// ---- a CTA's share of each matrix, in ring chunks; a pair of warps takes one chunk

// Weights, followed by their scales.
constexpr int kSlots = 10, kWeightBytes = 16384, kSlotBytes = kWeightBytes + 512;
// Producer threads issue chunks in turn; a slot always belongs to the same thread. kInFlight chunks
// saturate the memory: more would queue there and delay the CTAs' exchange of results.
constexpr int kFeeders = 2, kInFlight = 4;
static_assert(kSlots % kFeeders == 0 && kInFlight % kFeeders == 0);
constexpr int kQueryChunkRows = 8, kOChunkRows = 8;
constexpr int kQueryChunks = kQueryRows / kQueryChunkRows, kOChunks = kHiddenRows / kOChunkRows;
constexpr int kRouterRowBytes = kHidden * 2;
static_assert(2 * kHidden <= kWeightBytes && kQueryChunkRows * kQLora <= kWeightBytes);
static_assert(kOChunkRows * kHeads * kV <= kWeightBytes && kHiddenRows * kInter <= kWeightBytes);
static_assert(kQueryRows % kQueryChunkRows == 0 && kHiddenRows % kOChunkRows == 0);

// ---- packets of one layer

__host__ __device__ constexpr int packets(int values) {
  return (values + kPacketValues - 1) / kPacketValues;
}
constexpr int kQkvPackets = packets(kMostQkvRows), kQueryPackets = packets(kQueryRows),
              kAbsorbPackets = packets(kAbsorbRows), kPartPackets = packets(kLatent + 2),
              kValuePackets = packets(kValueRows), kHiddenPackets = packets(kHiddenRows),
              kActivationPackets = packets(kExperts * kInterRows);
static_assert(kHiddenPackets * kPacketValues == kHiddenRows);

// Packets of each kind are contiguous for each CTA.
struct Exchange {
  uint32_t epochs[4];  // [0]: number of launches so far
  Packet qkv[kBlocks][kQkvPackets];
  Packet query[kBlocks][kQueryPackets];
  Packet absorbed[kBlocks][kAbsorbPackets];
  Packet part[kBlocks][kPartPackets];
  Packet value[kBlocks][kValuePackets];
  Packet o[kBlocks][kHiddenPackets];
  Packet logits[kBlocks];  // two fp32 values
  Packet activation[kBlocks][kActivationPackets];
  Packet down[kBlocks][kHiddenPackets];
};

// ---- shared memory

constexpr int kScratch = kWarps * kLatent;  // floats
constexpr int kKeyAt = 4096;  // offset in scratch: the new key from W_kv_a, until attention begins

// Upper bound on the 128-column blocks of a scaled vector.
constexpr int kMostScales = 32;
static_assert(kHeads * kV / kScaleRow <= kMostScales &&
              kExperts * kInter / kScaleRow <= kMostScales);

struct Shared {
  uint8_t ring[kSlots][kSlotBytes];
  float scratch[kScratch];
  uint8_t vector[kHidden * 2];                           // GEMV input, f16
  std::byte row[LatentRow<CacheFormat::kBF16>::kBytes];  // cache row of the token
  float sums[2 * kExperts * kInterRows * 2];             // rows, or halves of rows
  float warp_sums[kWarps];
  float most[kWarps], total[kWarps];  // softmax state of each warp's keys
  float x_scales[kMostScales];
  float weights[kExperts];  // the shared expert's is 1
  int32_t ids[kChosen];
  alignas(8) uint64_t full[kSlots];
  uint64_t empty[kSlots];
  uint64_t chosen;                              // mbarrier: a layer's experts are chosen
  uint64_t pages_known;                         // once a launch
  uint32_t turns[kSlots];                       // turns of each slot that have been issued
  DecodeLayer layers[2];                        // current and next
  int32_t pages[kMostDecodeLayersTokens / 64];  // page table of the sequence
};
static_assert(sizeof(Shared) <= 227 * 1024);

constexpr int kConsumers = 1, kChoosers = 2;  // named barriers
__device__ inline void sync_consumers() { named_barrier(kConsumers, kThreads); }

__device__ inline float load_ahead(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}

// ---- which keys a token attends to, and which CTA has them

constexpr int kPage = 64;
constexpr int kKeyRun = 16;  // consecutive keys of a page; one a warp

// Runs of cached keys before this token's, and a CTA's share of them.
__device__ inline int key_runs(int position) { return (position + kKeyRun - 1) / kKeyRun; }
__device__ inline int key_runs_of(int position, int part) {
  return (key_runs(position) - part + kHeadBlocks - 1) / kHeadBlocks;
}
// The split that has the token's own key.
__device__ inline int newest_key_part(int position) { return key_runs(position) % kHeadBlocks; }

// Slots that a run takes: bf16 rows are too large for one.
template <typename Row>
constexpr int kKeyPieces = kKeyRun* Row::kBytes <= kSlotBytes ? 1 : 2;

}  // namespace fathom::cuda::decode_layers_kernel
