// V2-Lite's layout for decode_layers() and its producer threads: which rows of each matrix a CTA
// has, and the chunks in which they come.
#pragma once

#include <type_traits>

#include "ops/decode_layers/decode_layers_feed_cuda.cuh"
#include "ops/decode_layers/decode_layers_units_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

constexpr int kKvRows = kLatent + kRope;
// Rows of kv_a before CTA b's.
__device__ constexpr int first_kv_row(int b) { return b * kKvRows / kBlocks; }

template <bool kBf16, int kTokens>
struct V2LiteLayout : V2Lite {
  static constexpr bool kHasBf16Weights = kBf16;
  static constexpr int kRows = kTokens;
  // A thread's, of consumers and of producers.
  static constexpr int kRegisters = 104, kFeederRegisters = 64;
  static constexpr int kWeightSize = kBf16 ? 2 : 1;
  static constexpr int kExperts = kChosen + 1;           // the shared expert first
  static constexpr int kHiddenRows = kHidden / kBlocks;  // of o and of down
  // A CTA's rows of an expert's gate, and as many of its up.
  static constexpr int kInterRows = kInter / kBlocks, kSharedRows = kSharedInter / kBlocks;
  static constexpr int kHiddenPackets = packets(kHiddenRows);

  // Chunks: rows of kHidden columns, at most kChunkRows; rows of down. A row's scales are those of
  // one or two blocks of rows, or of a block with what 16 bytes hold beside it.
  static constexpr int kChunkRows = 6, kDownRows = 8, kSharedDownRows = 4;
  static constexpr int kWeightBytes = kChunkRows * kHidden * kWeightSize,
                       kSlotBytes = kWeightBytes + (kBf16 ? 0 : 2 * kHidden / kScaleRow * 4);
  // A second token's activations take the memory of a quarter of the slots.
  static constexpr int kSlots = (kBf16 ? 8 : 16) * (kRows == 1 ? 4 : 3) / 4;
  // Chunks in flight before the experts are chosen, while packets pass between CTAs; and of keys,
  // which the L2 has, and after the choice.
  static constexpr unsigned kInFlight = kBf16 ? 1 : 2, kMoreInFlight = 3;
  static constexpr int kQueryChunks = kQueryRows / kChunkRows,
                       kOChunks = (kHiddenRows + kChunkRows - 1) / kChunkRows,
                       kSharedGateChunks = (kSharedRows + kChunkRows - 1) / kChunkRows,
                       kGateChunks = (kInterRows + kChunkRows - 1) / kChunkRows,
                       kGateUpChunks =
                           2 * kSharedGateChunks + 2 * kChosen * kGateChunks,  // a token's
      kSharedDownChunks = kHiddenRows / kSharedDownRows, kDownChunks = kHiddenRows / kDownRows;
  // A packet has the activations of one chunk's rows.
  static constexpr int kActivationPackets = kSharedGateChunks + kChosen * kGateChunks;
  using Exchanged = Exchange<kRows, 1, kHiddenPackets, kActivationPackets>;
  // A token's activations, 16 bits each, which lie in scratch.
  static constexpr int kInner = kSharedInter + kChosen * kInter, kScratch = kRows * kInner / 2;
  static constexpr int kSums = 2 * kChunkRows * kGateUpChunks;  // rows, or halves of rows
  static constexpr int kMostScales = kInner / kScaleRow;
};

template <bool kBf16, int kTokens>
constexpr bool layout_fits(V2LiteLayout<kBf16, kTokens>) {
  using L = V2LiteLayout<kBf16, kTokens>;
  static_assert(L::kInterRows * kBlocks == L::kInter &&
                L::kSharedRows * kBlocks == L::kSharedInter);
  static_assert(L::kQueryChunks * L::kChunkRows == kQueryRows);
  static_assert(kKvRows / kBlocks + 1 <= L::kChunkRows && kKvRows / kBlocks + 1 <= kPacketValues);
  static_assert(L::kDownRows * L::kInter * L::kWeightSize <= L::kWeightBytes);
  static_assert(L::kSharedDownRows * L::kSharedInter * L::kWeightSize <= L::kWeightBytes);
  static_assert(kAbsorbRows * kNope * L::kWeightSize <= L::kWeightBytes &&
                kValueRows * kLatent * L::kWeightSize <= L::kWeightBytes);
  static_assert(kKeyAt + L::kRows * kKvRows <= L::kScratch && L::kHidden <= L::kScratch);
  static_assert(L::kSlotBytes % 128 == 0);
  static_assert(L::kChunkRows <= kPacketValues);
  static_assert(L::kSharedInter == 2 * L::kInter && L::kSharedGateChunks == 2 * L::kGateChunks &&
                L::kSharedDownChunks == 2 * L::kDownChunks);
  static_assert(sizeof(Shared<L>) <= 227 * 1024);
  static_assert(sizeof(typename L::Exchanged) % alignof(Packet) == 0);
  // v2_lite_exchange_bytes() is that of both types of weights.
  static_assert(
      std::is_same_v<typename L::Exchanged, typename V2LiteLayout<true, kTokens>::Exchanged>);
  return true;
}
static_assert(layout_fits(V2LiteLayout<true, 1>()) && layout_fits(V2LiteLayout<false, 1>()));
static_assert(layout_fits(V2LiteLayout<true, 2>()) && layout_fits(V2LiteLayout<false, 2>()));

// ---- which rows a chunk of gate and up has

struct GateUpChunk {
  int expert;  // its unit; 0: the shared expert
  bool is_up;
  int first, rows;  // of the expert's gate, or up
};

template <typename L>
__device__ GateUpChunk gate_up_chunk(int i, int block) {
  if (i < 2 * L::kSharedGateChunks) {
    const int at = i % L::kSharedGateChunks * L::kChunkRows;
    return {0, i >= L::kSharedGateChunks, block * L::kSharedRows + at,
            min(L::kChunkRows, L::kSharedRows - at)};
  }
  i -= 2 * L::kSharedGateChunks;
  const int at = i % L::kGateChunks * L::kChunkRows;
  return {1 + i / (2 * L::kGateChunks), i / L::kGateChunks % 2 != 0, block * L::kInterRows + at,
          min(L::kChunkRows, L::kInterRows - at)};
}

// A producer thread.
template <typename Row, typename L>
class V2LiteFeeder : public FeederOf<Row, L, V2LiteFeeder<Row, L>> {
 public:
  using Base = FeederOf<Row, L, V2LiteFeeder<Row, L>>;
  using Base::Base;
  static constexpr int kSteps = 9;

  __device__ static unsigned in_flight(int step) {
    return step < kGateUp && step != kKeys ? L::kInFlight : L::kMoreInFlight;
  }

  __device__ int count_of(int step, int l) {
    switch (step) {
      case kQuery:
        return L::kQueryChunks + 1;
      case kKeys:
        return this->count_of_keys(l);
      case kO:
        return L::kOChunks;
      case kSharedGateUp:
        return 2 * L::kSharedGateChunks;
      case kGateUp:
        barrier_wait(&shared_.chosen, l & 1);
        return 2 * num_units(shared_) * L::kGateChunks;
      case kSharedDown:
        return L::kSharedDownChunks;
      case kDown:
        return num_units(shared_) * L::kDownChunks;
      default:
        return 1;
    }
  }

  __device__ Chunk chunk_of(int step, int i, int l) {
    const DecodeLayer& layer = shared_.layers[l & 1];
    switch (step) {
      case kQuery:
        if (i < L::kQueryChunks) {
          return rows_of(layer.q_kv_a, block_ * kQueryRows + i * L::kChunkRows, L::kChunkRows);
        }
        return rows_of(layer.q_kv_a, kHeads * (kNope + kRope) + first_kv_row(block_),
                       first_kv_row(block_ + 1) - first_kv_row(block_));
      case kAbsorb:  // scales of the whole head
        return short_rows_of(layer.uk, kAbsorbRows, kNope, kLatent / kScaleRow);
      case kKeys:
        return this->keys_of(i, l);
      case kValues:  // the head's rows share a row of scales
        return short_rows_of(layer.uv, kValueRows, kLatent, kLatent / kScaleRow);
      case kO: {
        const int at = i * L::kChunkRows;
        Chunk chunk =
            rows_of(layer.o, block_ * L::kHiddenRows + at, min(L::kChunkRows, L::kHiddenRows - at));
        if (FATHOM_PLANTED(a_, kWrongLayerScale) && block_ > kBlocks / 2) {
          chunk.scales -= L::kHidden / kScaleRow;
        }
        return chunk;
      }
      case kSharedGateUp:
      case kGateUp: {
        const GateUpChunk chunk =
            gate_up_chunk<L>(step == kGateUp ? 2 * L::kSharedGateChunks + i : i, block_);
        if (chunk.expert == 0) {
          return rows_of(layer.shared_gate_up, chunk.is_up * L::kSharedInter + chunk.first,
                         chunk.rows);
        }
        const int64_t matrix = int64_t{shared_.ids[chunk.expert - 1]} * 2 + chunk.is_up;
        return rows_of(layer.gate_up, matrix * L::kInter + chunk.first, chunk.rows);
      }
      case kSharedDown:
        return down_of<L::kSharedInter>(layer.shared_down, 0, i * L::kSharedDownRows,
                                        L::kSharedDownRows);
      default:
        return down_of<L::kInter>(layer.down, shared_.ids[i / L::kDownChunks],
                                  i % L::kDownChunks * L::kDownRows, L::kDownRows);
    }
  }

 private:
  enum Step { kQuery, kAbsorb, kKeys, kValues, kO, kSharedGateUp, kSharedDown, kGateUp, kDown };
  using Base::a_;
  using Base::block_;
  using Base::shared_;

  // Rows of kHidden columns, with the scales of their one or two blocks of rows.
  __device__ static Chunk rows_of(const ScaledMatrix& matrix, int64_t row, int rows) {
    constexpr int kRowBytes = L::kHidden * L::kWeightSize, kScales = L::kHidden / kScaleRow;
    if constexpr (L::kHasBf16Weights) {
      return {matrix.values, row * kRowBytes, rows * kRowBytes, nullptr, 0};
    }
    const int64_t block = row / kScaleRow;
    return {matrix.values, row * kRowBytes, rows * kRowBytes, matrix.scales + block * kScales,
            static_cast<int>((row + rows - 1) / kScaleRow - block + 1) * kScales};
  }

  // The CTA's rows of a head's matrix, and the head's scales.
  __device__ Chunk short_rows_of(const ScaledMatrix& matrix, int rows, int columns,
                                 int scales) const {
    const int bytes = rows * columns * L::kWeightSize;
    if constexpr (L::kHasBf16Weights) {
      return {matrix.values, int64_t{block_} * bytes, bytes, nullptr, 0};
    }
    return {matrix.values, int64_t{block_} * bytes, bytes,
            matrix.scales + block_ / kHeadBlocks * scales, scales};
  }

  // Some of the CTA's rows of an expert's down. All lie in a block of rows, whose scales begin
  // scales_before() after a multiple of 16 bytes.
  template <int kColumns>
  __device__ Chunk down_of(const ScaledMatrix& matrix, int64_t expert, int first, int rows) const {
    constexpr int kRowBytes = kColumns * L::kWeightSize, kScales = kColumns / kScaleRow;
    const int64_t at = (expert * L::kHidden + block_ * L::kHiddenRows + first) * kRowBytes;
    if constexpr (L::kHasBf16Weights) {
      return {matrix.values, at, rows * kRowBytes, nullptr, 0};
    }
    static_assert(L::kHidden / kScaleRow * kScales % 4 == 0);
    const int block = block_ * L::kHiddenRows / kScaleRow;
    const int begin = block * kScales / 4 * 4, end = (block * kScales + kScales + 3) / 4 * 4;
    return {matrix.values, at, rows * kRowBytes,
            matrix.scales + expert * (L::kHidden / kScaleRow * kScales) + begin, end - begin};
  }
};

}  // namespace fathom::cuda::decode_layers_kernel
