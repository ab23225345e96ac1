// A rank's weights in one GPU's memory, and their loading.
//
// One allocation, sized before a byte is read (upload_plan.h). FP8 matrices of the checkpoint stay
// FP8 where their form is e4m3 (weight_forms.h), and with LoadOptions::quantize_fp8 linear layers
// are quantized; everything else is rounded to bf16, with its scales multiplied in.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "device/cuda/device_array.h"
#include "device/cuda/device_context.h"
#include "model/gpu_weights.h"
#include "model/model_spec.h"
#include "model/weight_forms.h"

namespace fathom::cuda {

struct ModelWeights : ModelTensors {
  DeviceArray<std::byte> memory;
};

// Bytes that load_weights() allocates. `forms` are of spec.layers.
int64_t weight_bytes(const ModelSpec& spec, std::span<const LayerForms> forms);

// A rank whose weights are loaded; both are of its model. `device`: that it is on.
struct WeightsOfRank {
  const ModelSpec& spec;
  std::span<const LayerForms> forms;
  DeviceContext& device;
};

// Loads the weights of several ranks in one pass, each tensor's part once for each. Errors name the
// tensor and the file; a device failure is thrown. The current device is afterwards as before.
Result<std::vector<ModelWeights>> load_weights(const Checkpoint& checkpoint,
                                               std::span<const WeightsOfRank> ranks,
                                               const LoadOptions& options);

}  // namespace fathom::cuda
