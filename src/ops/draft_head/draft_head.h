// A head in 8-bit integers, for logits that only choose drafts: half of bf16's bytes and a fraction
// of its instructions. What a draft is decides how many tokens a step gives, never which.
//
// Weights have 7 bits and a scale a row, a row of x has 8 bits and one scale. Sums are of integers
// and exact, so every CPU gives the same bits.
#pragma once

#include <cstddef>
#include <span>

#include "device/stream.h"
#include "tensor/buffer.h"
#include "tensor/scaled_matrix.h"

namespace fathom {

class DraftHead {
 public:
  DraftHead() = default;

  // Sums of as many products fit into 32 bits.
  static constexpr int64_t kMostCols = 1 << 16;

  // [rows, cols] = [vocabulary, hidden], up to kMostCols. Not initialised; every row must be packed
  // before use. `purpose` names it in an error.
  static Result<DraftHead> allocate(int64_t rows, int64_t cols, std::string_view purpose);

  // Quantizes all rows of a matrix [rows, cols] of any type but four-bit codes. A row with a value
  // that is not finite becomes zero.
  void pack(const ScaledMatrix& source);

  // Another owner of the same memory: ranks of a process share what is equal. Not before pack() has
  // ended is it read.
  DraftHead share() const;

  // Bytes of a head of this shape.
  static int64_t bytes_of(int64_t rows, int64_t cols);

  bool empty() const { return rows_ == 0; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t bytes() const { return empty() ? 0 : bytes_of(rows_, cols_); }

 private:
  friend void approximate_logits(const Stream& stream, ConstTensorView x, const DraftHead& head,
                                 std::span<std::byte> scratch, TensorView out);

  int64_t rows_ = 0;
  int64_t cols_ = 0;
  Buffer codes_;    // as draft_head_kernels.h says
  Buffer scales_;   // [rows padded to panels] f32
  Buffer offsets_;  // [rows padded to panels] i32: kZero times the sum of a row's codes
};

// What approximate_logits() needs for `count` rows of x.
int64_t draft_scratch_bytes(int64_t count, int64_t cols);

// out [n, head.rows()] f32 = x [n, head.cols()] (bf16 or f32) times the head, about. A value of x
// that is not finite counts as some finite one. `scratch` is aligned to 4 bytes.
void approximate_logits(const Stream& stream, ConstTensorView x, const DraftHead& head,
                        std::span<std::byte> scratch, TensorView out);

}  // namespace fathom
