// Producer threads of decode_layers(): load weights and keys into the shared-memory ring.
#pragma once

#include "device/cuda/bulk_copy.cuh"
#include "device/cuda/ptx.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"
#include "ops/decode_layers/decode_layers_tokens_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// Bytes of a slot.
struct Chunk {
  const void* values;
  int64_t at;  // offset of the chunk's bytes behind `values`
  int bytes;   // a multiple of 16, or 0
  const float* scales;
  int num_scales;  // a multiple of 4
};

// A producer thread that issues every kFeeders-th chunk. A shape's feeder says which chunks a step
// has, and how many may be in flight: count_of(step, layer), chunk_of(step, index, layer),
// in_flight(step) for steps 0 to kSteps - 1.
template <typename Row, typename L, typename Derived>
class FeederOf {
 public:
  __device__ FeederOf(Shared<L>& shared, const DecodeLayersArguments& a, int feeder)
      : shared_(shared),
        a_(a),
        policy_(read_once_policy()),
        block_(static_cast<int>(blockIdx.x)),
        feeder_(feeder),
        sequence_(static_cast<unsigned>(feeder)) {}

  __device__ void run() {
    Derived& self = static_cast<Derived&>(*this);
    int next = feeder_;  // chunk of the step
#pragma unroll 1
    for (int l = 0; l < a_.num_layers; ++l) {
#pragma unroll 1
      for (int step = 0; step < Derived::kSteps; ++step) {
        const int count = self.count_of(step, l);
#pragma unroll 1
        for (; next < count; next += kFeeders) {
          feed(self.chunk_of(step, next, l), self.in_flight(step));
        }
        next -= count;
      }
    }
  }

 protected:
  __device__ int count_of_keys(int l) {
    if (l == 0) barrier_wait(&shared_.pages_known, 0);
    if constexpr (L::kRows == 1) {
      if (l == 0) cached_ = a_.positions[0];
      return key_runs_of(cached_ + 1, block_ % kHeadBlocks) * kKeyPieces<Row, L>;
    } else {
      return num_runs(shared_) * kKeyPieces<Row, L>;
    }
  }

  __device__ Chunk keys_of(int i, int l) const {
    constexpr int kPieces = kKeyPieces<Row, L>, kKeys = kKeyRun / kPieces;
    int row = 0, run = i / kPieces, cached = cached_;
    if constexpr (L::kRows > 1) {
      const int at = shared_.of_rows.run_order[run];
      row = at % L::kRows;
      run = at / L::kRows;
      cached = shared_.of_rows.cached[row];
    }
    const int first = (block_ % kHeadBlocks + run * kHeadBlocks) * kKeyRun + i % kPieces * kKeys;
    const int page = shared_.pages[row * (L::kMostTokens / kPage) + first / kPage];
    return {a_.pages + l * a_.layer_bytes, (int64_t{page} * kPage + first % kPage) * Row::kBytes,
            max(min(kKeys, cached - first), 0) * Row::kBytes, nullptr, 0};
  }

  Shared<L>& shared_;
  const DecodeLayersArguments& a_;
  const uint64_t policy_;
  const int block_, feeder_;

 private:
  __device__ void feed(const Chunk& chunk, unsigned in_flight) {
    // A slot always belongs to the same thread: a parity bit cannot tell two turns apart.
    static_assert(L::kSlots % kFeeders == 0);
    const unsigned slot = sequence_ % L::kSlots, turn = sequence_ / L::kSlots;
    if (turn > 0) barrier_wait(&shared_.empty[slot], static_cast<int>((turn - 1) & 1));
    if (sequence_ >= in_flight) wait_until_full(sequence_ - in_flight);
    uint64_t* const full = &shared_.full[slot];
    uint8_t* const to = shared_.ring[slot];
    barrier_expect(full, chunk.bytes + chunk.num_scales * 4);
    if (chunk.bytes > 0) {
      copy_bytes_under(policy_, to, static_cast<const uint8_t*>(chunk.values) + chunk.at,
                       chunk.bytes, full);
    }
    if (chunk.num_scales > 0) {
      copy_bytes_under(policy_, to + L::kWeightBytes, chunk.scales, chunk.num_scales * 4, full);
    }
    store_release_in_block(&shared_.turns[slot], turn + 1);
    sequence_ += kFeeders;
  }

  // The other thread may not have issued the chunk yet, or may have issued the slot's next one.
  __device__ void wait_until_full(unsigned sequence) const {
    const unsigned slot = sequence % L::kSlots, turn = sequence / L::kSlots;
    for (;;) {
      const unsigned issued = load_acquire_in_block(&shared_.turns[slot]);
      if (issued > turn + 1) return;
      if (issued == turn + 1 &&
          barrier_has_ended(&shared_.full[slot], static_cast<int>(turn & 1))) {
        return;
      }
    }
  }

  unsigned sequence_;  // of the next chunk in the launch
  int cached_ = 0;     // of one token: its position
};

}  // namespace fathom::cuda::decode_layers_kernel
