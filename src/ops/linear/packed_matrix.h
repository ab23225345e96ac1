// A weight matrix repacked for this CPU's vector units: made once while loading, read every step.
//
// Logical shape [rows, cols] = [out, in] as checkpoints store it. The packed order is described in
// packed_matrix.cc; only the kernels depend on it. FP8 values stay FP8 and their scales stay fp32
// (decode steps are bandwidth-bound).
#pragma once

#include "tensor/buffer.h"
#include "tensor/scaled_matrix.h"

namespace fathom {

enum class WeightFormat { kF32, kBF16, kF8E4M3 };

class PackedMatrix {
 public:
  PackedMatrix() = default;

  // Not initialised; every row must be packed before use. `purpose` names it in an error.
  static Result<PackedMatrix> allocate(int64_t rows, int64_t cols, WeightFormat format,
                                       std::string_view purpose);

  // Packs source's rows into rows [first_row, first_row + source.rows()), source.cols() == cols().
  // Calls for disjoint row ranges may run at the same time (on different threads), whatever the
  // ranges' alignment. kF32 takes any source (values * scales); kBF16 takes f32, bf16, f16 and
  // rounds; kF8E4M3 takes e4m3, exactly, with scales of any scale_rows and of a scale_cols that is
  // a multiple of 128 or covers the row. The call with the last row also writes the padding.
  void pack(int64_t first_row, const ScaledMatrix& source);

  // Another owner of the same memory: ranks of a process share what is equal. Not before pack() has
  // ended is it read.
  PackedMatrix share() const;

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  WeightFormat format() const { return format_; }
  int64_t bytes() const { return memory_.size(); }
  // The first byte of the packed order, for the kernels.
  const std::byte* data() const { return memory_.data(); }
  // kF8E4M3: for a group of 64 rows, a word for each block of 128 columns from `block` on; bit s
  // says whether columns 2s and 2s + 1 have a zero, a subnormal or a NaN, which the kernels
  // dequantize more slowly. Else null.
  const uint64_t* rare_steps(int64_t group, int64_t block) const;

 private:
  void mark_rare_steps(int64_t first_row, ConstTensorView codes);

  int64_t rows_ = 0;
  int64_t cols_ = 0;
  WeightFormat format_ = WeightFormat::kBF16;
  Buffer memory_;
  Buffer rare_steps_;  // [groups][blocks] of 64 bits
};

}  // namespace fathom
