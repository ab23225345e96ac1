// Copies tokens and activations into the ring, with the scales of a stage's tokens and weight rows:
// one warpgroup.
#pragma once

#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_tables_cuda.cuh"

namespace fathom::cuda::scaled_few_tokens {

// A thread copies the same 16 bytes of 128 columns of every eighth row.
class TokenCopies {
 public:
  __device__ TokenCopies(uint8_t* ring, Tables& tables, const ScaledWork& work, const Arguments& a)
      : ring_(shared_address(ring)),
        tables_(tables),
        work_(work),
        a_(a),
        chunk_(threadIdx.x % 16),
        row_(threadIdx.x % kWarpgroupThreads / 16),
        scale_half_(threadIdx.x % kWarpgroupThreads / kTileTokens),
        scale_row_(threadIdx.x % kTileTokens) {}

  __device__ void gate_up(Phase phase) {
    Piece piece;
    for (Walk walk = work_.gate_up(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      const uint16_t* sorted = tables_.sorted(num_pairs(a_));
      const auto token = [&](int row) {
        const int place = tile.first + row;
        return phase == kShared ? place : sorted[place] / a_.experts_per_token;
      };
      const int blocks = a_.hidden / 128, inter = inter_of(a_, phase);
      const int row_block = tile.expert * (2 * inter / 128) + piece.first / kScaleUnits;
      copy(
          tile.count, 0, stages_of<Arguments>(a_.hidden), blocks,
          [&](int row) { return a_.x + static_cast<int64_t>(token(row)) * a_.hidden; },
          {scale_row_ < tile.count ? a_.x_scales + token(scale_row_) : nullptr, a_.x_scales_stride},
          a_.gate_up_scales[phase] + (row_block + scale_row_ % 2 * (inter / 128)) * blocks);
    }
  }

  __device__ void down(Phase phase) {
    const int inter = inter_of(a_, phase);
    Piece piece;
    for (Walk walk = work_.down(phase); walk.next(piece);) {
      const TokenTile tile = work_.tile(phase, piece);
      const int blocks = inter / 128, row_blocks = a_.hidden / 128;
      const int row_block =
          min(work_.share().first_group / kScaleUnits + scale_row_ % 2, row_blocks - 1);
      copy(
          tile.count, piece.first * kStageHalves, piece.count, blocks,
          [&](int row) {
            return a_.activations[phase] + static_cast<int64_t>(tile.first + row) * inter;
          },
          {scale_row_ < tile.count
               ? a_.activation_scales[phase] + (tile.first + scale_row_) * blocks
               : nullptr,
           1},
          a_.down_scales[phase] + (tile.expert * row_blocks + row_block) * blocks);
    }
  }

  // Waits for the activations of all CTAs.
  __device__ void wait_for(Phase phase) const {
    if (threadIdx.x % kWarpgroupThreads == 0) {
      barrier_wait(&tables_.computed[phase], 0);
      while (load_acquire(&a_.progress[phase]) < tables_.awaited[phase]) {
      }
    }
    named_barrier(kCopying, kWarpgroupThreads);
  }

 private:
  static constexpr int kEach = kTileTokens / kGroupRows;

  // Scales of one row by 128-column blocks.
  struct Scales {
    const float* first;
    int64_t stride;
  };

  // Copies the stage from first_block on of rows row_at(0 … rows), each of `blocks` blocks of 128
  // columns; this thread's token's scales, and one of two weight rows' scales, dense.
  template <typename RowAt>
  __device__ void copy(int rows, int first_block, int num_stages, int blocks, RowAt row_at,
                       const Scales& token_scales, const float* row_scales) {
    const uint8_t* from[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * kGroupRows + row_;
      from[i] = row < rows ? row_at(row) : nullptr;
    }
    const uint32_t to =
        ring_ + chunk_ / 8 * (a_.token_groups * kGroupBytes) + swizzled_chunk(row_, chunk_ % 8);
    for (int k = 0; k < num_stages; ++k) {
      if (done_ >= a_.stages) barrier_wait(&tables_.read[at_.stage], at_.parity ^ 1);
      const int block = first_block + k * kStageHalves, column = block * 128 + chunk_ * 16;
      const bool exists = column < blocks * 128;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (from[i] == nullptr) continue;
        copy_16_or_zero(to + at_.stage * a_.stage_bytes + i * kGroupBytes,
                        from[i] + (exists ? column : 0), exists ? 16 : 0);
      }
      // Data beyond the last block is multiplied by 0, so any scale but NaN will do.
      const int scaled_block = min(block + scale_half_, blocks - 1);
      StageScalesMemory& scales = tables_.scales[at_.stage];
      if (token_scales.first != nullptr) {
        copy_4(shared_address(&scales.tokens[scale_half_][scale_row_]),
               token_scales.first + scaled_block * token_scales.stride);
      }
      if (scale_row_ < 2) {
        copy_4(shared_address(&scales.rows[scale_half_][scale_row_]), row_scales + scaled_block);
      }
      barrier_arrive_after_copies(&tables_.arrived[at_.stage]);
      ++done_;
      at_.advance(a_.stages);
    }
  }

  const uint32_t ring_;
  Tables& tables_;
  const ScaledWork& work_;
  const Arguments& a_;
  const int chunk_, row_;
  const int scale_half_, scale_row_;  // which scale this thread copies
  RingPosition at_;
  int done_ = 0;
};

}  // namespace fathom::cuda::scaled_few_tokens
