// Byte offsets inside a packed matrix (the drawing is in packed_matrix.cc).
#pragma once

#include "base/math.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/packed_matrix.h"

namespace fathom {

class PanelLayout {
 public:
  PanelLayout(int64_t rows, int64_t columns, const PackedForm& form)
      : rows_(rows),
        columns_(columns),
        block_columns_(columns_of_block(form)),
        step_columns_(columns_of_step(form.format)),
        step_bytes_(form.format == WeightFormat::kF8E4M3 || form.format == WeightFormat::kFourBit
                        ? 64
                        : 128),
        scale_bytes_(kPairRows * bytes_of_scale(form)) {}
  explicit PanelLayout(const PackedMatrix& matrix)
      : PanelLayout(matrix.rows(), matrix.cols(), matrix.form()) {}

  int64_t num_pairs() const { return ceil_div(rows_, kPairRows); }
  int64_t num_blocks() const { return ceil_div(columns_, block_columns_); }
  int64_t block_columns() const { return block_columns_; }
  // Bytes of one pair's scales and of the zero points behind them.
  int64_t scale_bytes() const { return scale_bytes_; }
  int64_t step_bytes() const { return step_bytes_; }
  int64_t step_columns() const { return step_columns_; }

  // Pairs in the group that `pair` belongs to: 2, or 1 at an odd end.
  int64_t pairs_of_group(int64_t pair) const { return (pair | 1) < num_pairs() ? 2 : 1; }
  // Pairs of the same group from `pair` on and before `end`.
  int64_t rest_of_group(int64_t pair, int64_t end) const {
    const int64_t rest = pairs_of_group(pair) - pair % 2;
    return rest < end - pair ? rest : end - pair;
  }
  int64_t steps_of_block(int64_t block) const {
    const int64_t left = columns_ - block * block_columns_;
    return ceil_div(left < block_columns_ ? left : block_columns_, step_columns_);
  }

  // Bytes from a group's block to its next one.
  int64_t block_stride(int64_t pairs) const {
    return pairs * (block_columns_ / step_columns_ * step_bytes_ + scale_bytes_);
  }
  // Bytes from a pair's step to its next one.
  int64_t step_stride(int64_t pairs) const { return pairs * step_bytes_; }

  // Offset of the first step of a pair's block, and of its 32 scales.
  int64_t block_offset(int64_t pair, int64_t block) const {
    return pair / 2 * pair_total() * 2 + block * block_stride(pairs_of_group(pair)) +
           pair % 2 * step_bytes_;
  }
  int64_t scales_offset(int64_t pair, int64_t block) const {
    const int64_t pairs = pairs_of_group(pair);
    return pair / 2 * pair_total() * 2 + block * block_stride(pairs) +
           steps_of_block(block) * step_stride(pairs) + pair % 2 * scale_bytes_;
  }

  // Bytes of one pair over all columns; a group's is pairs times it.
  int64_t pair_total() const {
    if (num_blocks() == 0) return 0;
    const int64_t last = num_blocks() - 1;
    return last * block_stride(1) + steps_of_block(last) * step_bytes_ + scale_bytes_;
  }
  int64_t total_bytes() const { return num_pairs() * pair_total(); }

 private:
  static int64_t columns_of_block(const PackedForm& form) {
    const bool narrow = form.format == WeightFormat::kFourBit && form.group_cols > 0;
    return narrow && form.group_cols < kBlockColumns ? form.group_cols : kBlockColumns;
  }
  static int64_t columns_of_step(WeightFormat format) {
    if (format == WeightFormat::kF32) return 1;
    return format == WeightFormat::kFourBit ? 4 : 2;
  }
  static int64_t bytes_of_scale(const PackedForm& form) {
    if (form.format == WeightFormat::kF8E4M3) return 4;
    if (form.format != WeightFormat::kFourBit) return 0;
    return size_of(form.scales) + (form.zeros ? 1 : 0);
  }

  int64_t rows_, columns_, block_columns_, step_columns_, step_bytes_, scale_bytes_;
};

}  // namespace fathom
