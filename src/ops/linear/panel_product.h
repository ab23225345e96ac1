// Multiplies some rows of x with some pairs of panels: the base of linear, mlp and moe.
#pragma once

#include <span>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/packed_matrix.h"
#include "tensor/tensor_view.h"

namespace fathom {

// Limits of one call: sums (96 KiB), blocks of x (128 KiB) and the weights being read stay in an L2
// cache of 1 MiB; a tile of x (3 KiB in bf16) and a block of weights (8 KiB) stay in L1.
constexpr int64_t kMaxProductRows = 96;
constexpr int64_t kMaxProductPairs = 8;

// Rows of x, bf16 or f32: row i is row index[first + i] of data, or row first + i without an index
// (an expert's tokens have one).
struct ProductRows {
  ConstTensorView x;
  const int32_t* index = nullptr;
  int64_t first = 0;

  ProductRows from(int64_t offset) const { return {x, index, first + offset}; }
  const std::byte* row(int64_t i) const {
    const int64_t r = index == nullptr ? first + i : index[first + i];
    return static_cast<const std::byte*>(x.raw()) + r * x.stride(0) * size_of(x.dtype());
  }
  // One value of row i: bf16 of bf16 rows, or fp32.
  template <typename T>
  T value(int64_t i, int64_t column) const {
    if constexpr (std::is_same_v<T, float>) {
      if (x.dtype() == DType::kBF16) return to_float(reinterpret_cast<const bf16*>(row(i))[column]);
    }
    return reinterpret_cast<const T*>(row(i))[column];
  }
};

// sums[pair - first_pair][row][32] = the row times the pair's 32 weight rows, for `rows` <=
// kMaxProductRows and num_pairs <= kMaxProductPairs. Runs on the calling thread.
void multiply_pairs(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                    const PackedMatrix& weight, int64_t first_pair, int64_t num_pairs, float* sums);

// As many blocks of rows as needed, equally high: block i is [begin(i), begin(i + 1)).
class RowBlocks {
 public:
  explicit RowBlocks(int64_t rows)
      : rows_(rows), count_((rows + kMaxProductRows - 1) / kMaxProductRows) {}
  int64_t count() const { return count_; }
  int64_t begin(int64_t block) const { return rows_ * block / count_; }

 private:
  int64_t rows_, count_;
};

// Cuts `parts` pieces of work that cost `costs` into contiguous shares of about equal cost.
class CostSplit {
 public:
  CostSplit(int64_t total_cost, int share, int num_shares)
      : begin_(total_cost * share / num_shares), end_(total_cost * (share + 1) / num_shares) {}

  struct Range {
    int64_t begin, end;
  };
  // The part of the next `count` units, each of `cost`, that falls into this share. Every share
  // must be called with the same sequence.
  Range next(int64_t count, int64_t cost) {
    const Range range = {cut(begin_, count, cost), cut(end_, count, cost)};
    base_ += count * cost;
    return range;
  }

 private:
  int64_t cut(int64_t at, int64_t count, int64_t cost) const {
    const int64_t unit = (at - base_ + cost / 2) / (cost > 0 ? cost : 1);
    return at <= base_ ? 0 : unit > count ? count : unit;
  }
  int64_t begin_, end_, base_ = 0;
};

}  // namespace fathom
