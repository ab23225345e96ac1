// Which tensors hold a four-bit weight [out, in], under which names and in which shapes.
//
//   pack-quantized  weight_packed i32 [out, in/8], lowest nibble first; weight_scale [out, groups];
//                   weight_zero_point i32 [out/8, groups] unless symmetric; weight_shape [2];
//                   weight_g_idx i32 [in] with act-order
//   awq             qweight i32 [in, out/8], nibble k: column 8c + {0,2,4,6,1,3,5,7}[k]; qzeros i32
//                   [groups, out/8] in the same order; scales [groups, out]
//   gptq            qweight i32 [in/8, out]; qzeros i32 [groups, out/8]; scales [groups, out];
//   g_idx
//                   i32 [in]
//   mxfp4, nvfp4    weight_packed u8 [out, in/2], two E2M1 a byte; weight_scale [out, groups];
//                   weight_global_scale f32 [1] of nvfp4, which divides
//
// Sources: compressed-tensors 0.20, AutoAWQ 0.2, GPTQModel 2 (layouts read in their public code).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/model_config.h"

namespace fathom {

struct FourBitPart {
  enum class Role { kCodes, kScales, kZeros, kOrder, kShape, kGlobalScale };
  Role role = Role::kCodes;
  std::string_view suffix;  // takes the place of ".weight"
  std::vector<int64_t> shape;
  DType dtype = DType::kI32;  // as published; scales and shapes have others, too
  bool required = true;
};

// The suffix of the tensor with the codes; `quantization` is four-bit.
std::string_view four_bit_codes_suffix(const QuantizationConfig& quantization);

// All of a weight's tensors, the codes first.
std::vector<FourBitPart> four_bit_parts(const QuantizationConfig& quantization, int64_t rows,
                                        int64_t cols);

// Suffixes of what accompanies the codes in any of the formats.
bool is_four_bit_companion(std::string_view suffix);

}  // namespace fathom
