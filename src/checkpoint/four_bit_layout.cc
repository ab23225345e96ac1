#include "checkpoint/four_bit_layout.h"

#include <algorithm>
#include <iterator>

#include "base/math.h"

namespace fathom {
namespace {

using Kind = QuantizationConfig::Kind;
using Role = FourBitPart::Role;

constexpr int64_t kWordCodes = 8;

// Beside ".weight_packed" or ".qweight". The scales of activations are there in files made for
// four-bit arithmetic, which is not used.
constexpr std::string_view kCompanions[] = {".weight_scale",
                                            ".weight_zero_point",
                                            ".weight_g_idx",
                                            ".weight_shape",
                                            ".scales",
                                            ".qzeros",
                                            ".weight_global_scale",
                                            ".input_global_scale",
                                            ".g_idx",
                                            ".input_scale"};

}  // namespace

std::string_view four_bit_codes_suffix(const QuantizationConfig& quantization) {
  const bool words = quantization.kind == Kind::kAwq || quantization.kind == Kind::kGptq;
  return words ? ".qweight" : ".weight_packed";
}

std::vector<FourBitPart> four_bit_parts(const QuantizationConfig& quantization, int64_t rows,
                                        int64_t cols) {
  const int64_t groups = quantization.group_cols == 0 ? 1 : ceil_div(cols, quantization.group_cols);
  const int64_t row_words = ceil_div(rows, kWordCodes), col_words = ceil_div(cols, kWordCodes);
  const bool zeros = !quantization.symmetric;
  std::vector<FourBitPart> parts;
  const auto add = [&](Role role, std::string_view suffix, std::vector<int64_t> shape, DType dtype,
                       bool required = true) {
    parts.push_back({role, suffix, std::move(shape), dtype, required});
  };
  const auto codes = four_bit_codes_suffix(quantization);
  switch (quantization.kind) {
    case Kind::kPackedInt4:
      add(Role::kCodes, codes, {rows, col_words}, DType::kI32);
      add(Role::kScales, ".weight_scale", {rows, groups}, DType::kBF16);
      if (zeros) add(Role::kZeros, ".weight_zero_point", {row_words, groups}, DType::kI32);
      add(Role::kOrder, ".weight_g_idx", {cols}, DType::kI32, false);
      add(Role::kShape, ".weight_shape", {2}, DType::kI64);
      break;
    case Kind::kAwq:
      add(Role::kCodes, codes, {cols, row_words}, DType::kI32);
      add(Role::kScales, ".scales", {groups, rows}, DType::kF16);
      add(Role::kZeros, ".qzeros", {groups, row_words}, DType::kI32);
      break;
    case Kind::kGptq:
      add(Role::kCodes, codes, {col_words, rows}, DType::kI32);
      add(Role::kScales, ".scales", {groups, rows}, DType::kF16);
      add(Role::kZeros, ".qzeros", {groups, row_words}, DType::kI32);
      add(Role::kOrder, ".g_idx", {cols}, DType::kI32, quantization.act_order);
      break;
    case Kind::kMxfp4:
      add(Role::kCodes, codes, {rows, ceil_div(cols, 2)}, DType::kU8);
      add(Role::kScales, ".weight_scale", {rows, groups}, DType::kU8);
      break;
    case Kind::kNvfp4:
      add(Role::kCodes, codes, {rows, ceil_div(cols, 2)}, DType::kU8);
      add(Role::kScales, ".weight_scale", {rows, groups}, DType::kF8E4M3);
      add(Role::kGlobalScale, ".weight_global_scale", {1}, DType::kF32);
      break;
    default:
      break;
  }
  return parts;
}

bool is_four_bit_companion(std::string_view suffix) {
  return std::find(std::begin(kCompanions), std::end(kCompanions), suffix) != std::end(kCompanions);
}

}  // namespace fathom
