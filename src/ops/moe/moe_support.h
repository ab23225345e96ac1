// Shapes that moe(), scaled_moe() and four_bit_moe() support on a GPU (moe_cuda.h,
// scaled_moe_cuda.h, four_bit_moe_cuda.h). Host code.
#pragma once

#include "base/named_size.h"
#include "ops/moe/plans/four_bit_moe_plan.h"
#include "ops/moe/plans/moe_few_rows_plan.h"

namespace fathom::cuda {

// Intermediate widths are free: the model pads them with zeros (model/weights_cuda.h). Hidden sizes
// in e4m3 must be multiples of 128; others are held in bf16.
inline Result<> moe_supports(const NamedSize& hidden, const NamedSize& experts) {
  FATHOM_RETURN_IF_ERROR(require_multiple(hidden, 64));
  return require_at_most(experts, kMostMoeExperts);
}

// What four bits need beside that; `inter` may be padded with zeros.
inline Result<> four_bit_moe_supports(const NamedSize& hidden, const NamedSize& inter) {
  FATHOM_RETURN_IF_ERROR(require_at_most(hidden, kFourBitMostColumns));
  return require_at_most(inter, kFourBitMostColumns);
}

}  // namespace fathom::cuda
