// A weight matrix repacked for this CPU's vector units: made once while loading, read every step.
//
// Logical shape [rows, cols] = [out, in] as checkpoints store it. The packed order is described in
// packed_matrix.cc; only the kernels depend on it. FP8 values stay FP8 and their scales stay fp32;
// four-bit codes stay four bits (decode steps are bandwidth-bound).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "tensor/buffer.h"
#include "tensor/scaled_matrix.h"

namespace fathom {

enum class WeightFormat { kF32, kBF16, kF8E4M3, kFourBit };

// How a matrix is packed: the format and, of four-bit codes, the rest of it.
struct PackedForm {
  PackedForm() = default;
  PackedForm(WeightFormat of) : format(of) {}  // NOLINT: a format alone is a form

  WeightFormat format = WeightFormat::kBF16;
  FourBitCode code = FourBitCode::kInteger;
  // Columns of a group, 0: the whole row. Below 128 a divisor of it, else a multiple.
  int64_t group_cols = 0;
  DType scales = DType::kF32;  // or kBF16: half the bytes, for scales that bf16 holds exactly
  bool zeros = false;          // whether a group has a zero point
  bool reordered = false;      // whether columns stand in another order (ScaledMatrix::columns)

  friend bool operator==(const PackedForm&, const PackedForm&) = default;
};

class PackedMatrix {
 public:
  PackedMatrix() = default;

  // Not initialised; every row must be packed before use. `purpose` names it in an error.
  static Result<PackedMatrix> allocate(int64_t rows, int64_t cols, const PackedForm& form,
                                       std::string_view purpose);

  // Packs source's rows into rows [first_row, first_row + source.rows()), source.cols() == cols().
  // Calls for disjoint row ranges may run at the same time (on different threads), whatever the
  // ranges' alignment. kF32 takes any source (values * scales); kBF16 takes f32, bf16, f16 and
  // rounds; kF8E4M3 takes e4m3, exactly, with scales of any scale_rows and of a scale_cols that is
  // a multiple of 128 or covers the row; kFourBit takes codes with that form's groups, none
  // of them cut by a slice. The call with the last row also writes the padding.
  void pack(int64_t first_row, const ScaledMatrix& source);

  // Sets the order of the columns of a reordered form: packed column c multiplies columns[c] of x.
  // Required before use, after pack() or before.
  void set_columns(std::span<const int32_t> columns);

  // Another owner of the same memory: ranks of a process share what is equal. Not before pack() has
  // ended is it read.
  PackedMatrix share() const;

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  WeightFormat format() const { return form_.format; }
  const PackedForm& form() const { return form_; }
  int64_t bytes() const { return memory_.size(); }
  // The order of the columns; null if it is that of x.
  const int32_t* columns() const { return columns_ == nullptr ? nullptr : columns_->data(); }
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
  PackedForm form_;
  Buffer memory_;
  std::shared_ptr<std::vector<int32_t>> columns_;  // of reordered forms, shared like the memory
  Buffer rare_steps_;                              // [groups][blocks] of 64 bits
};

}  // namespace fathom
