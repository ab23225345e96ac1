// The way of a loading thread's tensors into device memory. Values are read into pinned memory as
// they are stored, a piece copied while the next is being read; kernels convert them on the device
// (weight_convert_cuda.h). Made-up values (--load-format dummy) come from a kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/status.h"
#include "checkpoint/load_plan.h"
#include "device/cuda/device_array.h"
#include "device/cuda/pinned_array.h"
#include "model/weight_convert_cuda.h"
#include "tensor/scaled_matrix.h"

namespace fathom::cuda {

// A matrix on its way. Its values have a type and a shape, but no memory: they are read or made up.
struct WeightSource {
  ScaledMatrix matrix;
  ReadValues read;
  std::optional<DummyValues> dummy;
};

// One thread's; on the device that is current when it is made.
class WeightUpload {
 public:
  WeightUpload();
  ~WeightUpload();
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  // All of the matrix; done when it returns. What is e4m3 stays so bit for bit where the place has
  // room for its scales (a scale a row needs row_scales) and is quantised anew elsewhere. An error
  // says which weight is not finite and cannot be quantised.
  Result<> copy(const WeightSource& source, const WeightPlace& place);

  // kv_b has been copied; done when it returns.
  void split(const KvBSplit& split);

 private:
  static constexpr int kPieces = 2;
  // Long enough for the copy's rate, and no longer: to pin memory takes its time too.
  static constexpr int64_t kPieceBytes = 4 << 20;

  struct Piece;
  Result<> stage(const WeightSource& source, const Piece& piece, int64_t stride, void* to);
  Result<> read(const WeightSource& source, const Piece& piece, std::byte* to);
  Result<> copy_as_stored(const WeightSource& source, const WeightPlace& place);
  Result<> convert(const WeightSource& source, const WeightPlace& place);
  void copy_scales(const ScaledMatrix& matrix, const WeightPlace& place);
  void upload_scales(float* to);
  void begin_piece();
  void end_piece();

  PinnedArray<std::byte> pinned_{kPieces * kPieceBytes};
  DeviceArray<std::byte> stored_;     // pieces to convert; allocated for the first
  DeviceArray<float> stored_scales_;  // of the matrix that is converted
  DeviceArray<int32_t> not_finite_;   // what convert_piece() says
  std::vector<float> scales_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t done_[kPieces] = {};  // a piece's memory is free again
  int turn_ = 0;                    // the piece on its way
};

}  // namespace fathom::cuda
