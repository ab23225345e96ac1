// The complete layout of `fathom quantize`'s output, computed before a weight is read: each shard's
// name and header, and the position of each tensor in it.
//
// Which weights become which tensors: quantize_format.h. Those of MTP layers are among them; all
// other tensors are unchanged.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/quantize_format.h"

namespace fathom {

struct PlannedTensor {
  std::string name;
  const TensorEntry* source = nullptr;  // in the checkpoint, which must outlive the plan
  bool quantize = false;
  int64_t offset = 0;         // first byte in the new file
  int64_t scales_offset = 0;  // if quantize
  int64_t shape_offset = 0;   // of weight_shape; 0 without it
};

struct PlannedShard {
  std::string name;  // "model-00001-of-00163.safetensors"
  std::string head;  // the bytes before the data
  int64_t bytes = 0;
  int64_t source_bytes = 0;            // read to produce it
  std::vector<PlannedTensor> tensors;  // in the order of the source's bytes
};

struct QuantizePlan {
  std::vector<PlannedShard> shards;
  std::string index;      // model.safetensors.index.json; empty for a single model.safetensors
  int64_t bytes = 0;      // all shards
  int64_t quantized = 0;  // tensors
};

// Plans shards that mirror the source's; with max_shard_bytes > 0, shards up to that size (a larger
// tensor gets a shard of its own). A source that is quantized already is refused.
Result<QuantizePlan> plan_quantize(const Checkpoint& checkpoint, const QuantizeFormat& format,
                                   int64_t max_shard_bytes);

// The source's config.json with the quantization_config of this form, otherwise unchanged.
Result<std::string> quantized_config(std::string_view config, const QuantizeFormat& format,
                                     std::string_view source);

}  // namespace fathom
