// The way of a loading thread's tensors into device memory: rounded to their type in pinned memory,
// copied while the next piece is being rounded.
#pragma once

#include <cstddef>

#include "device/cuda/pinned_array.h"
#include "tensor/scaled_matrix.h"

namespace fathom::cuda {

// One thread's; on the device that is current when it is made.
class WeightUpload {
 public:
  WeightUpload();
  ~WeightUpload();
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  // All of the matrix, rows dense, as T (bf16 or float), to device memory; done when it returns.
  template <typename T>
  void copy(const ScaledMatrix& matrix, T* to);

 private:
  static constexpr int kPieces = 2;
  static constexpr int64_t kPieceBytes = 8 << 20;

  PinnedArray<std::byte> memory_{kPieces * kPieceBytes};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t copied_[kPieces] = {};
  int turn_ = 0;
};

}  // namespace fathom::cuda
