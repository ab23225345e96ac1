// Checks whether a GPU has kernels for a model, before a weight is read. Host code that needs no
// CUDA.
#pragma once

#include "cache/cache_format.h"
#include "checkpoint/model_config.h"

namespace fathom {

// Columns of the head's GEMM and of its logits: the vocabulary rounded up to a multiple of 8. The
// padding is zeros and is never read.
int64_t gpu_logit_columns(const ModelConfig& config);

// Checks that each operation of a step supports the model's sizes. The error names the field of
// config.json (or the flag), its value and the supported values.
Result<> gpu_supports(const ModelConfig& config, CacheFormat cache_format);

}  // namespace fathom
