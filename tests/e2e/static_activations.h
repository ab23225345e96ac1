// The published form of DeepSeek-Coder-V2-Instruct-FP8 made of another FP8 checkpoint: a scale a
// matrix for its weights, and one for the activations that it takes.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"

namespace fathom {

// Writes config.json and model.safetensors into a directory. There is no calibration: an
// activation's scale is such that what the norm before it can give at most becomes e4m3's largest
// value, which costs no bits as long as nothing comes near e4m3's least one.
void write_static_activations(const Checkpoint& source, const std::string& directory);

}  // namespace fathom
