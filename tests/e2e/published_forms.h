// The forms other than V3's in which FP8 checkpoints are published, made of another FP8 checkpoint.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom {

enum class PublishedForm {
  // DeepSeek-Coder-V2-Instruct-FP8: a scale a matrix for the weights, and one for the activations
  // that it takes.
  kStaticActivations,
  kScaleARow,    // compressed-tensors, strategy channel
  kPowersOfTwo,  // DeepSeek-V3.1: blocks of 128x128, scales ue8m0
};

// Writes config.json and model.safetensors into a directory. Static activations are not
// calibrated: their scale is such that what the norm before can give at most becomes e4m3's largest
// value, which costs no bits as long as nothing comes near e4m3's least one.
void write_published_form(const Checkpoint& source, PublishedForm form,
                          const std::string& directory);

}  // namespace fathom
