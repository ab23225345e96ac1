#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"

#include <algorithm>

#include "base/check.h"

namespace fathom::cuda {
namespace {

// The few-row launches take eight of an expert's tokens at a time and fall off beyond; some experts
// have more than the average.
constexpr int64_t kFewTokensAnExpert = 6;

bool are_few(const MoeShape& shape, int32_t rows) {
  const int64_t pairs = int64_t{rows} * shape.experts_per_token;
  return pairs <= kFourBitFewPairs && pairs <= kFewTokensAnExpert * shape.num_experts;
}

}  // namespace

int64_t four_bit_moe_workspace_bytes(const MoeShape& shape, int32_t rows) {
  const int64_t few = std::min<int64_t>(kFourBitFewPairs, kFewTokensAnExpert * shape.num_experts) /
                      std::max(shape.experts_per_token, 1);
  return std::max(four_bit_moe_few_rows_workspace_bytes(
                      shape, static_cast<int32_t>(std::min<int64_t>(rows, few))),
                  four_bit_moe_many_rows_workspace_bytes(shape, rows));
}

void four_bit_moe(const FourBitMoeArguments& a, GpuStream stream) {
  const MoeShape& s = a.shape;
  FATHOM_CHECK(s.hidden > 0 && s.hidden % 64 == 0 && s.inter > 0 && s.inter % 64 == 0 &&
                   std::max(s.hidden, s.inter) <= kFourBitMostColumns,
               "hidden {}, intermediate {}: multiples of 64 up to {} are wanted", s.hidden, s.inter,
               kFourBitMostColumns);
  FATHOM_CHECK(s.num_experts <= kMostMoeExperts && s.experts_per_token <= s.num_experts,
               "{} of {} experts a token", s.experts_per_token, s.num_experts);
  FATHOM_CHECK(a.out_type == DType::kBF16 || a.out_type == DType::kF32, "out is {}",
               name_of(a.out_type));
  if (a.rows == 0) return;
  if (!a.batch_invariant && are_few(s, a.rows)) {
    four_bit_moe_few_rows(a, stream);
  } else {
    four_bit_moe_many_rows(a, stream);
  }
}

}  // namespace fathom::cuda
