// Conversion of weights from a checkpoint's types to the model's, on the GPU, during loading. All
// pointers are device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "checkpoint/dummy_weights.h"
#include "model/weight_place.h"
#include "tensor/dtype.h"
#include "tensor/four_bit.h"

namespace fathom::cuda {

// [rows, cols] of a stored matrix, or of a slice of it, from [first_row, first_col] on, and its
// destination: up to [filled_rows, filled_cols] of the place from there, with zeros beyond what is
// stored.
struct StoredPiece {
  const void* values = nullptr;  // dense
  DType type = DType::kBF16;     // kF32, kBF16, kF16, kF8E4M3, or kU8: four-bit codes, one a byte
  FourBitCode code = FourBitCode::kInteger;  // symmetric; kU8 only
  int32_t first_row = 0, first_col = 0, rows = 0, cols = 0, filled_rows = 0, filled_cols = 0;
  const float* scales = nullptr;  // the whole matrix's, as in ScaledMatrix; null: none
  int32_t scales_stride = 0, scale_rows = 0, scale_cols = 0;
  int32_t scale_row = 0, scale_col = 0;  // where a slice begins in the whole matrix
};

// Rounds the values of ScaledMatrix::at() to nearest even, to bf16 or f32; or quantizes them to
// e4m3, bitwise identical to quantize_weight_block() (tensor/quantize_weight.h): then first_row and
// first_col are multiples of 128, and *not_finite becomes 1 if a weight is not finite. Four-bit
// codes for a place of kU8 stay as they are, with scales in bf16 for 32 columns each: first_row and
// first_col are then multiples of 64.
void convert_piece(const StoredPiece& piece, const WeightPlace& place, int32_t* not_finite,
                   cudaStream_t stream);

// The values of a dummy tensor of [whole matrix's rows, columns], bitwise identical to
// fill_dummy(), in place of a stored piece: fills [filled_rows, filled_cols] of `type` at `to`.
struct DummyPiece {
  DummyValues values;
  int64_t columns = 0;  // columns of the tensor
  DType type = DType::kBF16;
  int32_t first_row = 0, first_col = 0, rows = 0, cols = 0, filled_rows = 0, filled_cols = 0;
};
void fill_dummy_piece(const DummyPiece& piece, void* to, int64_t to_stride, cudaStream_t stream);

// Fills uk and uv from kv_b.
void split_kv_b(const KvBSplit& split, cudaStream_t stream);

}  // namespace fathom::cuda
