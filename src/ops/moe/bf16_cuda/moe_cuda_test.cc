// The mixture of experts on the GPU: a row's result is bitwise identical in any number of rows.
#include "ops/moe/bf16_cuda/moe_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ops/moe/bf16_cuda/moe_problem_cuda.h"

namespace fathom::cuda {
namespace {

// Runs the first `rows` rows alone.
std::vector<float> run(const MoeProblem& problem, int32_t rows) {
  check(cudaMemset(problem.out.data(), 0xFF, problem.out.bytes()), "poison");
  check(cudaMemset(problem.workspace.data(), 0xFF, problem.workspace.bytes()), "poison");
  MoeArguments arguments = problem.arguments(DType::kF32);
  arguments.rows = rows;
  arguments.batch_invariant = true;
  moe(arguments, nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  auto out = problem.out.to_host();
  out.resize(static_cast<size_t>(rows) * static_cast<size_t>(problem.shape.hidden));
  return out;
}

TEST(BatchInvariantMoe, RowsHaveTheSameBitsInAnyNumber) {
  constexpr int32_t kMostRows = 700;
  const MoeShape shapes[] = {
      {.hidden = 256, .num_experts = 16, .experts_per_token = 4, .inter = 128, .shared_inter = 128},
      {.hidden = 2048,
       .num_experts = 8,
       .experts_per_token = 6,
       .inter = 1408,
       .shared_inter = 2816},
      {.hidden = 1024, .num_experts = 1, .experts_per_token = 1, .inter = 2752}};
  for (const MoeShape& shape : shapes) {
    SCOPED_TRACE(testing::Message() << shape.num_experts << " experts");
    const MoeProblem problem(shape, kMostRows, random_experts(shape, kMostRows, 5), 6);
    const auto expected = run(problem, kMostRows);
    // Up to 64, 128 and 192 rows an expert: different tile sizes.
    for (const int32_t rows : {1, 2, 7, 33, 64, 65, 128, 190, 210, 500}) {
      const auto actual = run(problem, rows);
      EXPECT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin())) << rows << " rows";
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
