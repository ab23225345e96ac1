#include "placement/expert_table.h"

#include <gmock/gmock.h>

#include <map>

#include "placement/test_configs.h"

namespace fathom {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Every slot is its expert's copy, and every copy is a slot.
void expect_consistent(const ExpertTable& table) {
  for (int64_t layer = 0; layer < table.num_layers(); ++layer) {
    int64_t slots = 0, copies = 0;
    for (int rank = 0; rank < table.num_ranks(); ++rank) {
      slots += std::ssize(table.experts_of(layer, rank));
    }
    for (int64_t expert = 0; expert < table.num_experts(); ++expert) {
      ASSERT_FALSE(table.copies_of(layer, expert).empty());
      for (const ExpertCopy& copy : table.copies_of(layer, expert)) {
        ++copies;
        ASSERT_EQ(table.experts_of(layer, copy.rank)[static_cast<size_t>(copy.slot)], expert);
      }
    }
    ASSERT_EQ(slots, copies);
  }
}

std::string refusal(int64_t num_experts, int num_ranks, const ExpertLists& lists) {
  const auto table = ExpertTable::create(num_experts, num_ranks, lists, "p.json: ");
  return table ? "allowed" : table.error().message;
}

TEST(ExpertTable, ContiguousGivesTheFirstRanksOneMore) {
  const ExpertTable table = ExpertTable::contiguous(2, 11, 4);
  for (int64_t layer = 0; layer < 2; ++layer) {
    EXPECT_THAT(table.experts_of(layer, 0), ElementsAre(0, 1, 2));
    EXPECT_THAT(table.experts_of(layer, 1), ElementsAre(3, 4, 5));
    EXPECT_THAT(table.experts_of(layer, 2), ElementsAre(6, 7, 8));
    EXPECT_THAT(table.experts_of(layer, 3), ElementsAre(9, 10));
    EXPECT_THAT(table.copies_of(layer, 10), ElementsAre(ExpertCopy{3, 1}));
  }
  EXPECT_EQ(table.max_slots(), 3);
  expect_consistent(table);
}

TEST(ExpertTable, ContiguousKeepsV3sGroupsWhole) {
  const ExpertTable table = ExpertTable::contiguous(58, 256, 8);
  for (int rank = 0; rank < 8; ++rank) {
    ASSERT_EQ(table.experts_of(57, rank).size(), 32u);
    EXPECT_EQ(table.experts_of(57, rank).front() / 32, rank);
    EXPECT_EQ(table.experts_of(57, rank).back() / 32, rank);
  }
}

TEST(ExpertTable, RedundantCopiesAreThoseOfTheNextRank) {
  const ExpertTable table = ExpertTable::contiguous(1, 6, 3, 4);
  EXPECT_THAT(table.experts_of(0, 0), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(table.experts_of(0, 1), ElementsAre(2, 3, 4));
  EXPECT_THAT(table.experts_of(0, 2), ElementsAre(4, 5, 0));
  EXPECT_THAT(table.copies_of(0, 0), ElementsAre(ExpertCopy{0, 0}, ExpertCopy{2, 2}));
  EXPECT_THAT(table.copies_of(0, 1), ElementsAre(ExpertCopy{0, 1}));
  EXPECT_EQ(table.max_slots(), 4);
  expect_consistent(table);
}

TEST(ExpertTable, ContiguousHasNoExpertTwiceOnARank) {
  for (int64_t experts = 1; experts <= 9; ++experts) {
    for (int ranks = 1; ranks <= 6; ++ranks) {
      for (int64_t redundant = 0; redundant <= experts * (ranks - 1); ++redundant) {
        const ExpertTable table = ExpertTable::contiguous(1, experts, ranks, redundant);
        expect_consistent(table);
        int64_t slots = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          std::map<int32_t, int> times;
          for (const int32_t expert : table.experts_of(0, rank)) ++times[expert];
          for (const auto& [expert, count] : times) ASSERT_EQ(count, 1);
          slots += std::ssize(table.experts_of(0, rank));
        }
        ASSERT_EQ(slots, experts + redundant);
      }
    }
  }
}

TEST(ExpertTable, TakesRanksOfDifferentSizes) {
  const auto table = ExpertTable::create(3, 3, {{{2, 0}, {}, {1}}, {{0}, {1, 1}, {2, 0}}}, "");
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_THAT(table->experts_of(0, 0), ElementsAre(2, 0));
  EXPECT_THAT(table->experts_of(0, 1), IsEmpty());
  EXPECT_THAT(table->copies_of(0, 0), ElementsAre(ExpertCopy{0, 1}));
  EXPECT_THAT(table->copies_of(1, 0), ElementsAre(ExpertCopy{0, 0}, ExpertCopy{2, 1}));
  EXPECT_THAT(table->copies_of(1, 1), ElementsAre(ExpertCopy{1, 0}, ExpertCopy{1, 1}));
  expect_consistent(*table);
  EXPECT_EQ(*ExpertTable::create(3, 3, table->lists(), ""), *table);
  EXPECT_NE(ExpertTable::contiguous(2, 3, 3), *table);
}

TEST(ExpertTable, ChoosesCopiesInTurn) {
  const ExpertTable table = ExpertTable::contiguous(2, 4, 4, 8);  // three copies of each
  for (int64_t expert = 0; expert < 4; ++expert) {
    const auto copies = table.copies_of(1, expert);
    ASSERT_EQ(copies.size(), 3u);
    for (int home = 0; home < 4; ++home) {
      // Any 3 rows that follow each other take all copies once.
      for (int64_t row = 0; row < 6; ++row) {
        std::map<int32_t, int> times;
        for (int64_t i = row; i < row + 3; ++i) ++times[table.copy_for(1, expert, home, i).rank];
        EXPECT_EQ(times.size(), 3u);
        EXPECT_EQ(table.copy_for(1, expert, home, row), table.copy_for(1, expert, home, row));
      }
    }
    // One row on each rank takes them in turn as well, and so do experts.
    EXPECT_NE(table.copy_for(1, expert, 0, 0), table.copy_for(1, expert, 1, 0));
  }
  EXPECT_EQ(table.copy_for(1, 0, 0, 0), table.copies_of(1, 0)[0]);
  EXPECT_EQ(table.copy_for(1, 1, 0, 0), table.copies_of(1, 1)[1]);
  EXPECT_EQ(table.copy_for(1, 1, 3, 100), table.copies_of(1, 1)[104 % 3]);
}

TEST(ExpertTable, RefusesListsByFieldValueAndLimit) {
  EXPECT_EQ(refusal(3, 2, {{{0, 1}, {2}}}), "allowed");
  EXPECT_EQ(refusal(3, 2, {{{0, 1}, {2}}, {{0, 1}, {3}}}),
            "p.json: layers[1][1][0] is 3, experts are 0 to 2");
  EXPECT_EQ(refusal(3, 2, {{{0, -1}, {2}}}), "p.json: layers[0][0][1] is -1, experts are 0 to 2");
  EXPECT_EQ(refusal(3, 2, {{{0, 0}, {2}}}),
            "p.json: layers[0] has no copy of expert 1, each of the 3 needs one");
  EXPECT_EQ(refusal(3, 2, {{{0, 1, 2}}}), "p.json: layers[0] has 1 ranks, num_ranks is 2");
  EXPECT_EQ(refusal(3, 2, {}), "p.json: layers: their number is 0, allowed are 1 to 1032");
  EXPECT_EQ(refusal(3, 2, ExpertLists(1033, {{0, 1}, {2}})),
            "p.json: layers: their number is 1033, allowed are 1 to 1032");
  EXPECT_EQ(refusal(0, 2, {{{}, {}}}), "p.json: num_experts is 0, allowed are 1 to 16384");
  EXPECT_EQ(refusal(16385, 2, {{{}, {}}}), "p.json: num_experts is 16385, allowed are 1 to 16384");
  EXPECT_EQ(refusal(3, 0, {{}}), "p.json: num_ranks is 0, allowed are 1 to 1024");
  EXPECT_EQ(refusal(3, 1025, {{}}), "p.json: num_ranks is 1025, allowed are 1 to 1024");
  EXPECT_EQ(refusal(1, 1, {{std::vector<int32_t>(4'194'304)}}), "allowed");
  EXPECT_EQ(refusal(1, 1, {{{0}}, {std::vector<int32_t>(4'194'304)}}),
            "p.json: layers[1]: 4194305 slots in the layers so far, at most 4194304 are allowed in "
            "all");
}

TEST(ExpertTable, IsForAModelAndAPlacement) {
  const ModelConfig v3 = published_config("deepseek_v3");
  const Placement placement{.dp = 8, .expert_parallel = true, .redundant_experts = 8};
  const auto refused = [&](const ExpertTable& table, bool with_mtp) {
    const auto checked = check_expert_table(table, v3, placement, with_mtp);
    return checked ? "allowed" : checked.error().message;
  };
  EXPECT_EQ(refused(ExpertTable::contiguous(58, 256, 8, 8), false), "allowed");
  EXPECT_EQ(refused(ExpertTable::contiguous(59, 256, 8), true), "allowed");
  EXPECT_EQ(refused(ExpertTable::contiguous(58, 256, 8), true),
            "layers: there are 58, the model has 59 layers with routed experts");
  EXPECT_EQ(refused(ExpertTable::contiguous(58, 160, 8), false),
            "num_experts is 160, the model has 256 (n_routed_experts)");
  EXPECT_EQ(refused(ExpertTable::contiguous(58, 256, 16), false),
            "num_ranks is 16, the placement has tp * dp = 8");
  EXPECT_EQ(refused(ExpertTable::contiguous(58, 256, 8, 9), false),
            "layers[0][0] has 34 experts, a rank has 33 slots (256 experts and 8 "
            "redundant_experts over 8 ranks)");
}

}  // namespace
}  // namespace fathom
