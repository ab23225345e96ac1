#include "model/weight_upload_cuda.h"

#include <algorithm>
#include <cstring>

namespace fathom::cuda {
namespace {

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

// Rows [first, first + count) as T.
template <typename T>
void convert_rows(const ScaledMatrix& matrix, int64_t first, int64_t count, T* out) {
  const int64_t cols = matrix.cols();
  if (matrix.values.dtype() == kDTypeOf<T> && matrix.scales.empty() && matrix.values.is_dense()) {
    std::memcpy(out, matrix.values.row<T>(first), static_cast<size_t>(count * cols) * sizeof(T));
    return;
  }
  for (int64_t r = first; r < first + count; ++r) {
    for (int64_t c = 0; c < cols; ++c) *out++ = rounded<T>(matrix.at(r, c));
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

template <typename T>
void WeightUpload::copy(const ScaledMatrix& matrix, T* to) {
  const int64_t cols = matrix.cols(), row_bytes = cols * static_cast<int64_t>(sizeof(T));
  FATHOM_CHECK(row_bytes <= kPieceBytes, "a row of {} bytes", row_bytes);
  const int64_t most = kPieceBytes / row_bytes;
  for (int64_t first = 0; first < matrix.rows(); first += most) {
    const int64_t count = std::min(most, matrix.rows() - first);
    const int piece = turn_++ % kPieces;
    T* const staged = reinterpret_cast<T*>(memory_.data() + piece * kPieceBytes);
    check(cudaEventSynchronize(copied_[piece]), "copying weights to the device");
    convert_rows(matrix, first, count, staged);
    check(cudaMemcpyAsync(to + first * cols, staged, static_cast<size_t>(count * row_bytes),
                          cudaMemcpyHostToDevice, stream_),
          "copying weights to the device");
    check(cudaEventRecord(copied_[piece], stream_), "copying weights to the device");
  }
  check(cudaStreamSynchronize(stream_), "copying weights to the device");
}

template void WeightUpload::copy(const ScaledMatrix& matrix, bf16* to);
template void WeightUpload::copy(const ScaledMatrix& matrix, float* to);

}  // namespace fathom::cuda
