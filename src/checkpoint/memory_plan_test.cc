#include "checkpoint/memory_plan.h"

#include <gmock/gmock.h>

namespace fathom {
namespace {

using testing::HasSubstr;
using testing::Not;

MemoryRequest request_of(int64_t budget) {
  MemoryRequest request;
  request.budget = budget;
  request.fixed = {{"weights", 1000}, {"working space", 24}};
  request.cache_row_bytes = 10;
  request.cache_layers = 2;
  request.page_tokens = 64;  // a page is 1,280 bytes
  return request;
}

TEST(MemoryPlan, TakesWholePages) {
  const auto plan = plan_memory(request_of(1024 + 3 * 1280 + 1279));
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->fixed_bytes, 1024);
  EXPECT_EQ(plan->bytes_per_token, 20);
  EXPECT_EQ(plan->pages, 3);
  EXPECT_EQ(plan->tokens(), 192);
  EXPECT_EQ(plan->cache_bytes(), 3840);
  EXPECT_THAT(memory_plan_table(*plan), HasSubstr("192 tokens in 3 pages"));
}

TEST(MemoryPlan, TellsOfIndexKeys) {
  MemoryRequest request = request_of(1024 + 3 * 1280);
  EXPECT_THAT(memory_plan_table(*plan_memory(request)), Not(HasSubstr("index keys")));
  request.index_key_bytes = 3;
  request.index_key_layers = 1;  // of 2
  const auto plan = plan_memory(request);
  EXPECT_EQ(plan->bytes_per_token, 23);
  EXPECT_THAT(memory_plan_table(*plan), HasSubstr("23 bytes a token, 3 of them index keys\n"));
}

TEST(MemoryPlan, TellsWhatARankTakes) {
  MemoryRequest request = request_of(INT64_C(8) << 30);
  request.max_total_tokens = 64 << 20;  // 1.25 GiB
  EXPECT_THAT(memory_plan_table(*plan_memory(request)), Not(HasSubstr("a rank")));
  request.rank = {.ranks = 2, .weights = 3 << 28, .working_space = 1 << 28};
  EXPECT_THAT(memory_plan_table(*plan_memory(request)),
              HasSubstr("  a rank, of 2                      1.6250 GiB  0.7500 weights, 0.2500 "
                        "working space, 0.6250 latent cache\n"));
}

TEST(MemoryPlan, HoldsToMaxTotalTokens) {
  MemoryRequest request = request_of(1024 + 3 * 1280);
  request.max_total_tokens = 65;
  EXPECT_EQ(plan_memory(request)->pages, 2);
  request.max_total_tokens = 192;
  EXPECT_EQ(plan_memory(request)->pages, 3);
  request.max_total_tokens = 193;
  const auto refused = plan_memory(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_THAT(refused.error().message, HasSubstr("--max-total-tokens 192 fits"));
  EXPECT_THAT(refused.error().message, HasSubstr("--kv-cache-dtype"));
  request.max_total_tokens = INT64_MAX;
  EXPECT_FALSE(plan_memory(request));
}

TEST(MemoryPlan, RefusesWeightsThatDoNotFit) {
  for (const int64_t budget : {int64_t{0}, int64_t{1023}, int64_t{1024 + 1279}}) {
    ASSERT_FALSE(plan_memory(request_of(budget))) << budget;
    EXPECT_THAT(plan_memory(request_of(budget)).error().message, HasSubstr("weights"));
  }
}

TEST(MemoryPlan, SeesTheMachine) {
  EXPECT_GT(available_memory().bytes, int64_t{1} << 20);
  EXPECT_LT(available_memory().bytes, int64_t{1} << 50);
  EXPECT_FALSE(available_memory().pool.empty());
}

}  // namespace
}  // namespace fathom
