// What `fathom quantize` writes: the tensors that a weight becomes, and the configuration that says
// so.
//
//   fp8                      every linear layer: X.weight e4m3, X.weight_scale_inv f32 by 128x128
//   int4-g32, int4-g128      routed experts, as compressed-tensors pack-quantized
//   mxfp4                    routed experts, as compressed-tensors mxfp4-pack-quantized
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weight_names.h"
#include "tensor/four_bit.h"
#include "tensor/scale_form.h"

namespace fathom {

struct QuantizeFormat {
  enum class Kind { kFp8, kInt4, kMxfp4 };
  Kind kind = Kind::kFp8;
  ScaleForm scale_form = ScaleForm::kF32;  // fp8
  int64_t group_cols = 0;                  // four bits

  bool is_four_bit() const { return kind != Kind::kFp8; }
  FourBitCode code() const {
    return kind == Kind::kMxfp4 ? FourBitCode::kE2m1 : FourBitCode::kInteger;
  }
};

// The format of this name; nothing for others. "fp8", "int4-g32", "int4-g128", "mxfp4".
std::optional<QuantizeFormat> quantize_format_named(std::string_view name);
std::string name_of(const QuantizeFormat& format);

// Whether the format quantizes this weight.
bool is_quantized_by(const QuantizeFormat& format, const WeightNames& names,
                     std::string_view weight);

// A tensor that a quantized weight becomes.
struct WrittenTensor {
  enum class Role { kValues, kScales, kShape };
  Role role = Role::kValues;
  std::string name;
  DType dtype = DType::kF8E4M3;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};
std::vector<WrittenTensor> written_tensors(const QuantizeFormat& format, const std::string& weight,
                                           int64_t rows, int64_t cols);

// The quantization_config in config.json, as lines behind a comma.
std::string quantization_config_text(const QuantizeFormat& format);

}  // namespace fathom
