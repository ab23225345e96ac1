#include "ops/moe/bf16_cuda/moe_cuda.h"

#include <algorithm>

#include "base/check.h"
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

// An expert with more tokens than this is compute-bound, with fewer bandwidth-bound.
constexpr int64_t kFewTokensAnExpert = 64;
constexpr int32_t kFewTokens = 96;  // beyond, moe_many_rows was faster for V2-Lite (64 experts)

bool are_few(const MoeShape& shape, int32_t rows, const SmBudget& budget) {
  return rows <= kFewTokens &&
         int64_t{rows} * shape.experts_per_token <= kFewTokensAnExpert * shape.num_experts &&
         moe_few_rows_takes(shape, rows, budget);
}

}  // namespace

int64_t moe_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return std::max({moe_one_row_workspace_bytes(shape),
                   moe_few_rows_workspace_bytes(shape, std::min(rows, kFewTokens)),
                   moe_many_rows_workspace_bytes(shape, rows)});
}

void moe(const MoeArguments& a, GpuStream stream) {
  const MoeShape& s = a.shape;
  FATHOM_CHECK(s.hidden > 0 && s.hidden % 64 == 0 && s.inter > 0 && s.inter % 64 == 0 &&
                   s.shared_inter % 64 == 0,
               "hidden {}, intermediate {} and {}: multiples of 64 are wanted", s.hidden, s.inter,
               s.shared_inter);
  FATHOM_CHECK(s.num_experts <= kMostMoeExperts && s.experts_per_token <= s.num_experts,
               "{} of {} experts a token", s.experts_per_token, s.num_experts);
  FATHOM_CHECK(a.out_type == DType::kBF16 || a.out_type == DType::kF32, "out is {}",
               name_of(a.out_type));
  if (a.rows == 0) return;
  if (a.rows == 1 && !a.batch_invariant && moe_one_row_takes(s, a.budget)) {
    moe_one_row(a, stream);
  } else if (!a.batch_invariant && are_few(s, a.rows, a.budget)) {
    moe_few_rows(a, stream);
  } else {
    moe_many_rows(a, stream);
  }
}

}  // namespace fathom::cuda
