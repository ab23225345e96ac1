#include "model/weight_upload_cuda.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "tensor/scale_form.h"

namespace fathom::cuda {
namespace {

constexpr const char* kCopying = "copying weights to the device";

bool is_scaled_by_row(const ScaledMatrix& matrix) {
  return !matrix.scales.empty() && matrix.scale_rows == 1 && matrix.rows() > 1;
}

// Whether the place can hold the values unconverted.
bool fits_as_stored(const ScaledMatrix& matrix, const WeightPlace& place) {
  if (matrix.values.dtype() != place.type) return false;
  if (place.type != DType::kF8E4M3) return matrix.scales.empty();
  return !is_scaled_by_row(matrix) || place.row_scales != nullptr;
}

// Reads [rows, cols] of the part from [row, col] on, dense.
Result<> read(const WeightSource& source, Slice rows, Slice cols, std::byte* to) {
  if (rows.count == 0 || cols.count == 0) return {};
  const int64_t size = size_of(source.matrix.values.dtype()), stored_cols = source.part.num_cols;
  const int64_t first =
      (source.part.rows.first + rows.first) * stored_cols + source.part.cols.first + cols.first;
  if (cols.count == stored_cols) {
    return source.read(first * size, {to, static_cast<size_t>(rows.count * stored_cols * size)});
  }
  const auto row_bytes = static_cast<size_t>(cols.count * size);
  for (int64_t r = 0; r < rows.count; ++r) {
    FATHOM_RETURN_IF_ERROR(source.read((first + r * stored_cols) * size, {to, row_bytes}));
    to += row_bytes;
  }
  return {};
}

// Finds the weight that is not finite, after the device has seen one; returns the error.
Result<> not_finite(const WeightSource& source) {
  ScaledMatrix matrix = source.matrix;
  const DType type = matrix.values.dtype();
  std::vector<std::byte> values(static_cast<size_t>(matrix.rows() * matrix.cols() * size_of(type)));
  FATHOM_RETURN_IF_ERROR(read(source, {0, matrix.rows()}, {0, matrix.cols()}, values.data()));
  matrix.values = ConstTensorView(values.data(), type, {matrix.rows(), matrix.cols()});
  for (int64_t r = 0; r < matrix.rows(); ++r) {
    for (int64_t c = 0; c < matrix.cols(); ++c) {
      if (std::isfinite(matrix.at(r, c))) continue;
      return invalid("holds {} at [{}, {}]; only finite weights can be quantised", matrix.at(r, c),
                     source.part.rows.first + r, source.part.cols.first + c);
    }
  }
  FATHOM_CHECK(false, "finite weights were found not to be");
}

}  // namespace

// A piece's stored range and destination, in coordinates of the place.
struct WeightUpload::Piece {
  int64_t first_row = 0, first_col = 0, filled_rows = 0, filled_cols = 0;
  int64_t rows = 0, cols = 0;  // stored; the rest is zeros

  Piece(const ScaledMatrix& matrix, int64_t row, int64_t col, int64_t most_rows, int64_t most_cols)
      : first_row(row),
        first_col(col),
        filled_rows(most_rows),
        filled_cols(most_cols),
        rows(std::clamp<int64_t>(matrix.rows() - row, 0, most_rows)),
        cols(std::clamp<int64_t>(matrix.cols() - col, 0, most_cols)) {}
};

WeightUpload::WeightUpload() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  for (cudaEvent_t& event : done_) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  }
}

WeightUpload::~WeightUpload() {
  cudaStreamSynchronize(stream_);  // after an error: copies may still be in flight
  for (const cudaEvent_t event : done_) cudaEventDestroy(event);
  cudaStreamDestroy(stream_);
}

Result<> WeightUpload::copy(const WeightSource& source, const WeightPlace& place) {
  if (!source.matrix.columns.empty()) {
    return invalid(
        "has its columns' groups in any order (act-order), which runs on the CPU alone so far "
        "(--device cpu)");
  }
  const bool as_stored = fits_as_stored(source.matrix, place);
  const bool quantised = !as_stored && place.type == DType::kF8E4M3;
  if (quantised) {
    if (not_finite_.size() == 0) not_finite_ = DeviceArray<int32_t>(1);
    check(cudaMemsetAsync(not_finite_.data(), 0, sizeof(int32_t), stream_), kCopying);
  }
  if (as_stored) {
    FATHOM_RETURN_IF_ERROR(copy_as_stored(source, place));
    if (place.type == DType::kF8E4M3) copy_scales(source.matrix, place);
  } else {
    FATHOM_RETURN_IF_ERROR(convert(source, place));
  }
  int32_t found = 0;
  if (quantised) {
    check(
        cudaMemcpyAsync(&found, not_finite_.data(), sizeof(found), cudaMemcpyDeviceToHost, stream_),
        kCopying);
  }
  check(cudaStreamSynchronize(stream_), kCopying);
  return found == 0 ? Result<>() : not_finite(source);
}

void WeightUpload::split(const KvBSplit& split) {
  split_kv_b(split, stream_);
  check(cudaStreamSynchronize(stream_), "splitting kv_b_proj");
}

// Waits until the next piece's memory is free.
void WeightUpload::begin_piece() {
  turn_ = (turn_ + 1) % kPieces;
  check(cudaEventSynchronize(done_[turn_]), kCopying);
}

void WeightUpload::end_piece() { check(cudaEventRecord(done_[turn_], stream_), kCopying); }

// Copies a piece's rows, `stride` values apart, zero-padded to it, to device memory.
Result<> WeightUpload::stage(const WeightSource& source, const Piece& piece, int64_t stride,
                             void* to) {
  const DType type = source.matrix.values.dtype();
  const auto small = [](int64_t value) { return static_cast<int32_t>(value); };
  if (source.dummy) {
    fill_dummy_piece({.values = *source.dummy,
                      .columns = source.part.num_cols,
                      .type = type,
                      .first_row = small(source.part.rows.first + piece.first_row),
                      .first_col = small(source.part.cols.first + piece.first_col),
                      .rows = small(piece.rows),
                      .cols = small(piece.cols),
                      .filled_rows = small(piece.filled_rows),
                      .filled_cols = small(stride)},
                     to, stride, stream_);
    return {};
  }
  std::byte* const pinned = pinned_.data() + turn_ * kPieceBytes;
  FATHOM_RETURN_IF_ERROR(
      read(source, {piece.first_row, piece.rows}, {piece.first_col, piece.cols}, pinned));
  const auto row_bytes = static_cast<size_t>(piece.cols * size_of(type));
  const auto pitch = static_cast<size_t>(stride * size_of(type));
  const auto rows = static_cast<size_t>(piece.rows);
  if (piece.rows < piece.filled_rows || row_bytes < pitch) {
    check(cudaMemsetAsync(to, 0, pitch * static_cast<size_t>(piece.filled_rows), stream_),
          kCopying);
  }
  if (row_bytes == pitch) {
    check(cudaMemcpyAsync(to, pinned, row_bytes * rows, cudaMemcpyHostToDevice, stream_), kCopying);
  } else if (row_bytes > 0 && rows > 0) {
    check(cudaMemcpy2DAsync(to, pitch, pinned, row_bytes, row_bytes, rows, cudaMemcpyHostToDevice,
                            stream_),
          kCopying);
  }
  return {};
}

Result<> WeightUpload::copy_as_stored(const WeightSource& source, const WeightPlace& place) {
  const int64_t row_bytes = place.cols * size_of(place.type);
  FATHOM_CHECK(row_bytes <= kPieceBytes, "a row of {} bytes", row_bytes);
  const int64_t step = source.dummy ? place.rows : kPieceBytes / row_bytes;
  for (int64_t row = 0; row < place.rows; row += step) {
    const Piece piece(source.matrix, row, 0, std::min(step, place.rows - row), place.cols);
    begin_piece();
    FATHOM_RETURN_IF_ERROR(
        stage(source, piece, place.cols, static_cast<std::byte*>(place.values) + row * row_bytes));
    end_piece();
  }
  return {};
}

Result<> WeightUpload::convert(const WeightSource& source, const WeightPlace& place) {
  const ScaledMatrix& matrix = source.matrix;
  const int64_t size = size_of(matrix.values.dtype());
  if (stored_.size() == 0) stored_ = DeviceArray<std::byte>(kPieces * kPieceBytes);
  if (!matrix.scales.empty()) {
    const int64_t count = matrix.scales.size(0) * matrix.scales.size(1);
    if (stored_scales_.size() < count) stored_scales_ = DeviceArray<float>(count);
    scales_.assign(matrix.scales.row<float>(0), matrix.scales.row<float>(0) + count);
    upload_scales(stored_scales_.data());
  }
  // Whole blocks of 128 rows and columns at a time, all columns if they fit.
  const int64_t most_cols = kPieceBytes / (kScaleBlock * size) / kScaleBlock * kScaleBlock;
  const int64_t step_cols = std::min(place.cols, most_cols);
  const int64_t step_rows = kPieceBytes / (step_cols * size) / kScaleBlock * kScaleBlock;
  for (int64_t row = 0; row < place.rows; row += step_rows) {
    for (int64_t col = 0; col < place.cols; col += step_cols) {
      const Piece piece(matrix, row, col, std::min(step_rows, place.rows - row),
                        std::min(step_cols, place.cols - col));
      Piece stored = piece;
      stored.filled_rows = piece.rows;
      const auto small = [](int64_t value) { return static_cast<int32_t>(value); };
      begin_piece();
      std::byte* const at = stored_.data() + turn_ * kPieceBytes;
      FATHOM_RETURN_IF_ERROR(stage(source, stored, piece.cols, at));
      convert_piece({.values = at,
                     .type = matrix.values.dtype(),
                     .code = matrix.code,
                     .first_row = small(row),
                     .first_col = small(col),
                     .rows = small(piece.rows),
                     .cols = small(piece.cols),
                     .filled_rows = small(piece.filled_rows),
                     .filled_cols = small(piece.filled_cols),
                     .scales = matrix.scales.empty() ? nullptr : stored_scales_.data(),
                     .scales_stride = matrix.scales.empty() ? 0 : small(matrix.scales.size(1)),
                     .scale_rows = small(matrix.scale_rows),
                     .scale_cols = small(matrix.scale_cols),
                     .scale_row = small(matrix.scale_row),
                     .scale_col = small(matrix.scale_col)},
                    place, not_finite_.data(), stream_);
      end_piece();
    }
  }
  return {};
}

// Copies the scales of e4m3 that stays as stored: a per-tensor scale is repeated for each block.
void WeightUpload::copy_scales(const ScaledMatrix& matrix, const WeightPlace& place) {
  const bool by_row = is_scaled_by_row(matrix);
  scales_.clear();
  for (int64_t r = 0; r < place.rows; r += kScaleBlock) {
    for (int64_t c = 0; c < place.cols; c += kScaleBlock) {
      scales_.push_back(by_row || r >= matrix.rows() ? 1.0f : matrix.scale_at(r, c));
    }
  }
  upload_scales(place.scales);
  if (place.row_scales == nullptr) return;
  scales_.assign(static_cast<size_t>(place.rows), 1.0f);
  for (int64_t r = 0; by_row && r < matrix.rows(); ++r) {
    scales_[static_cast<size_t>(r)] = matrix.scale_at(r, 0);
  }
  upload_scales(place.row_scales);
}

void WeightUpload::upload_scales(float* to) {
  check(cudaMemcpyAsync(to, scales_.data(), scales_.size() * sizeof(float), cudaMemcpyHostToDevice,
                        stream_),
        kCopying);
  check(cudaStreamSynchronize(stream_), kCopying);  // scales_ is overwritten next
}

}  // namespace fathom::cuda
