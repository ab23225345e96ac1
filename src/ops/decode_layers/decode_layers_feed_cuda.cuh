// Producer threads of decode_layers_cuda.cu: load weights and keys into the shared-memory ring.
#pragma once

#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/ptx.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// A producer thread that issues every kFeeders-th chunk.
template <typename Row>
class Feeder {
 public:
  __device__ Feeder(Shared& shared, const DecodeLayersArguments& a, int feeder)
      : shared_(shared),
        a_(a),
        policy_(read_once_policy()),
        block_(static_cast<int>(blockIdx.x)),
        feeder_(feeder) {}

  __device__ void run() {
    int next = feeder_;  // chunk of the step
#pragma unroll 1
    for (int l = 0; l < a_.num_layers; ++l) {
#pragma unroll 1
      for (int step = kQkvA; step <= kDown; ++step) {
        const int count = count_of(step, l);
#pragma unroll 1
        for (; next < count; next += kFeeders) feed(chunk_of(step, next, l));
        next -= count;
      }
    }
  }

 private:
  enum Step { kQkvA, kQueryB, kAbsorb, kKeys, kValues, kO, kRouter, kGateUp, kDown };

  struct Chunk {
    const void* values;
    int64_t at;  // offset of the scales behind the weights
    int bytes;   // a multiple of 16, or 0
    const float* scales;
    int num_scales;  // a multiple of 4
  };

  __device__ int count_of(int step, int l) {
    switch (step) {
      case kQkvA:
        return first_qkv_pair(block_ + 1) - first_qkv_pair(block_);
      case kQueryB:
        return kQueryChunks;
      case kKeys:
        if (l == 0) {
          barrier_wait(&shared_.pages_known, 0);
          position_ = *a_.position;
        }
        return key_runs_of(position_, block_ % kHeadBlocks) * kKeyPieces<Row>;
      case kO:
        return kOChunks;
      case kRouter:
        return kRouted / kBlocks;
      case kGateUp:
        return 2 * kExperts;
      case kDown:
        return kExperts;
      default:
        return 1;
    }
  }

  __device__ Chunk chunk_of(int step, int i, int l) {
    const DecodeLayer& layer = shared_.layers[l & 1];
    switch (step) {
      case kQkvA:
        return rows_of(layer.q_kv_a, (first_qkv_pair(block_) + i) * 2, 2, kHidden);
      case kQueryB:
        return rows_of(layer.q_b, (block_ * kQueryChunks + i) * kQueryChunkRows, kQueryChunkRows,
                       kQLora);
      case kAbsorb:  // scales of the whole head
        return {layer.uk.values, int64_t{block_} * kAbsorbRows * kNope, kAbsorbRows * kNope,
                layer.uk.scales + block_ / kHeadBlocks * (kLatent / kScaleRow),
                kLatent / kScaleRow};
      case kKeys:
        return keys_of(i, l);
      case kValues:
        return rows_of(layer.uv, block_ * kValueRows, kValueRows, kLatent);
      case kO: {
        Chunk chunk =
            rows_of(layer.o, (block_ * kOChunks + i) * kOChunkRows, kOChunkRows, kHeads * kV);
        if (FATHOM_PLANTED(a_, kWrongLayerScale) && block_ > kBlocks / 2) {
          chunk.scales -= kHeads * kV / kScaleRow;
        }
        return chunk;
      }
      case kRouter:
        return {layer.router, int64_t{block_ * (kRouted / kBlocks) + i} * kRouterRowBytes,
                kRouterRowBytes, nullptr, 0};
      case kGateUp: {
        if (i >= 2) barrier_wait(&shared_.chosen, l & 1);
        const int64_t row = (expert_of(i / 2) * 2 + i % 2) * kInter + block_ * kInterRows;
        return rows_of(i < 2 ? layer.shared_gate_up : layer.gate_up, row, kInterRows, kHidden);
      }
      default:
        return down_of(i == 0 ? layer.shared_down : layer.down, expert_of(i));
    }
  }

  __device__ int64_t expert_of(int i) const { return i == 0 ? 0 : shared_.ids[i - 1]; }

  // Rows that share one row of scales.
  __device__ static Chunk rows_of(const ScaledMatrix& matrix, int64_t row, int rows, int columns) {
    const int scales = columns / kScaleRow;
    return {matrix.values, row * columns, rows * columns, matrix.scales + row / kScaleRow * scales,
            scales};
  }

  // Scales of the rows' one or two blocks of 128, starting at an even block.
  __device__ Chunk down_of(const ScaledMatrix& matrix, int64_t expert) const {
    const int first = block_ * kHiddenRows / kScaleRow / 2 * 2,
              last = (block_ * kHiddenRows + kHiddenRows - 1) / kScaleRow;
    return {matrix.values, (expert * kHidden + block_ * kHiddenRows) * kInter, kHiddenRows * kInter,
            matrix.scales + (expert * (kHidden / kScaleRow) + first) * (kInter / kScaleRow),
            last - first < 2 ? 4 : 8};
  }

  __device__ Chunk keys_of(int i, int l) const {
    constexpr int kPieces = kKeyPieces<Row>, kRows = kKeyRun / kPieces;
    const int first =
        (block_ % kHeadBlocks + i / kPieces * kHeadBlocks) * kKeyRun + i % kPieces * kRows;
    const int page = shared_.pages[first / kPage];
    return {a_.pages + l * a_.layer_bytes, (int64_t{page} * kPage + first % kPage) * Row::kBytes,
            max(min(kRows, position_ - first), 0) * Row::kBytes, nullptr, 0};
  }

  __device__ void feed(const Chunk& chunk) {
    const unsigned slot = sequence_ % kSlots, turn = sequence_ / kSlots;
    if (turn > 0) barrier_wait(&shared_.empty[slot], static_cast<int>((turn - 1) & 1));
    if (sequence_ >= kInFlight) {
      const unsigned before = sequence_ - kInFlight;
      barrier_wait(&shared_.full[before % kSlots], static_cast<int>(before / kSlots & 1));
    }
    uint64_t* const full = &shared_.full[slot];
    uint8_t* const to = shared_.ring[slot];
    barrier_expect(full, chunk.bytes + chunk.num_scales * 4);
    if (chunk.bytes > 0) {
      copy_bytes_under(policy_, to, static_cast<const uint8_t*>(chunk.values) + chunk.at,
                       chunk.bytes, full);
    }
    if (chunk.num_scales > 0) {
      copy_bytes_under(policy_, to + kWeightBytes, chunk.scales, chunk.num_scales * 4, full);
    }
    store_release_in_block(&shared_.turns[slot], turn + 1);
    sequence_ += kFeeders;
  }

  Shared& shared_;
  const DecodeLayersArguments& a_;
  const uint64_t policy_;
  const int block_, feeder_;
  unsigned sequence_ = static_cast<unsigned>(feeder_);  // of the next chunk in the launch
  int position_ = 0;
};

}  // namespace fathom::cuda::decode_layers_kernel
