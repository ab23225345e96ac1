#include "checkpoint/four_bit_config.h"

#include <algorithm>

namespace fathom {
namespace {

using Kind = QuantizationConfig::Kind;

constexpr int64_t kMaxGroup = 1 << 20;
// Columns that a block of the kernels holds (ops/linear).
constexpr int64_t kKernelBlock = 128;

constexpr std::string_view kPacked = "pack-quantized", kMxfp4 = "mxfp4-pack-quantized",
                           kNvfp4 = "nvfp4-pack-quantized";

// group_size: -1 for the whole row, 16 to 64 as powers of two, or multiples of 128.
Result<int64_t> group_cols(const JsonFields& fields, std::string_view key,
                           const std::string& where) {
  FATHOM_TRY(const auto size, fields.integer(key, -1, kMaxGroup));
  if (size == -1) return 0;
  if (size == 16 || size == 32 || size == 64 || (size > 0 && size % kKernelBlock == 0)) return size;
  return invalid("{}{} is {}, supported are -1, 16, 32, 64 and multiples of {}", where, key, size,
                 kKernelBlock);
}

Result<> check_bits(const JsonFields& fields, std::string_view key, const std::string& where) {
  FATHOM_TRY(const auto bits, fields.integer(key, 1, 64));
  if (bits == 4) return {};
  return invalid("{}{} is {}, supported is 4", where, key, bits);
}

// The value of the first of two spellings that is there.
std::string_view spelled(const JsonFields& fields, std::string_view first,
                         std::string_view second) {
  return fields.has(first) || !fields.has(second) ? first : second;
}

// Integers of pack-quantized.
Result<> parse_packed(const JsonFields& fields, const std::string& where,
                      QuantizationConfig& config) {
  config.kind = Kind::kPackedInt4;
  FATHOM_TRY(const auto type, fields.string("type"));
  FATHOM_TRY(const auto bits, fields.integer("num_bits", 1, 64));
  if (type != "int" || bits != 4) {
    return invalid("{}type is {:?} with num_bits {}, of pack-quantized supported is \"int\" with 4",
                   where, type.substr(0, 60), bits);
  }
  FATHOM_TRY(const auto symmetric, fields.optional_boolean("symmetric"));
  config.symmetric = symmetric.value_or(true);
  FATHOM_TRY(const auto strategy, fields.string("strategy"));
  if (strategy == "channel") return {};
  if (strategy != "group") {
    return invalid("{}strategy is {:?}, of pack-quantized supported are group and channel", where,
                   strategy.substr(0, 60));
  }
  FATHOM_TRY(config.group_cols, group_cols(fields, "group_size", where));
  return {};
}

// FP4: the group is the format's.
Result<> parse_fp4(const JsonFields& fields, Kind kind, int64_t group, const std::string& where,
                   QuantizationConfig& config) {
  config.kind = kind;
  FATHOM_TRY(const auto type, fields.string("type"));
  FATHOM_TRY(const auto bits, fields.integer("num_bits", 1, 64));
  FATHOM_TRY(config.group_cols, fields.integer("group_size", 1, kMaxGroup));
  if (type != "float" || bits != 4 || config.group_cols != group) {
    return invalid(
        "{}type is {:?} with num_bits {} and group_size {}, supported is \"float\" with 4 and {}",
        where, type.substr(0, 60), bits, config.group_cols, group);
  }
  return {};
}

}  // namespace

Result<std::vector<std::string>> layer_names(const JsonFields& fields, std::string_view key,
                                             const std::string& where) {
  std::vector<std::string> names;
  const json::value* value = fields.find(key);
  if (value == nullptr || value->is_null()) return names;
  if (!value->is_array()) {
    return invalid("{}{} is {}, expected an array of names", where, key, brief(*value));
  }
  for (const json::value& item : value->get_array()) {
    if (!item.is_string()) {
      return invalid("{}{} holds {}, expected names", where, key, brief(item));
    }
    names.emplace_back(item.get_string());
  }
  return names;
}

bool is_four_bit_format(std::string_view format) {
  return format == kPacked || format == kMxfp4 || format == kNvfp4;
}

Result<> parse_four_bit_weights(const json::object& object, std::string_view format,
                                const std::string& where, QuantizationConfig& config) {
  const JsonFields fields(object, where);
  if (format == kMxfp4) return parse_fp4(fields, Kind::kMxfp4, 32, where, config);
  if (format == kNvfp4) return parse_fp4(fields, Kind::kNvfp4, 16, where, config);
  return parse_packed(fields, where, config);
}

Result<QuantizationConfig> parse_awq(const JsonFields& fields, const std::string& where) {
  QuantizationConfig config;
  config.kind = Kind::kAwq;
  config.symmetric = false;
  FATHOM_RETURN_IF_ERROR(check_bits(fields, spelled(fields, "bits", "w_bit"), where));
  FATHOM_TRY(config.group_cols,
             group_cols(fields, spelled(fields, "group_size", "q_group_size"), where));
  FATHOM_TRY(const auto zero_point, fields.optional_boolean("zero_point"));
  if (!zero_point.value_or(true)) {
    return invalid("{}zero_point is false, of awq supported is true", where);
  }
  FATHOM_TRY(const auto version, fields.optional_string("version"));
  if (version && *version != "gemm" && *version != "GEMM") {
    return invalid("{}version is {:?}, of awq supported is \"gemm\"", where,
                   version->substr(0, 60));
  }
  FATHOM_TRY(config.ignored, layer_names(fields, "modules_to_not_convert", where));
  return config;
}

Result<QuantizationConfig> parse_gptq(const JsonFields& fields, const std::string& where) {
  QuantizationConfig config;
  config.kind = Kind::kGptq;
  FATHOM_RETURN_IF_ERROR(check_bits(fields, "bits", where));
  FATHOM_TRY(config.group_cols, group_cols(fields, "group_size", where));
  FATHOM_TRY(const auto symmetric, fields.optional_boolean("sym"));
  config.symmetric = symmetric.value_or(true);
  FATHOM_TRY(const auto order, fields.optional_boolean("desc_act"));
  config.act_order = order.value_or(false);
  FATHOM_TRY(const auto format, fields.optional_string("checkpoint_format"));
  const std::string form = format.value_or("gptq");
  if (form != "gptq" && form != "gptq_v2") {
    return invalid("{}checkpoint_format is {:?}, supported are \"gptq\" and \"gptq_v2\"", where,
                   form.substr(0, 60));
  }
  config.zeros_minus_one = form == "gptq";
  if (const json::value* rules = fields.find("dynamic");
      rules != nullptr && rules->is_object() && !rules->get_object().empty()) {
    return invalid("{}dynamic gives modules bits or groups of their own, which is not supported",
                   where);
  }
  FATHOM_TRY(config.ignored, layer_names(fields, "modules_to_not_convert", where));
  return config;
}

}  // namespace fathom
