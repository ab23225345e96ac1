// The way of a loading thread's tensors into device memory: rounded to their type in pinned memory,
// copied while the next piece is being rounded.
#pragma once

#include <cstddef>
#include <vector>

#include "device/cuda/pinned_array.h"
#include "tensor/scaled_matrix.h"

namespace fathom::cuda {

// Where a matrix comes to lie in device memory: [rows, cols] dense, zeros where the matrix ends
// before. With e4m3 rows and cols are the whole blocks of 128 that the matrix begins, but rows that
// nothing follows.
struct WeightPlace {
  DType type = DType::kBF16;  // kBF16, kF32 or kF8E4M3
  void* values = nullptr;
  float* scales = nullptr;      // [rows / 128 rounded up, cols / 128], of e4m3
  float* row_scales = nullptr;  // [rows], of e4m3 with a scale a row; null otherwise
  int64_t rows = 0, cols = 0;
};

// One thread's; on the device that is current when it is made.
class WeightUpload {
 public:
  WeightUpload();
  ~WeightUpload();
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  // All of the matrix; done when it returns. To e4m3 only from e4m3.
  void copy(const ScaledMatrix& matrix, const WeightPlace& place);

 private:
  static constexpr int kPieces = 2;
  static constexpr int64_t kPieceBytes = 8 << 20;

  void copy_scales(const ScaledMatrix& matrix, const WeightPlace& place);

  PinnedArray<std::byte> memory_{kPieces * kPieceBytes};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t copied_[kPieces] = {};
  int turn_ = 0;
  std::vector<float> scales_;
};

}  // namespace fathom::cuda
