#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"

#include <algorithm>

#include "base/check.h"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int32_t kFewScaledTokens = 64;  // beyond, the launches of many rows are faster

// One token with more activations is faster in the few-row kernel, because in the one-row kernel
// each CTA quantizes all of them.
constexpr int64_t kMostActivationsOfOne = 8192;

bool is_one_scaled(const MoeShape& shape, int32_t rows, const SmBudget& budget) {
  return rows == 1 &&
         int64_t{shape.experts_per_token} * shape.inter + shape.shared_inter <=
             kMostActivationsOfOne &&
         scaled_moe_one_row_takes(shape, budget);
}

bool are_few_scaled(const MoeShape& shape, int32_t rows, const SmBudget& budget) {
  return rows <= kFewScaledTokens && scaled_moe_few_rows_takes(shape, rows, budget);
}

}  // namespace

int64_t scaled_moe_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return std::max({scaled_moe_one_row_workspace_bytes(shape),
                   scaled_moe_few_rows_workspace_bytes(shape, std::min(rows, kFewScaledTokens)),
                   scaled_moe_many_rows_workspace_bytes(shape, rows)});
}

void scaled_moe(const ScaledMoeArguments& a, GpuStream stream) {
  const MoeShape& s = a.shape;
  FATHOM_CHECK(s.hidden > 0 && s.hidden % 128 == 0 && s.inter > 0 && s.inter % 128 == 0 &&
                   s.shared_inter % 128 == 0,
               "hidden {}, intermediate {} and {}: multiples of 128 are wanted", s.hidden, s.inter,
               s.shared_inter);
  FATHOM_CHECK(s.num_experts <= kMostMoeExperts && s.experts_per_token <= s.num_experts,
               "{} of {} experts a token", s.experts_per_token, s.num_experts);
  FATHOM_CHECK(a.out_type == DType::kBF16 || a.out_type == DType::kF32, "out is {}",
               name_of(a.out_type));
  if (a.rows == 0) return;
  if (!a.batch_invariant && is_one_scaled(s, a.rows, a.budget)) {
    scaled_moe_one_row(a, stream);
  } else if (!a.batch_invariant && are_few_scaled(s, a.rows, a.budget)) {
    scaled_moe_few_rows(a, stream);
  } else {
    scaled_moe_many_rows(a, stream);
  }
}

}  // namespace fathom::cuda
