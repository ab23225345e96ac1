// The kernels of a rank's steps on a GPU, chosen before a weight is read: from the spec, from the
// types in which the checkpoint stores the weights, and from the SMs of the device. Plain data and
// host code that needs no CUDA. Weights get the planned forms (upload_plan.h), and launches the
// operations that take them (deepseek_cuda.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cache/cache_format.h"
#include "device/sm_budget.h"
#include "model/model_spec.h"
#include "model/weight_forms.h"
#include "ops/decode_layers/decode_layers_support.h"

namespace fathom::cuda {

struct KernelOptions {
  CacheFormat cache_format = CacheFormat::kBF16;
  bool batch_invariant = false;  // a row's bits do not depend on the other rows of the step
  bool has_library = false;      // cuBLASLt is installed
};

// Inner columns of the rank's feed-forward blocks, as stored; 0 where it has none.
struct FeedForwardWidths {
  int64_t dense = 0, routed = 0, shared = 0;
};

struct KernelPlan {
  SmBudget budget;                 // of every launch
  std::vector<LayerForms> layers;  // see layer_forms()
  FeedForwardWidths widths;
  // The first of the last layers that decode_layers() can run in one launch for a few tokens; the
  // number of layers: none.
  int64_t first_decode_layer = 0;
  // The kernel of decode_layers() that steps of a few tokens take: its sums are others than those
  // of steps of more. kNone: they take none.
  DecodeLayersKind decode_layers = DecodeLayersKind::kNone;
  // Whether bf16 GEMMs of many rows may take cuBLASLt: its sums depend on the number of rows.
  bool takes_library = false;
};

// Refuses what no kernel takes; the error names the field of config.json, the flag or the device's
// property, its value and the supported values.
Result<KernelPlan> plan_kernels(const ModelSpec& spec, const WeightForms& forms,
                                const KernelOptions& options, const SmBudget& budget);

}  // namespace fathom::cuda
