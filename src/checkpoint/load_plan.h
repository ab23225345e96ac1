// Loads the tensors that a model needs from a checkpoint, in parallel.
//
// The model lists its tensors with their required shapes and a function that stores each.
// load_tensors() checks all of them against the checkpoint before it reads a byte. Then several
// threads read, each tensor once, and call `place` on the reading thread, in any order. A matrix
// arrives with its scales (weight_scale_inv, weight_scale; fp32, bf16 or e8m0), or is quantized on
// the reading thread if the options ask for it.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tensor/scaled_matrix.h"

namespace fathom {

// Reads stored bytes of one tensor's values, beginning at byte `first`.
using ReadValues = std::function<Result<>(int64_t first, std::span<std::byte> to)>;

struct TensorRequest {
  std::string name;            // "model.layers.3.mlp.gate.weight"
  std::vector<int64_t> shape;  // a vector (norm, bias) has one dimension, a matrix two
  // Called once, on a reading thread. A vector's matrix.values is [1, n]. The views are valid only
  // during the call.
  std::function<Result<>(const ScaledMatrix& matrix)> place = {};
  // Replaces `place` to avoid a copy through an intermediate buffer: the matrix has a type, a shape
  // and its scales, but no values in memory; `read` loads them, four-bit codes as a byte each. Not
  // for dummy checkpoints, and not with quantization while loading.
  std::function<Result<>(const ScaledMatrix& matrix, const ReadValues& read)> place_unread = {};
  int64_t part = 0;  // how many of the values `read` will load, for the progress bar; 0: all
};

struct LoadOptions {
  int num_threads = 0;        // 0: one per core
  bool show_progress = true;  // a progress bar on stderr
  uint64_t dummy_seed = 0;    // --load-format dummy: reproducible random values
  // Quantizes a checkpoint while loading it: the matrices of its linear layers
  // (WeightNames::is_linear) arrive in e4m3 with block-wise 128x128 scales
  // (tensor/quantize_weight.h), as if published in FP8. For checkpoints that are not quantized.
  bool quantize_fp8 = false;
  // The maximal size of one read: large enough for the disk, small enough for the progress bar.
  // Tests set it so that small tensors need many reads.
  int64_t read_bytes = 16 << 20;
};

// Refuses options that do not fit the checkpoint: quantize_fp8 for weights already quantized in
// another form. (Weights already in that form are accepted.)
Result<> check_load_options(const Checkpoint& checkpoint, const LoadOptions& options);

// Whether `options` quantize these weights to e4m3 while loading. `linear` is
// WeightNames::is_linear of the name, `stored` the type on disk.
bool is_quantized_while_loading(const Checkpoint& checkpoint, const LoadOptions& options,
                                bool linear, DType stored);

// Checks that each tensor of the model is stored with a loadable type, shape and scales. Reads
// nothing. MTP layers are not loaded and not checked.
Result<> check_stored(const Checkpoint& checkpoint);

// Loads all requested tensors. Errors name the tensor and the file. After an error the model may be
// partly filled and must be discarded.
Result<> load_tensors(const Checkpoint& checkpoint, const std::vector<TensorRequest>& requests,
                      const LoadOptions& options);

}  // namespace fathom
