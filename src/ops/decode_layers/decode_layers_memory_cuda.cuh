// Per-CTA layout that all shapes of decode_layers() share: shares of attention's matrices, shared
// memory, and the packets that CTAs exchange.
//
// A shape's layout L (decode_layers_v3_cuda.cu, decode_layers_v2_lite_feed_cuda.cuh) adds the
// number of tokens, kRows, its widths, its ring (kSlots slots of kSlotBytes, of which the first
// kWeightBytes hold weights and the rest their scales), and the registers of its threads. Its
// feeder says how many chunks are in flight: more than saturate the memory would queue there and
// delay the CTAs' exchange of results.
#pragma once

#include "cache/latent_row_cuda.cuh"
#include "device/cuda/block_packets.cuh"
#include "device/cuda/ptx.cuh"
#include "ops/decode_layers/decode_layers_cuda.h"

namespace fathom::cuda::decode_layers_kernel {

constexpr int kHeadBlocks = kBlocks / kHeads;
constexpr int kWarps = 16, kThreads = kWarps * 32, kAllThreads = kThreads + 128;
constexpr int kPairs = kWarps / 2;  // pairs of warps that share a chunk

constexpr int kQueryRows = (kNope + kRope) / kHeadBlocks;
constexpr int kAbsorbRows = kLatent / kHeadBlocks, kValueRows = kV / kHeadBlocks;

constexpr int kScaleRow = 128;  // rows and columns that share a scale

// Producer threads issue chunks in turn.
constexpr int kFeeders = 2;

// ---- packets of one layer

// A CTA's `rows` values are whole packets of so many values: no packet and no thread is special.
__host__ __device__ constexpr int packet_values(int rows) {
  int values = kPacketValues;
  while (rows % values != 0) --values;
  return values;
}
__host__ __device__ constexpr int packets(int rows) { return rows / packet_values(rows); }
constexpr int kQueryPackets = packets(kQueryRows), kAbsorbPackets = packets(kAbsorbRows),
              kValuePackets = packets(kValueRows);
// Four columns and the split's log-sum-exp.
constexpr int kPartValues = 4, kPartPackets = kLatent / kPartValues;

// Packets of each kind are contiguous for each CTA, and CTAs for each token. kInputPackets: of the
// rows of q_a and kv_a, or of kv_a. Launches of one token and of two have separate memory: a packet
// that one of them never writes would keep its epoch, of 16 bits, until the epochs wrap around.
template <int kRows, int kInputPackets, int kHiddenPackets, int kActivationPackets>
struct Exchange {
  static constexpr int kShares = kRows * kBlocks;

  uint32_t epochs[4];  // [0]: epochs so far, one for each launch and one for each of its layers
  Packet input[kShares][kInputPackets];
  Packet query[kShares][kQueryPackets];
  Packet absorbed[kShares][kAbsorbPackets];
  Packet part[kShares][kPartPackets];
  Packet value[kShares][kValuePackets];
  Packet o[kShares][kHiddenPackets];
  Packet logits[kShares];  // up to two fp32 values
  Packet activation[kShares][kActivationPackets];
  Packet down[kShares][kHiddenPackets];
};

// ---- which keys a token attends to, and which CTA has them

constexpr int kPage = 64;
constexpr int kKeyRun = 16;  // consecutive keys of a page

// A CTA's share of the runs of so many keys, those of this step included.
__device__ inline int key_runs_of(int keys, int part) {
  return ((keys + kKeyRun - 1) / kKeyRun - part + kHeadBlocks - 1) / kHeadBlocks;
}
// The CTA's share that has a key.
__device__ inline int key_part(int key) { return key / kKeyRun % kHeadBlocks; }

// ---- shared memory

// Offset in scratch of the tokens' new keys from W_kv_a, until attention begins.
constexpr int kKeyAt = 2048;
constexpr int kMostRowBytes = LatentRow<CacheFormat::kBF16>::kBytes;  // of the cache

// Most experts that so many tokens have together, the shared one included.
__host__ __device__ constexpr int most_units(int rows, int chosen) { return 1 + rows * chosen; }

// Groups of warps that attend to a run of keys together, decode_layers_keys_cuda.cuh; a warp's part
// of the latent and of the rotary columns, and steps of 16 columns of it.
constexpr int kKeyWarps = 4, kKeyGroups = kWarps / kKeyWarps;
constexpr int kKeyColumns = kLatent / kKeyWarps, kKeyRope = kRope / kKeyWarps;
constexpr int kKeySteps = kKeyColumns / 16;

// What the warps of all groups that have the same part of the columns multiply keys with. latent:
// for each token and l % 4 the words of the eight steps, two each, in the type that the keys
// multiply in, and a gap against bank conflicts.
template <int kRows>
struct KeyQueries {
  static constexpr int kStride = 2 * kKeySteps + 4;
  alignas(16) uint32_t latent[kKeyWarps][kRows][4][kStride];
  alignas(8) uint32_t rope[kRows][kRope / 2];  // turned, bf16
  float scales[kKeyWarps][kRows];
};

// Shared memory of launches of several tokens alone.
template <typename L, int kRows>
struct SharedOfRows {
  static constexpr int kUnits = most_units(kRows, L::kChosen);

  // Tokens; those that a launch has memory for and not in its arguments are at position 0 of a
  // sequence of their own, with a residual of zeros.
  int32_t positions[kRows];
  int32_t first[kRows], count[kRows];  // of the token's sequence: its first token, and how many
  int32_t cached[kRows];               // tokens of the sequence in the cache
  // Runs of a sequence's keys that this CTA has, at its first token, 0 at the others; and all
  // sequences' runs in the order in which they come, as run * kRows + first token.
  int32_t runs[kRows];
  uint16_t run_order[kRows * (L::kMostTokens / kKeyRun / kHeadBlocks)];
  // Units are the experts of all tokens, each listed once; unit 0 is the shared expert.
  int32_t chosen_ids[kRows][L::kChosen];
  int32_t unit_of[kRows][L::kExperts];  // of a token's shared expert and of its chosen ones
  int32_t place_of[kRows][kUnits];      // the reverse; -1: not of this token
  uint32_t tokens_of[kUnits];           // of a routed one; bit r: of token r
  int32_t num_units;                    // of routed experts
};
template <typename L>
struct SharedOfRows<L, 1> {};

// Arrays of several tokens have them one after another.
template <typename L>
struct Shared {
  uint8_t ring[L::kSlots][L::kSlotBytes];
  float scratch[L::kScratch];
  uint8_t vector[L::kRows * L::kHidden * 2];  // GEMV inputs, 16 bits a value
  float residual[L::kRows * L::kHiddenRows];  // of this CTA's rows
  std::byte row[L::kRows * kMostRowBytes];    // cache rows of the tokens
  float sums[L::kRows * L::kSums];            // rows, or halves of rows
  float warp_sums[L::kRows * kWarps];
  KeyQueries<L::kRows> queries;               // of the head
  float most[kWarps], total[kWarps];          // softmax state of each group's keys, of each token
  float x_scales[L::kRows * L::kMostScales];  // of the 128-column blocks of scaled vectors
  float weights[L::kRows * L::kExperts];      // the shared expert's is 1
  int32_t ids[L::kRows * L::kChosen];         // of routed experts, as they are read
  alignas(8) uint64_t full[L::kSlots];
  uint64_t empty[L::kSlots];
  uint64_t chosen;               // mbarrier: a layer's experts are chosen
  uint64_t pages_known;          // once a launch
  uint64_t input_known;          // V2-Lite: a layer's router can read the vector
  uint64_t query_known;          // a layer's query, multiplied by W_UK, is in scratch
  uint64_t row_known[L::kRows];  // V2-Lite, CTAs of a newest key: a layer's row is in `row`
  uint32_t epoch;                // before the launch's first layer
  uint32_t turns[L::kSlots];     // turns of each slot that have been issued
  DecodeLayer layers[2];         // current and next
  int32_t pages[L::kRows * (L::kMostTokens / 64)];  // page tables of the tokens' sequences
  SharedOfRows<L, L::kRows> of_rows;
};

// Waits for the launch's chunk number `sequence`.
template <typename L>
__device__ inline const uint8_t* wait_for_chunk(Shared<L>& shared, unsigned sequence) {
  const unsigned slot = sequence % L::kSlots, turn = sequence / L::kSlots;
  // The slot's parity is valid for this turn only from then on: another warp may still wait for the
  // turn before.
  while (load_acquire_in_block(&shared.turns[slot]) <= turn) {
  }
  barrier_wait(&shared.full[slot], static_cast<int>(turn & 1));
  return shared.ring[slot];
}

constexpr int kReceivers = kHeadBlocks * kAbsorbPackets;  // threads that receive a query

// Named barriers; kSomeConsumers and the next: one for each token; kAttention and the next: one for
// each group of warps.
constexpr int kConsumers = 1, kSomeConsumers = 2, kRouters = kSomeConsumers + kMostRows,
              kAttention = kRouters + 1;
__device__ inline void sync_consumers() { named_barrier(kConsumers, kThreads); }

__device__ inline float load_ahead(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}
__device__ inline void load_four_ahead(const float* from, float (&v)[4]) {
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(from));
}

// Slots that a run takes, if it is too large for one.
template <typename Row, typename L>
constexpr int kKeyPieces = kKeyRun* Row::kBytes <= L::kSlotBytes ? 1 : 2;

}  // namespace fathom::cuda::decode_layers_kernel
