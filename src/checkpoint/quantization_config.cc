#include "checkpoint/quantization_config.h"

#include <algorithm>
#include <array>

#include "checkpoint/four_bit_config.h"

namespace fathom {
namespace {

// The block size of all published FP8 checkpoints, which the kernels require.
constexpr int64_t kBlock = 128;

// Requires [128, 128], the only supported block.
Result<> check_block(const json::value& value, std::string_view key, const std::string& where) {
  const auto is_block = [](const json::value& item) {
    return item.is_int64() && item.get_int64() == kBlock;
  };
  if (value.is_array() && value.get_array().size() == 2 && is_block(value.get_array()[0]) &&
      is_block(value.get_array()[1])) {
    return {};
  }
  return invalid("{}{} is {}, supported is [{}, {}]", where, key,
                 json::serialize(value).substr(0, 60), kBlock, kBlock);
}

void set_block(QuantizationConfig& config) {
  config.kind = QuantizationConfig::Kind::kFp8Block;
  config.block_rows = config.block_cols = kBlock;
}

Result<QuantizationConfig> parse_fp8(const JsonFields& fields, const std::string& where) {
  QuantizationConfig config;
  FATHOM_TRY(const auto format, fields.optional_string("fmt"));
  if (format && *format != "e4m3") {
    return invalid("{}fmt is {:?}, supported is \"e4m3\"", where, *format);
  }
  FATHOM_TRY(const auto scale_format, fields.optional_string("scale_fmt"));
  if (scale_format && *scale_format != "ue8m0" && *scale_format != "float") {
    return invalid("{}scale_fmt is {:?}, supported are \"float\" and \"ue8m0\"", where,
                   *scale_format);
  }
  config.scales_are_powers_of_two = scale_format == "ue8m0";
  FATHOM_TRY(const auto scheme, fields.optional_string("activation_scheme"));
  if (scheme && *scheme != "dynamic" && *scheme != "static") {
    return invalid("{}activation_scheme is {:?}, supported are \"dynamic\" and \"static\"", where,
                   *scheme);
  }
  config.static_activations = scheme == "static";
  if (const json::value* block = fields.find("weight_block_size")) {
    FATHOM_RETURN_IF_ERROR(check_block(*block, "weight_block_size", where));
    set_block(config);
  } else {
    config.kind = QuantizationConfig::Kind::kFp8Tensor;
  }
  for (const char* key : {"ignored_layers", "modules_to_not_convert"}) {
    FATHOM_TRY(const auto names, layer_names(fields, key, where));
    config.ignored.insert(config.ignored.end(), names.begin(), names.end());
  }
  return config;
}

// Parses the "weights" of one of compressed-tensors' config_groups.
Result<> parse_group_weights(const json::object& object, const std::string& where,
                             QuantizationConfig& config) {
  const JsonFields fields(object, where);
  FATHOM_TRY(const auto type, fields.string("type"));
  FATHOM_TRY(const auto bits, fields.integer("num_bits", 1, 64));
  if (type != "float" || bits != 8) {
    return invalid("{}type is {:?} with num_bits {}, supported is \"float\" with 8", where, type,
                   bits);
  }
  FATHOM_TRY(const auto strategy, fields.string("strategy"));
  if (strategy == "tensor") {
    config.kind = QuantizationConfig::Kind::kFp8Tensor;
  } else if (strategy == "channel") {
    config.kind = QuantizationConfig::Kind::kFp8Row;
  } else if (strategy == "block") {
    const json::value* block = fields.find("block_structure");
    if (block == nullptr) return invalid("{}block_structure is missing", where);
    FATHOM_RETURN_IF_ERROR(check_block(*block, "block_structure", where));
    set_block(config);
  } else {
    return invalid("{}strategy is {:?}, supported are tensor, channel and block", where, strategy);
  }
  return {};
}

Result<> parse_group(std::string_view name, const json::value& group, std::string_view format,
                     const std::string& where, QuantizationConfig& config) {
  const std::string here = fmt::format("{}config_groups.{}", where, name.substr(0, 60));
  if (!group.is_object()) return invalid("{} is {}, expected an object", here, brief(group));
  const JsonFields fields(group.get_object(), here + ".");
  const json::value* weights = fields.find("weights");
  if (weights == nullptr || !weights->is_object()) {
    return invalid("{}.weights is missing or not an object", here);
  }
  if (is_four_bit_format(format)) {
    return parse_four_bit_weights(weights->get_object(), format, here + ".weights.", config);
  }
  FATHOM_RETURN_IF_ERROR(parse_group_weights(weights->get_object(), here + ".weights.", config));
  if (const json::value* inputs = fields.find("input_activations")) {
    if (!inputs->is_object()) {
      return invalid("{}.input_activations is {}, expected an object", here, brief(*inputs));
    }
    const JsonFields input_fields(inputs->get_object(), here + ".input_activations.");
    FATHOM_TRY(const auto dynamic, input_fields.optional_boolean("dynamic"));
    config.static_activations = !dynamic.value_or(false);
  }
  return {};
}

Result<QuantizationConfig> parse_compressed_tensors(const JsonFields& fields,
                                                    const std::string& where) {
  QuantizationConfig config;
  FATHOM_TRY(const auto format, fields.string("format"));
  if (format != "float-quantized" && format != "naive-quantized" && !is_four_bit_format(format)) {
    return invalid(
        "{}format is {:?}: of compressed-tensors, supported are \"float-quantized\", "
        "\"pack-quantized\", \"mxfp4-pack-quantized\" and \"nvfp4-pack-quantized\"",
        where, format.substr(0, 60));
  }
  const json::value* groups = fields.find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->get_object().empty()) {
    return invalid("{}config_groups is missing or not an object with groups", where);
  }
  bool first = true;
  for (const auto& [name, group] : groups->get_object()) {
    QuantizationConfig group_config;
    FATHOM_RETURN_IF_ERROR(parse_group(name, group, format, where, group_config));
    if (!first &&
        (group_config.kind != config.kind || group_config.group_cols != config.group_cols ||
         group_config.symmetric != config.symmetric)) {
      return invalid("{}config_groups have different strategies; supported is one for all", where);
    }
    config = group_config;
    first = false;
  }
  FATHOM_TRY(config.ignored, layer_names(fields, "ignore", where));
  return config;
}

}  // namespace

Result<QuantizationConfig> parse_quantization_config(const json::object& object,
                                                     const std::string& where) {
  const JsonFields fields(object, where);
  FATHOM_TRY(const auto method, fields.string("quant_method"));
  if (method == "fp8") return parse_fp8(fields, where);
  if (method == "compressed-tensors") return parse_compressed_tensors(fields, where);
  if (method == "awq") return parse_awq(fields, where);
  if (method == "gptq") return parse_gptq(fields, where);
  return invalid(
      "{}quant_method is {:?}; supported are \"fp8\", \"compressed-tensors\", \"awq\" and "
      "\"gptq\"",
      where, method.substr(0, 60));
}

}  // namespace fathom
