// Random weights in every stored form, and their exact results in double, for the tests of linear
// and moe.
#pragma once

#include <cstring>
#include <vector>

#include "base/math.h"
#include "base/random.h"
#include "ops/linear/packed_matrix.h"

namespace fathom::testing {

enum class Scales { kNone, kTensor, kRow, kBlock };

inline float random_value(uint64_t seed, uint64_t stream, int64_t i) {
  return static_cast<float>(random_uniform(seed, stream, static_cast<uint64_t>(i)) * 2 - 1);
}

inline bool same_bytes(const PackedMatrix& a, const PackedMatrix& b) {
  return a.bytes() == b.bytes() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.bytes())) == 0;
}

template <typename T>
T narrow(float value) {
  if constexpr (std::is_same_v<T, float>) return value;
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(value);
  if constexpr (std::is_same_v<T, f16>) return to_f16(value);
  if constexpr (std::is_same_v<T, e4m3>) return to_e4m3(value * 448);
}

// A matrix as a checkpoint would hold it; owns its values.
struct Source {
  Source(uint64_t seed, int64_t row_count, int64_t column_count, DType dtype, Scales form)
      : rows(row_count), cols(column_count) {
    values.resize(static_cast<size_t>(rows * cols * size_of(dtype)));
    for (int64_t i = 0; i < rows * cols; ++i) {
      const float value = random_value(seed, 1, i);
      if (dtype == DType::kF32) put(i, value);
      if (dtype == DType::kBF16) put(i, to_bf16(value));
      if (dtype == DType::kF16) put(i, to_f16(value));
      // Half of the codes small, so that subnormals take part.
      if (dtype == DType::kF8E4M3) put(i, to_e4m3(value * (i % 2 ? 448.0f : 0.05f)));
    }
    matrix.values = ConstTensorView(values.data(), dtype, {rows, cols});
    if (form == Scales::kNone) return;
    matrix.scale_rows = form == Scales::kTensor ? rows : form == Scales::kRow ? 1 : 128;
    matrix.scale_cols = form == Scales::kBlock ? 128 : cols;
    const int64_t down = ceil_div(rows, matrix.scale_rows);
    const int64_t across = ceil_div(cols, matrix.scale_cols);
    for (int64_t i = 0; i < down * across; ++i) {
      scales.push_back(0.002f * (1.5f + random_value(seed, 2, i)));
    }
    matrix.scales = ConstTensorView(scales.data(), {down, across});
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  template <typename T>
  void put(int64_t i, T value) {
    std::memcpy(values.data() + static_cast<size_t>(i) * sizeof(T), &value, sizeof value);
  }

  // The weight that a packed matrix of this format stands for.
  double weight(WeightFormat format, int64_t row, int64_t col) const {
    const float value = matrix.at(row, col);
    return format == WeightFormat::kBF16 ? to_float(to_bf16(value)) : value;
  }

  int64_t rows, cols;
  std::vector<std::byte> values;
  std::vector<float> scales;
  ScaledMatrix matrix;
};

inline PackedMatrix pack(const Source& source, WeightFormat format) {
  PackedMatrix packed = *PackedMatrix::allocate(source.rows, source.cols, format, "test");
  std::memset(const_cast<std::byte*>(packed.data()), 0xFF, static_cast<size_t>(packed.bytes()));
  packed.pack(0, source.matrix);
  return packed;
}

// Rows of x with a stride, poisoned (NaN) between and after the rows.
template <typename T>
struct Rows {
  Rows(uint64_t seed, int64_t rows, int64_t cols, int64_t padding = 3)
      : stride(cols + padding),
        storage(static_cast<size_t>(rows * stride + 1), narrow<T>(std::nanf(""))) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        storage[static_cast<size_t>(r * stride + c + 1)] =
            narrow<T>(random_value(seed, 3, r * cols + c));
      }
    }
    // One element into the allocation: the code may assume no alignment.
    view = TensorView(storage.data() + 1, {rows, stride}).columns(0, cols);
  }
  int64_t stride;
  std::vector<T> storage;
  TensorView view;
};

struct Expected {
  double value = 0;      // the sum
  double magnitude = 0;  // the sum of the products' magnitudes, which scales rounding errors
};

template <typename T>
Expected product(ConstTensorView x, int64_t m, const Source& source, WeightFormat format,
                 int64_t n) {
  Expected expected;
  for (int64_t k = 0; k < source.cols; ++k) {
    const double term = to_float(x.row<T>(m)[k]) * source.weight(format, n, k);
    expected.value += term;
    expected.magnitude += std::abs(term);
  }
  return expected;
}

}  // namespace fathom::testing
