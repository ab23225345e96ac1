// Where a rank's weights go in a GPU's memory, and which part of which tensor goes there. One
// allocation; matrices that the same launch reads are contiguous. Host code that needs no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "model/gpu_weights.h"
#include "model/model_spec.h"
#include "model/weight_forms.h"
#include "model/weight_place.h"

namespace fathom::cuda {

// A part of a tensor and its destination.
struct Upload {
  TensorPart part;
  WeightPlace place;
  // The GEMM's matrix that the place belongs to, whose input_scale a static checkpoint has beside
  // the tensor. Null: a norm, bias or table, or the router.
  WeightMatrix* matrix = nullptr;
  std::optional<KvBSplit> split;  // after the upload: kv_b_proj
};

struct UploadPlan {
  int64_t bytes = 0;                      // of the allocation
  std::unique_ptr<ModelTensors> tensors;  // uploads point into it
  std::vector<Upload> uploads;            // every tensor of the spec that the rank has a part of
};

// The plan for an allocation at `memory`. With null only `bytes` is of use. `forms` are of
// layer_forms(). Slices of e4m3 begin whole blocks of 128x128, as WeightForms requires.
UploadPlan plan_upload(const ModelSpec& spec, std::span<const LayerForms> forms, std::byte* memory);

}  // namespace fathom::cuda
