// The quantization_config of a config.json, in the spellings of its two producers:
//   quant_method "fp8"                 DeepSeek's own 128x128 blocks (weight_block_size), and one
//                                      scale for a tensor (vLLM's form, no weight_block_size)
//   quant_method "compressed-tensors"  float-quantized, 8 bits, strategy tensor, channel or block
// Everything else is refused with its name.
#pragma once

#include <string>

#include "base/json.h"
#include "checkpoint/model_config.h"

namespace fathom {

// `where` begins every error: "…/config.json: quantization_config.".
Result<QuantizationConfig> parse_quantization_config(const json::object& object,
                                                     const std::string& where);

}  // namespace fathom
