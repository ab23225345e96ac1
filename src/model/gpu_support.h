// Checks whether a GPU has kernels for what a rank computes. Host code that needs no CUDA.
#pragma once

#include "cache/cache_format.h"
#include "model/model_spec.h"

namespace fathom {

// Columns of the head's GEMM and of its logits: the rank's rows of the vocabulary rounded up to a
// multiple of 8. The padding is zeros and is never read.
int64_t gpu_logit_columns(const ModelSpec& spec);

// Bytes from a page of the pool to the next, in parts of one layer's latent rows: gpu_page_parts()
// and, with sparse attention, as many as the index keys behind them take.
int64_t gpu_page_stride(const ModelConfig& config, CacheFormat format, bool with_mtp);

// Bytes of such a page that are neither latent rows nor index keys: kept states and padding.
int64_t gpu_page_rest(const ModelConfig& config, CacheFormat format, bool with_mtp);

// Whether there is multi-head attention for the model's heads; other models' prompts take absorbed
// attention alone.
bool gpu_takes_multi_head(const ModelConfig& config);

// Checks that each operation of a step supports the rank's sizes. The error names the field of
// config.json (or the flag), its value and the supported values.
Result<> gpu_supports(const ModelSpec& spec, CacheFormat cache_format);

}  // namespace fathom
