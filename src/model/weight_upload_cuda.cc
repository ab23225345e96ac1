#include "model/weight_upload_cuda.h"

#include <algorithm>
#include <cstring>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kBlock = 128;

template <typename T>
T rounded(float value);
template <>
bf16 rounded<bf16>(float value) {
  return to_bf16(value);
}
template <>
float rounded<float>(float value) {
  return value;
}

// One row's values as T.
template <typename T>
void convert_row(const ScaledMatrix& matrix, int64_t row, T* out) {
  const int64_t cols = matrix.cols();
  const bool exact = matrix.scales.empty() || kDTypeOf<T> == DType::kF8E4M3;
  if (matrix.values.dtype() == kDTypeOf<T> && exact) {
    std::memcpy(out, matrix.values.row<T>(row), static_cast<size_t>(cols) * sizeof(T));
    return;
  }
  if constexpr (std::is_same_v<T, e4m3>) {
    FATHOM_CHECK(false, "e4m3 from {}", name_of(matrix.values.dtype()));
  } else {
    for (int64_t c = 0; c < cols; ++c) out[c] = rounded<T>(matrix.at(row, c));
  }
}

// Rows [first, first + count) of what lies at the place.
template <typename T>
void convert_rows(const ScaledMatrix& matrix, int64_t first, int64_t count, int64_t cols, T* out) {
  const int64_t filled = matrix.cols();
  for (int64_t r = first; r < first + count; ++r, out += cols) {
    const bool inside = r < matrix.rows();
    if (inside) convert_row(matrix, r, out);
    const int64_t end = inside ? filled : 0;
    std::fill(out + end, out + cols, T{});
  }
}

void convert_rows(const ScaledMatrix& matrix, int64_t first, int64_t count,
                  const WeightPlace& place, std::byte* out) {
  switch (place.type) {
    case DType::kBF16:
      return convert_rows(matrix, first, count, place.cols, reinterpret_cast<bf16*>(out));
    case DType::kF32:
      return convert_rows(matrix, first, count, place.cols, reinterpret_cast<float*>(out));
    case DType::kF8E4M3:
      return convert_rows(matrix, first, count, place.cols, reinterpret_cast<e4m3*>(out));
    default:
      FATHOM_CHECK(false, "weights of type {}", name_of(place.type));
  }
}

}  // namespace

WeightUpload::WeightUpload() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  for (cudaEvent_t& event : copied_) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  }
}

WeightUpload::~WeightUpload() {
  for (const cudaEvent_t event : copied_) cudaEventDestroy(event);
  cudaStreamDestroy(stream_);
}

void WeightUpload::copy(const ScaledMatrix& matrix, const WeightPlace& place) {
  const int64_t row_bytes = place.cols * size_of(place.type);
  FATHOM_CHECK(row_bytes <= kPieceBytes, "a row of {} bytes", row_bytes);
  const int64_t most = kPieceBytes / row_bytes;
  for (int64_t first = 0; first < place.rows; first += most) {
    const int64_t count = std::min(most, place.rows - first);
    const int piece = turn_++ % kPieces;
    std::byte* const staged = memory_.data() + piece * kPieceBytes;
    check(cudaEventSynchronize(copied_[piece]), "copying weights to the device");
    convert_rows(matrix, first, count, place, staged);
    check(cudaMemcpyAsync(static_cast<std::byte*>(place.values) + first * row_bytes, staged,
                          static_cast<size_t>(count * row_bytes), cudaMemcpyHostToDevice, stream_),
          "copying weights to the device");
    check(cudaEventRecord(copied_[piece], stream_), "copying weights to the device");
  }
  if (place.type == DType::kF8E4M3) copy_scales(matrix, place);
  check(cudaStreamSynchronize(stream_), "copying weights to the device");
}

void WeightUpload::copy_scales(const ScaledMatrix& matrix, const WeightPlace& place) {
  const bool by_row = place.row_scales != nullptr;
  const auto upload = [&](float* to) {
    check(cudaMemcpyAsync(to, scales_.data(), scales_.size() * sizeof(float),
                          cudaMemcpyHostToDevice, stream_),
          "copying scales to the device");
    check(cudaStreamSynchronize(stream_), "copying scales to the device");
  };
  scales_.clear();
  for (int64_t r = 0; r < place.rows; r += kBlock) {
    for (int64_t c = 0; c < place.cols; c += kBlock) {
      scales_.push_back(by_row ? 1.0f : matrix.scale_at(std::min(r, matrix.rows() - 1), c));
    }
  }
  upload(place.scales);
  if (!by_row) return;
  scales_.clear();
  for (int64_t r = 0; r < place.rows; ++r) {
    scales_.push_back(r < matrix.rows() ? matrix.scale_at(r, 0) : 1.0f);
  }
  upload(place.row_scales);
}

}  // namespace fathom::cuda
