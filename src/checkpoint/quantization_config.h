// The quantization_config of a config.json, in the forms of its two producers:
//   quant_method "fp8"                 DeepSeek's 128x128 blocks (weight_block_size), or per-tensor
//                                      scales (vLLM's form, without weight_block_size)
//   quant_method "compressed-tensors"  float-quantized, 8 bits, strategy tensor, channel or block;
//                                      pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized
//   quant_method "awq", "gptq"         four bits (four_bit_config.h)
// Anything else is refused by name.
#pragma once

#include <string>

#include "base/json.h"
#include "checkpoint/model_config.h"

namespace fathom {

// `where` begins each error: "…/config.json: quantization_config.".
Result<QuantizationConfig> parse_quantization_config(const json::object& object,
                                                     const std::string& where);

}  // namespace fathom
