// Loading: the tensors that a model needs from a checkpoint, and their parallel reading.
//
// The model lists its tensors with the shape each must have and a function that puts it where it
// belongs. load() checks all of them against the checkpoint before it reads a byte, then reads with
// several threads, each tensor once, and calls `place` on the reading thread, in any order. A
// matrix arrives with its scales (weight_scale_inv, weight_scale; fp32, bf16 or e8m0), as the
// format says; or quantised on the reading thread, if the options ask for it.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tensor/scaled_matrix.h"

namespace fathom {

// Brings stored bytes of one tensor's values, from `first` on.
using ReadValues = std::function<Result<>(int64_t first, std::span<std::byte> to)>;

struct TensorRequest {
  std::string name;            // "model.layers.3.mlp.gate.weight"
  std::vector<int64_t> shape;  // a vector (norm, bias) has one dimension, a matrix two
  // Called once, on a reading thread. For a vector, matrix.values is [1, n]. The views are valid
  // during the call only.
  std::function<Result<>(const ScaledMatrix& matrix)> place = {};
  // Replaces `place` where an intermediate buffer would cost a copy: the matrix has a type, a shape
  // and its scales, but no values in memory; `read` loads them. Not for a dummy checkpoint, and
  // nothing is quantized.
  std::function<Result<>(const ScaledMatrix& matrix, const ReadValues& read)> place_unread = {};
};

struct LoadOptions {
  int num_threads = 0;        // 0: one a core
  bool show_progress = true;  // a bar on stderr
  uint64_t dummy_seed = 0;    // --load-format dummy: reproducible random values
  // A checkpoint that is not quantised is loaded as if it were published in FP8: the matrices of
  // its linear layers (WeightNames::is_linear) arrive in e4m3 with scales by blocks of 128x128, as
  // tensor/quantize_weight.h makes them.
  bool quantize_fp8 = false;
  // Bytes that one read asks the disk for at most: long enough for the disk and short enough for
  // the progress bar. Tests read their small tensors in many pieces.
  int64_t read_bytes = 16 << 20;
};

// Refuses options that this checkpoint cannot be loaded with: quantize_fp8 for weights already
// quantized in another form. (Weights already in that form are accepted.)
Result<> check_load_options(const Checkpoint& checkpoint, const LoadOptions& options);

// Whether `options` make these weights e4m3 while they are loaded, where `linear` is
// WeightNames::is_linear of the name and `stored` the type on disk.
bool is_quantized_while_loading(const Checkpoint& checkpoint, const LoadOptions& options,
                                bool linear, DType stored);

// That every tensor of the model is stored in a type, a shape and with scales that can be loaded;
// nothing is read. MTP layers are not loaded and not looked at.
Result<> check_stored(const Checkpoint& checkpoint);

// Errors name the tensor and the file. Nothing is left half-placed that the caller would use: on an
// error the model must be dropped.
Result<> load_tensors(const Checkpoint& checkpoint, const std::vector<TensorRequest>& requests,
                      const LoadOptions& options);

}  // namespace fathom
