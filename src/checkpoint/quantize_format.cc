#include "checkpoint/quantize_format.h"

#include <fmt/format.h>

#include "base/math.h"
#include "checkpoint/tensor_names.h"

namespace fathom {
namespace {

constexpr int64_t kMxfp4Group = 32;

WrittenTensor written(WrittenTensor::Role role, std::string name, DType dtype,
                      std::vector<int64_t> shape) {
  int64_t bytes = size_of(dtype);
  for (const int64_t size : shape) bytes *= size;
  return {role, std::move(name), dtype, std::move(shape), bytes};
}

}  // namespace

std::optional<QuantizeFormat> quantize_format_named(std::string_view name) {
  if (name == "fp8") return QuantizeFormat{};
  if (name == "int4-g32") return QuantizeFormat{QuantizeFormat::Kind::kInt4, ScaleForm::kF32, 32};
  if (name == "int4-g128") return QuantizeFormat{QuantizeFormat::Kind::kInt4, ScaleForm::kF32, 128};
  if (name == "mxfp4")
    return QuantizeFormat{QuantizeFormat::Kind::kMxfp4, ScaleForm::kF32, kMxfp4Group};
  return std::nullopt;
}

std::string name_of(const QuantizeFormat& format) {
  switch (format.kind) {
    case QuantizeFormat::Kind::kFp8:
      return "fp8";
    case QuantizeFormat::Kind::kInt4:
      return fmt::format("int4-g{}", format.group_cols);
    case QuantizeFormat::Kind::kMxfp4:
      return "mxfp4";
  }
  return "?";
}

bool is_quantized_by(const QuantizeFormat& format, const WeightNames& names,
                     std::string_view weight) {
  if (!names.is_linear(weight)) return false;
  return !format.is_four_bit() || weight.find(tensor_names::kExperts) != std::string_view::npos;
}

std::vector<WrittenTensor> written_tensors(const QuantizeFormat& format, const std::string& weight,
                                           int64_t rows, int64_t cols) {
  if (!format.is_four_bit()) {
    return {written(WrittenTensor::Role::kValues, weight, DType::kF8E4M3, {rows, cols}),
            written(WrittenTensor::Role::kScales, weight + "_scale_inv", DType::kF32,
                    {ceil_div(rows, kScaleBlock), ceil_div(cols, kScaleBlock)})};
  }
  const int64_t groups = cols / format.group_cols;
  if (format.kind == QuantizeFormat::Kind::kMxfp4) {
    return {written(WrittenTensor::Role::kValues, weight + "_packed", DType::kU8, {rows, cols / 2}),
            written(WrittenTensor::Role::kScales, weight + "_scale", DType::kU8, {rows, groups})};
  }
  return {written(WrittenTensor::Role::kValues, weight + "_packed", DType::kI32, {rows, cols / 8}),
          written(WrittenTensor::Role::kScales, weight + "_scale", DType::kBF16, {rows, groups}),
          written(WrittenTensor::Role::kShape, weight + "_shape", DType::kI64, {2})};
}

std::string quantization_config_text(const QuantizeFormat& format) {
  if (!format.is_four_bit()) {
    std::string text =
        ",\n  \"quantization_config\": {\n    \"activation_scheme\": \"dynamic\",\n"
        "    \"fmt\": \"e4m3\",\n    \"quant_method\": \"fp8\",\n";
    if (format.scale_form == ScaleForm::kPowerOfTwo) text += "    \"scale_fmt\": \"ue8m0\",\n";
    return text +
           fmt::format("    \"weight_block_size\": [\n      {0},\n      {0}\n    ]\n  }}\n}}\n",
                       kScaleBlock);
  }
  const bool fp4 = format.kind == QuantizeFormat::Kind::kMxfp4;
  // What is not a routed expert stays as it is: the patterns of Kimi K2's published form, and the
  // router, which other engines may have as a linear layer.
  return fmt::format(R"(,
  "quantization_config": {{
    "config_groups": {{
      "group_0": {{
        "input_activations": null,
        "output_activations": null,
        "targets": [
          "Linear"
        ],
        "weights": {{
          "actorder": null,
          "block_structure": null,
          "dynamic": false,
          "group_size": {},
          "num_bits": 4,{}
          "strategy": "group",
          "symmetric": true,
          "type": "{}"
        }}
      }}
    }},
    "format": "{}",
    "ignore": [
      "lm_head",
      "re:.*self_attn.*",
      "re:.*shared_experts.*",
      "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
      "re:.*mlp\\.gate$",
      "re:.*eh_proj.*"
    ],
    "kv_cache_scheme": null,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed"
  }}
}}
)",
                     format.group_cols, fp4 ? "\n          \"scale_dtype\": \"torch.uint8\"," : "",
                     fp4 ? "float" : "int", fp4 ? "mxfp4-pack-quantized" : "pack-quantized");
}

}  // namespace fathom
