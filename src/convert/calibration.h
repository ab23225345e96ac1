// A text run through a model: its loss, and the second moments of its keys and values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "convert/matrix.h"

namespace fathom::mla {

// A text is cut into windows of this many tokens, each a sequence of its own, as TransMLA does.
inline constexpr int64_t kWindowTokens = 256;
// More windows say little more.
inline constexpr int64_t kMostWindows = 128;

struct CalibrationOptions {
  DType compute = DType::kBF16;  // or kF32
  int num_threads = 0;           // 0: one per core
  bool show_progress = true;
};

struct Calibration {
  int64_t tokens = 0;  // predicted
  double loss = 0;     // mean negative log-likelihood a token, in nats
  // A layer's mean of y * y^T, y = [keys before rotation ; values] of all KV heads; only of a model
  // of grouped-query attention.
  std::vector<Matrix> moments;
};

// Runs the whole model on the CPU: its weights are in memory. Throws nothing. `ids` has two tokens
// or more; an id is below the vocabulary's size.
Result<Calibration> calibrate(const Checkpoint& checkpoint, std::span<const int32_t> ids,
                              const CalibrationOptions& options);

}  // namespace fathom::mla
