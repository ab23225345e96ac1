// One four-bit weight as stored: found and checked from the headers, then decoded into codes, a
// byte each, with fp32 scales of groups of columns. All formats end in the same ScaledMatrix.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tensor/scaled_matrix.h"

namespace fathom {

struct FourBitTensors {
  std::string name;  // "X.weight"
  int64_t rows = 0, cols = 0;
  int64_t group_cols = 0;  // 0: a row has one scale
  int64_t groups = 1;
  FourBitCode code = FourBitCode::kInteger;
  DType scale_type = DType::kF32;  // that holds its scales exactly: kBF16 or kF32
  bool has_zeros = false;          // zero points that differ
  const TensorEntry* codes = nullptr;
  const TensorEntry* scales = nullptr;
  const TensorEntry* zeros = nullptr;         // null: symmetric
  const TensorEntry* order = nullptr;         // the group of each column
  const TensorEntry* shape = nullptr;         // [2]: rows, cols
  const TensorEntry* global_scale = nullptr;  // divides the scales

  std::vector<const TensorEntry*> entries() const;
};

// The tensors of the weight `name` of [rows, cols]; nothing if the checkpoint has none of four
// bits under this name. Errors name a tensor with a shape or type that does not fit.
Result<std::optional<FourBitTensors>> find_four_bit(const Checkpoint& checkpoint,
                                                    std::string_view name, int64_t rows,
                                                    int64_t cols);

// A thread's memory for one weight; reused for the next.
struct FourBitBuffers {
  std::vector<std::byte> stored;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales;
  std::vector<int32_t> columns;
};

// Reads a whole tensor into the bytes.
using ReadTensor = std::function<Result<>(const TensorEntry& entry, std::span<std::byte> to)>;

// Reads and decodes a weight. The result lies in `buffers`. Errors name the tensor, the place and
// the value: zero points, groups of columns, sizes or scales out of range.
Result<ScaledMatrix> read_four_bit(const Checkpoint& checkpoint, const FourBitTensors& tensors,
                                   const ReadTensor& read, FourBitBuffers& buffers);

// Random codes with scales that give the weights a variance of 1 / cols.
ScaledMatrix dummy_four_bit(const FourBitTensors& tensors, uint64_t seed, FourBitBuffers& buffers);
// The same without codes in memory.
ScaledMatrix dummy_four_bit_scales(const FourBitTensors& tensors, uint64_t seed,
                                   FourBitBuffers& buffers);

}  // namespace fathom
