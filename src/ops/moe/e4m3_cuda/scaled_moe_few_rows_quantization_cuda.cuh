// Quantizes fp32 activations to e4m3 between the GEMMs, on the warpgroup that has made the lists.
#pragma once

#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_tables_cuda.cuh"
#include "ops/scaled_linear/quantize_four_cuda.cuh"

namespace fathom::cuda::scaled_few_tokens {

class Quantization {
 public:
  __device__ Quantization(Tables& tables, const ScaledWork& work, const Arguments& a)
      : tables_(tables), work_(work), a_(a), thread_(threadIdx.x % kWarpgroupThreads) {}

  __device__ void run(Phase phase) {
    const int blocks = inter_of(a_, phase) / 128;
    const int first_counter =
        kNumPhases + (phase == kShared ? 0 : num_shared_tiles(a_) * (a_.shared_inter / 128));
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const int block = piece.first / kScaleUnits;
      barrier_wait(&tables_.piece_done, parity_);
      parity_ ^= 1;
      named_barrier(kGrouping, kWarpgroupThreads);
      if (thread_ == 0) {
        barrier_arrive(&tables_.piece_taken);
        __threadfence();
        // The counter only grows: a launch adds kScaleUnits to it, or nothing.
        const uint64_t before =
            add_release(&a_.progress[first_counter + piece.tile * blocks + block], piece.count);
        tables_.is_last = (before + piece.count) % kScaleUnits == 0;
        __threadfence();
      }
      named_barrier(kGrouping, kWarpgroupThreads);
      if (tables_.is_last) quantize(phase, work_.tile(phase, piece), block);
    }
    named_barrier(kGrouping, kWarpgroupThreads);
    if (thread_ == 0) {
      const uint64_t before = add_release(&a_.progress[phase], 1);
      tables_.awaited[phase] = (before / gridDim.x + 1) * gridDim.x;
      barrier_arrive(&tables_.computed[phase]);
    }
  }

 private:
  // One warp per token, four columns a lane.
  __device__ void quantize(Phase phase, const TokenTile& tile, int block) const {
    constexpr int kWarps = kWarpgroupThreads / 32, kTogether = 4;
    const int inter = inter_of(a_, phase), lane = thread_ % 32;
    const uint16_t* sorted = tables_.sorted(num_pairs(a_));
    for (int first = thread_ / 32; first < tile.count; first += kWarps * kTogether) {
      float4 values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = min(first + i * kWarps, tile.count - 1);
        values[i] = __ldcg(reinterpret_cast<const float4*>(
            a_.wide[phase] + static_cast<int64_t>(tile.first + row) * inter + block * 128 +
            lane * 4));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int place = tile.first + first + i * kWarps;
        if (place >= tile.first + tile.count) break;
        const BlockScale scale = block_scale(warp_magnitude(values[i]), a_.form);
        *reinterpret_cast<uint32_t*>(a_.activations[phase] + static_cast<int64_t>(place) * inter +
                                     block * 128 + lane * 4) = pack_four(values[i], scale.inverse);
        if (lane == 0) {
          const float weight = phase == kShared ? 1.0f : a_.expert_weights[sorted[place]];
          a_.activation_scales[phase][place * (inter / 128) + block] = scale.scale * weight;
        }
      }
    }
  }

  Tables& tables_;
  const ScaledWork& work_;
  const Arguments& a_;
  const int thread_;
  int parity_ = 0;
};

}  // namespace fathom::cuda::scaled_few_tokens
