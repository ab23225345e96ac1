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

// Up to so many rows the weights are read once, by vectors: memory decides.
constexpr int64_t kFewRows = 16;

// sums[pair - first_pair][row][32] = the row times the pair's 32 weight rows, for `rows` <=
// kMaxProductRows and num_pairs <= kMaxProductPairs. Runs on the calling thread.
void multiply_pairs(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                    const PackedMatrix& weight, int64_t first_pair, int64_t num_pairs, float* sums);

// sums[row][32] = the row times one block of 128 columns of the pair's weight rows, which are fp32;
// rows <= kFewRows of fp32. A row's whole sum is the blocks' sums added in their order.
void multiply_block(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                    const PackedMatrix& weight, int64_t pair, int64_t block, float* sums);

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

// A contiguous part of a sequence of work units, cut by their costs.
class CostSplit {
 public:
  // The part between two sums of costs.
  CostSplit(int64_t begin, int64_t end) : begin_(begin), end_(end) {}

  struct Range {
    int64_t begin, end;
  };
  // The part of the next `count` units, each of `cost`, that falls between the sums. Every part
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

// Cuts work into pieces for ThreadPool::run_pieces(), by cost. With many rows each thread has one
// piece, all of equal cost. Few rows wait for memory, which threads read at different rates: there
// each thread's piece is its share of three quarters of the work, and the rest is cut into small
// pieces for the threads that are done first.
class CostPieces {
 public:
  // least_cost: of a small piece; if small pieces would cost less, there are none.
  CostPieces(int64_t total_cost, int threads, bool few_rows, int64_t least_cost)
      : total_(total_cost), threads_(threads) {
    if (few_rows && threads > 1 && total_cost / (int64_t{kSmall} * threads) >= least_cost) {
      first_ = total_cost / 4 * 3;
      count_ = threads + threads * kSmall / 4;
    } else {
      first_ = total_cost;
      count_ = threads;
    }
  }

  int count() const { return count_; }
  CostSplit piece(int i) const {
    if (i < threads_) return {first_ * i / threads_, first_ * (i + 1) / threads_};
    const int64_t rest = total_ - first_, small = count_ - threads_, at = i - threads_;
    return {first_ + rest * at / small, first_ + rest * (at + 1) / small};
  }

 private:
  static constexpr int kSmall = 8;  // small pieces in an equal share
  int64_t total_, first_;
  int threads_, count_;
};

}  // namespace fathom
