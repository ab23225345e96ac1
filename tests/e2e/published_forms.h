// Converts an FP8 checkpoint to the other forms in which FP8 checkpoints are published.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom {

enum class PublishedForm {
  // DeepSeek-Coder-V2-Instruct-FP8: per-tensor scales of weights and of their input activations.
  kStaticActivations,
  kScaleARow,    // compressed-tensors, strategy channel
  kPowersOfTwo,  // DeepSeek-V3.1: blocks of 128x128, scales ue8m0
};

// Writes config.json and model.safetensors into a directory. Static activation scales are not
// calibrated: they map the largest possible output of the preceding norm to e4m3's largest value,
// which loses no precision as long as values stay well above e4m3's smallest one.
void write_published_form(const Checkpoint& source, PublishedForm form,
                          const std::string& directory);

}  // namespace fathom
