// The scales of one FP8 weight as stored in checkpoints, converted to fp32.
//
//   X.weight_scale_inv   [ceil(rows / 128), ceil(cols / 128)], or one number (DeepSeek-V3's form).
//                        Despite the name it is the multiplier that dequantizes.
//   X.weight_scale       one number ([], [1], [1, 1]), one per row ([rows], [rows, 1]), or blocks
//                        as above (vLLM's and compressed-tensors' forms); also a multiplier
//   X.input_scale        for statically quantized activations; not read here
//
// Stored as fp32, bf16 or e8m0.
#pragma once

#include <span>
#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom {

struct StoredScales {
  std::string name;
  const TensorEntry* entry = nullptr;  // null: the weight has no scales
  int64_t scale_rows = 0;              // rows of the weight that share a scale
  int64_t scale_cols = 0;
  int64_t grid_rows = 0;  // scales are [grid_rows, grid_cols]
  int64_t grid_cols = 0;
};

// Finds the scales of the weight `name` of [rows, cols] stored as `weight`. Errors: an FP8 weight
// without scales, a shape that fits no form, and scales of a weight that is not FP8.
Result<StoredScales> find_scales(const Checkpoint& checkpoint, const std::string& name,
                                 const TensorEntry& weight, int64_t rows, int64_t cols);

// Converts stored bytes to fp32. NaN and infinity are errors that name the tensor.
Result<> decode_scales(const StoredScales& scales, std::span<const std::byte> bytes,
                       std::span<float> out);

}  // namespace fathom
