#include "model/kv_b_split.h"

#include <cstring>

#include "base/math.h"

namespace fathom {
namespace {

// Whether rows [first, first + count) are whole scale blocks, so that a block index counted from
// `first` is an offset into the matrix's own.
bool whole_blocks(const ScaledMatrix& matrix, int64_t first, int64_t count) {
  const int64_t from = matrix.scale_row + first;
  return from % matrix.scale_rows == 0 &&
         (count % matrix.scale_rows == 0 || from + count == matrix.scale_row + matrix.rows());
}

template <typename T>
void transpose_values(const ScaledMatrix& matrix, int64_t first, int64_t count, T* out) {
  for (int64_t r = 0; r < count; ++r) {
    const T* row = matrix.values.row<T>(first + r);
    for (int64_t c = 0; c < matrix.cols(); ++c) out[c * count + r] = row[c];
  }
}

OwnedMatrix dequantized_transpose(const ScaledMatrix& matrix, int64_t first, int64_t count) {
  OwnedMatrix out;
  out.values.resize(static_cast<size_t>(count * matrix.cols()) * sizeof(float));
  auto* values = reinterpret_cast<float*>(out.values.data());
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < matrix.cols(); ++c) {
      values[c * count + r] = matrix.at(first + r, c);
    }
  }
  out.view.values = ConstTensorView(values, {matrix.cols(), count});
  return out;
}

}  // namespace

OwnedMatrix dequantize(const ScaledMatrix& matrix) {
  const int64_t rows = matrix.rows(), cols = matrix.cols();
  OwnedMatrix out;
  out.values.resize(static_cast<size_t>(rows * cols) * sizeof(float));
  auto* const values = reinterpret_cast<float*>(out.values.data());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t column = matrix.columns.empty() ? c : matrix.columns.data<int32_t>()[c];
      values[r * cols + column] = matrix.at(r, c);
    }
  }
  out.view.values = ConstTensorView(values, {rows, cols});
  return out;
}

OwnedMatrix slice_rows(const ScaledMatrix& matrix, int64_t first, int64_t count) {
  OwnedMatrix out;
  const int64_t row_bytes = matrix.cols() * size_of(matrix.values.dtype());
  out.values.resize(static_cast<size_t>(count * row_bytes));
  const auto* source = static_cast<const std::byte*>(matrix.values.raw());
  for (int64_t r = 0; r < count; ++r) {
    std::memcpy(out.values.data() + r * row_bytes,
                source + (first + r) * matrix.values.stride(0) * size_of(matrix.values.dtype()),
                static_cast<size_t>(row_bytes));
  }
  out.view.values =
      ConstTensorView(out.values.data(), matrix.values.dtype(), {count, matrix.cols()});
  if (matrix.scales.empty()) return out;

  const int64_t scale_cols = matrix.scales.size(1);
  const bool whole = whole_blocks(matrix, first, count);
  out.view.scale_rows = whole ? matrix.scale_rows : 1;
  out.view.scale_cols = matrix.scale_cols;
  const int64_t scale_rows = ceil_div(count, out.view.scale_rows);
  for (int64_t b = 0; b < scale_rows; ++b) {
    const float* row = matrix.scales.row<float>(
        (matrix.scale_row + first + b * out.view.scale_rows) / matrix.scale_rows);
    out.scales.insert(out.scales.end(), row, row + scale_cols);
  }
  out.view.scales = ConstTensorView(out.scales.data(), {scale_rows, scale_cols});
  return out;
}

OwnedMatrix transpose_rows(const ScaledMatrix& matrix, int64_t first, int64_t count) {
  const bool scaled = !matrix.scales.empty();
  // Transposed, a per-row scale would be per-column, which no packed form supports.
  if (scaled && (matrix.scale_rows < 128 || !whole_blocks(matrix, first, count))) {
    return dequantized_transpose(matrix, first, count);
  }
  OwnedMatrix out;
  const DType dtype = matrix.values.dtype();
  out.values.resize(static_cast<size_t>(count * matrix.cols() * size_of(dtype)));
  switch (size_of(dtype)) {
    case 1:
      transpose_values(matrix, first, count, reinterpret_cast<e4m3*>(out.values.data()));
      break;
    case 2:
      if (dtype == DType::kBF16) {
        transpose_values(matrix, first, count, reinterpret_cast<bf16*>(out.values.data()));
      } else {
        transpose_values(matrix, first, count, reinterpret_cast<f16*>(out.values.data()));
      }
      break;
    default:
      transpose_values(matrix, first, count, reinterpret_cast<float*>(out.values.data()));
  }
  out.view.values = ConstTensorView(out.values.data(), dtype, {matrix.cols(), count});
  if (!scaled) return out;

  const int64_t row_blocks = ceil_div(count, matrix.scale_rows);
  const int64_t col_blocks = matrix.scales.size(1);
  out.scales.resize(static_cast<size_t>(row_blocks * col_blocks));
  for (int64_t r = 0; r < row_blocks; ++r) {
    const float* row = matrix.scales.row<float>((matrix.scale_row + first) / matrix.scale_rows + r);
    for (int64_t c = 0; c < col_blocks; ++c) out.scales[c * row_blocks + r] = row[c];
  }
  out.view.scale_rows = matrix.scale_cols;
  out.view.scale_cols = matrix.scale_rows;
  out.view.scales = ConstTensorView(out.scales.data(), {col_blocks, row_blocks});
  return out;
}

}  // namespace fathom
