#include "engine/roles.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

constexpr RoleLimits kLimits{.prefill_step_rows = 100, .prefill_slots = 8, .decode_slots = 16};
constexpr RoleLoad kBacklog{.rows_missing = 400}, kQuiet{.rows_missing = 100, .decoding = 1};
constexpr RoleLoad kFull{.rows_missing = 100, .decoding = 16, .is_full = true};

void update(Roles& roles, const RoleLoad& load, int times = kRoleSteps) {
  for (int i = 0; i < times; ++i) roles.update(load);
}

TEST(Roles, DecodeLanesComputePromptsWhileTheOthersHaveABacklog) {
  Roles roles(kLimits);
  EXPECT_FALSE(roles.keep_prompt());
  update(roles, kBacklog, kRoleSteps - 1);
  EXPECT_FALSE(roles.keep_prompt()) << "not for a moment's load";
  update(roles, kQuiet, 1);
  update(roles, kBacklog, kRoleSteps - 1);
  EXPECT_FALSE(roles.keep_prompt()) << "it began again";
  update(roles, kBacklog, 1);
  EXPECT_TRUE(roles.keep_prompt());
  update(roles, {.rows_missing = 101, .decoding = 2});
  EXPECT_TRUE(roles.keep_prompt()) << "between the limits nothing changes";
  update(roles, {.rows_missing = 100, .decoding = 2}, kRoleSteps - 1);
  EXPECT_TRUE(roles.keep_prompt());
  update(roles, {.rows_missing = 100, .decoding = 2}, 1);
  EXPECT_FALSE(roles.keep_prompt());
  const RoleStats stats = roles.stats();
  EXPECT_EQ(stats.decode_changes, 1);
  EXPECT_EQ(stats.prompts_kept, 3);
  EXPECT_EQ(stats.prefill_changes, 0);
}

TEST(Roles, DecodeLanesThatDecodeComputeNoPrompts) {
  Roles roles(kLimits);
  update(roles, {.rows_missing = 400, .decoding = 1}, 100);
  EXPECT_FALSE(roles.stats().decode_computes);
  update(roles, {.rows_missing = 399}, 100);
  EXPECT_FALSE(roles.stats().decode_computes) << "no backlog";
  update(roles, kBacklog);
  update(roles, {.rows_missing = 4000, .decoding = 2}, 100);
  EXPECT_TRUE(roles.stats().decode_computes) << "an eighth of 16";
  update(roles, {.rows_missing = 4000, .decoding = 3});
  EXPECT_FALSE(roles.stats().decode_computes);
}

TEST(Roles, PrefillLanesTakeRequestsWhileTheOthersAreFull) {
  Roles roles(kLimits);
  update(roles, kFull, kRoleSteps - 1);
  EXPECT_FALSE(roles.prefill_takes(1));
  update(roles, kFull, 1);
  EXPECT_TRUE(roles.prefill_takes(1));
  update(roles, {.rows_missing = 399, .decoding = 16, .is_full = true}, 100);
  EXPECT_TRUE(roles.prefill_takes(1)) << "between the limits nothing changes";
  update(roles, {.rows_missing = 400, .decoding = 16, .is_full = true});
  EXPECT_FALSE(roles.prefill_takes(1)) << "prompts go first";
  update(roles, {.rows_missing = 101, .decoding = 16, .is_full = true}, 100);
  EXPECT_FALSE(roles.prefill_takes(1));
  update(roles, kFull);
  EXPECT_TRUE(roles.prefill_takes(1));
  update(roles, {.decoding = 16});
  EXPECT_FALSE(roles.prefill_takes(1)) << "there is room";
  EXPECT_EQ(roles.stats().prefill_changes, 2);
}

TEST(Roles, PrefillLanesTakeAsManyChoicesAsTheyHaveSlots) {
  Roles roles(kLimits);
  update(roles, kFull);
  EXPECT_FALSE(roles.prefill_takes(9));
  roles.begin_choices(6);
  EXPECT_TRUE(roles.prefill_takes(2));
  EXPECT_FALSE(roles.prefill_takes(3));
  roles.end_choices(1);
  EXPECT_TRUE(roles.prefill_takes(3));
}

TEST(Roles, AnIdleSiteHasItsOwnRoleAtOnce) {
  Roles roles(kLimits);
  update(roles, kFull);
  update(roles, kBacklog);
  EXPECT_TRUE(roles.stats().decode_computes);
  update(roles, {.is_idle = true}, 1);
  EXPECT_FALSE(roles.stats().decode_computes || roles.stats().prefill_takes);
  update(roles, kBacklog, kRoleSteps - 1);
  EXPECT_FALSE(roles.stats().decode_computes);
}

}  // namespace
}  // namespace fathom
