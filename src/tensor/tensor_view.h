// A non-owning view of a tensor: pointer, element type, shape and strides.
//
// Up to four dimensions; the last one is contiguous (stride 1) unless an operation says otherwise.
// The element type is a run-time value, so that model code is written once for all types; data<T>()
// returns the data as T and checks the type.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "base/check.h"
#include "tensor/dtype.h"

namespace fathom {

inline constexpr int kMaxRank = 4;

template <bool kConst>
class BasicTensorView {
 public:
  using Pointer = std::conditional_t<kConst, const void*, void*>;
  template <typename T>
  using Element = std::conditional_t<kConst, const T, T>;

  BasicTensorView() = default;

  // A dense view: row-major, without gaps.
  BasicTensorView(Pointer data, DType dtype, std::initializer_list<int64_t> shape)
      : data_(data), dtype_(dtype), rank_(static_cast<int>(shape.size())) {
    FATHOM_CHECK(rank_ <= kMaxRank, "rank {}", rank_);
    int i = 0;
    for (const int64_t size : shape) shape_[i++] = size;
    int64_t stride = 1;
    for (int d = rank_ - 1; d >= 0; --d) {
      strides_[d] = stride;
      stride *= shape_[d];
    }
  }

  template <typename T>
  BasicTensorView(T* data, std::initializer_list<int64_t> shape)
      : BasicTensorView(static_cast<Pointer>(data), kDTypeOf<T>, shape) {}

  // A mutable view converts to a const one.
  template <bool kOther>
  requires(kConst && !kOther) BasicTensorView(const BasicTensorView<kOther>& other)
      : data_(other.data_),
        dtype_(other.dtype_),
        rank_(other.rank_),
        shape_(other.shape_),
        strides_(other.strides_) {}

  bool empty() const { return data_ == nullptr; }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  int64_t size(int dimension) const { return shape_[check_dimension(dimension)]; }
  int64_t stride(int dimension) const { return strides_[check_dimension(dimension)]; }
  int64_t num_elements() const {
    int64_t count = 1;
    for (int d = 0; d < rank_; ++d) count *= shape_[d];
    return count;
  }

  Pointer raw() const { return data_; }

  template <typename T>
  Element<T>* data() const {
    FATHOM_CHECK(kDTypeOf<T> == dtype_, "the tensor holds {}, asked for {}", name_of(dtype_),
                 name_of(kDTypeOf<T>));
    return static_cast<Element<T>*>(data_);
  }

  // A pointer to row i of a view of rank 2, or to slice i of one of higher rank.
  template <typename T>
  Element<T>* row(int64_t i) const {
    return data<T>() + i * strides_[0];
  }

  // Rows [first, first + count) of dimension 0.
  BasicTensorView rows(int64_t first, int64_t count) const {
    FATHOM_CHECK(rank_ >= 1 && first >= 0 && count >= 0 && first + count <= shape_[0],
                 "rows {}+{} of {}", first, count, shape_[0]);
    BasicTensorView view = *this;
    view.data_ = offset(first * strides_[0]);
    view.shape_[0] = count;
    return view;
  }

  // Index i of a dimension other than the last, which is removed: select(1, h) of [rows, heads, n]
  // is head h's [rows, n], strided.
  BasicTensorView select(int dimension, int64_t i) const {
    FATHOM_CHECK(dimension >= 0 && dimension < rank_ - 1 && i >= 0 && i < shape_[dimension],
                 "index {} of dimension {} of {}", i, dimension, shape_string());
    BasicTensorView view = *this;
    view.data_ = offset(i * strides_[dimension]);
    view.rank_ = rank_ - 1;
    for (int d = dimension; d < view.rank_; ++d) {
      view.shape_[d] = shape_[d + 1];
      view.strides_[d] = strides_[d + 1];
    }
    return view;
  }

  // The same elements in another shape. The view must be dense.
  BasicTensorView reshape(std::initializer_list<int64_t> shape) const {
    const BasicTensorView dense(data_, dtype_, shape);
    FATHOM_CHECK(is_dense() && dense.num_elements() == num_elements(), "{} as {}", shape_string(),
                 dense.shape_string());
    return dense;
  }

  bool is_dense() const {
    int64_t stride = 1;
    for (int d = rank_ - 1; d >= 0; --d) {
      if (shape_[d] != 1 && strides_[d] != stride) return false;
      stride *= shape_[d];
    }
    return true;
  }

  // Columns [first, first + count) of the last dimension.
  BasicTensorView columns(int64_t first, int64_t count) const {
    const int last = rank_ - 1;
    FATHOM_CHECK(rank_ >= 1 && first >= 0 && count >= 0 && first + count <= shape_[last],
                 "columns {}+{} of {}", first, count, shape_[last]);
    BasicTensorView view = *this;
    view.data_ = offset(first * strides_[last]);
    view.shape_[last] = count;
    return view;
  }

  std::string shape_string() const {
    std::string text = "[";
    for (int d = 0; d < rank_; ++d) text += (d ? ", " : "") + std::to_string(shape_[d]);
    return text + "]";
  }

 private:
  template <bool>
  friend class BasicTensorView;

  int check_dimension(int dimension) const {
    FATHOM_CHECK(dimension >= 0 && dimension < rank_, "dimension {} of rank {}", dimension, rank_);
    return dimension;
  }

  Pointer offset(int64_t elements) const {
    using Byte = std::conditional_t<kConst, const std::byte, std::byte>;
    return static_cast<Byte*>(data_) + elements * size_of(dtype_);
  }

  Pointer data_ = nullptr;
  DType dtype_ = DType::kF32;
  int rank_ = 0;
  std::array<int64_t, kMaxRank> shape_{};
  std::array<int64_t, kMaxRank> strides_{};
};

using TensorView = BasicTensorView<false>;
using ConstTensorView = BasicTensorView<true>;

}  // namespace fathom
