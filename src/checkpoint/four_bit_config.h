// quantization_config of four-bit weights, by producer. `where` begins each error.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "checkpoint/model_config.h"

namespace fathom {

// A list of layer names; empty without the field.
Result<std::vector<std::string>> layer_names(const JsonFields& fields, std::string_view key,
                                             const std::string& where);

// compressed-tensors' formats of four bits: "pack-quantized" (integers), "mxfp4-pack-quantized",
// "nvfp4-pack-quantized".
bool is_four_bit_format(std::string_view format);

// The "weights" of one of its config_groups. What it says of activations does not concern weights.
Result<> parse_four_bit_weights(const json::object& object, std::string_view format,
                                const std::string& where, QuantizationConfig& config);

// AutoAWQ: 4 bits, version "gemm".
Result<QuantizationConfig> parse_awq(const JsonFields& fields, const std::string& where);

// AutoGPTQ and GPTQModel: 4 bits, checkpoint_format "gptq" or "gptq_v2".
Result<QuantizationConfig> parse_gptq(const JsonFields& fields, const std::string& where);

}  // namespace fathom
