// Uploads a loading thread's tensors into device memory. Values are read into pinned memory as
// stored, a piece copied while the next is being read; kernels convert them on the device
// (weight_convert_cuda.h). Dummy values (--load-format dummy) come from a kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/status.h"
#include "checkpoint/load_plan.h"
#include "device/cuda/device_array.h"
#include "device/cuda/pinned_array.h"
#include "model/model_spec.h"
#include "model/weight_convert_cuda.h"
#include "tensor/scaled_matrix.h"

namespace fathom::cuda {

// A part of a stored matrix to upload. Its values have a type and a shape, but no memory: they are
// read from a file or generated.
struct WeightSource {
  ScaledMatrix matrix;  // of the part; the scales are the whole matrix's
  const TensorPart& part;
  ReadValues read = {};  // of the whole matrix's values
  std::optional<DummyValues> dummy = {};
};

// Used by one thread; on the device that is current at construction.
class WeightUpload {
 public:
  WeightUpload();
  ~WeightUpload();
  WeightUpload(const WeightUpload&) = delete;
  WeightUpload& operator=(const WeightUpload&) = delete;

  // Uploads the part; done on return. e4m3 stays bitwise as stored where the place has room
  // for its scales (per-row scales need row_scales) and is requantized elsewhere. The error names a
  // weight that is not finite and cannot be quantized.
  Result<> copy(const WeightSource& source, const WeightPlace& place);

  // Splits kv_b, which has been uploaded; done on return.
  void split(const KvBSplit& split);

 private:
  static constexpr int kPieces = 2;
  // Long enough for full copy rate, and no longer: pinning memory takes time, too.
  static constexpr int64_t kPieceBytes = 4 << 20;

  struct Piece;
  Result<> stage(const WeightSource& source, const Piece& piece, int64_t stride, void* to);
  Result<> copy_as_stored(const WeightSource& source, const WeightPlace& place);
  Result<> convert(const WeightSource& source, const WeightPlace& place);
  void copy_scales(const ScaledMatrix& matrix, const WeightPlace& place);
  void upload_scales(float* to);
  void begin_piece();
  void end_piece();

  PinnedArray<std::byte> pinned_{kPieces * kPieceBytes};
  DeviceArray<std::byte> stored_;     // pieces to convert; allocated for the first
  DeviceArray<float> stored_scales_;  // of the matrix being converted
  DeviceArray<int32_t> not_finite_;   // set by convert_piece()
  std::vector<float> scales_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t done_[kPieces] = {};  // a piece's memory is free again
  int turn_ = 0;                    // the current piece
};

}  // namespace fathom::cuda
