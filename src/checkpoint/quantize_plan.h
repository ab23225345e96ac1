// The output of `fathom quantize`, known before a weight is read: every shard's name, head, and
// where each tensor's bytes go in it.
//
// The form is DeepSeek-V3's as published: e4m3 weights of the linear layers
// (WeightNames::is_linear, those of MTP layers too) with block-wise 128x128 scales in fp32
// (weight_scale_inv) beside them; all other tensors unchanged.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tensor/scale_form.h"

namespace fathom {

struct PlannedTensor {
  std::string name;
  const TensorEntry* source = nullptr;  // in the checkpoint, which must outlive the plan
  bool quantize = false;
  int64_t offset = 0;         // first byte, in the new file
  int64_t scales_offset = 0;  // if quantize
};

struct PlannedShard {
  std::string name;  // "model-00001-of-00163.safetensors"
  std::string head;  // the bytes before the data
  int64_t bytes = 0;
  int64_t source_bytes = 0;            // that are read for it
  std::vector<PlannedTensor> tensors;  // in the order of the source's bytes
};

struct QuantizePlan {
  std::vector<PlannedShard> shards;
  std::string index;      // model.safetensors.index.json; empty for a single model.safetensors
  int64_t bytes = 0;      // all shards
  int64_t quantized = 0;  // tensors
};

// Shards mirror the source's one to one; with max_shard_bytes > 0 they are as many as that takes (a
// tensor that is larger has one for itself). A source that is quantised already is refused.
Result<QuantizePlan> plan_quantize(const Checkpoint& checkpoint, int64_t max_shard_bytes);

// The source's config.json with the quantization_config of the form above, otherwise as it was.
Result<std::string> quantized_config(std::string_view config, ScaleForm form,
                                     std::string_view source);

}  // namespace fathom
