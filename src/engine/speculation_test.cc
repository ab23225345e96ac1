// Speculation changes no answer: random loads over all sampling options against the serial oracle,
// whatever the drafter does.
#include <gtest/gtest.h>

#include "engine/engine_load.h"

namespace fathom {
namespace {

using Kind = FakeDrafts::Kind;

struct Counts {
  int64_t windows = 0, drafted = 0, accepted = 0, preemptions = 0, hits = 0, errors = 0;
};

void add(const EngineStats& stats, Counts& counts) {
  const SpeculationStats& speculation = stats.speculation;
  counts.windows += speculation.drafts;
  counts.drafted += speculation.draft_tokens;
  counts.accepted += speculation.accepted_tokens;
  counts.preemptions += stats.preemptions;
  counts.hits += stats.prefix_hits;
  counts.errors += stats.failed;
  EXPECT_LE(speculation.accepted_tokens, speculation.draft_tokens);
}

class Speculation : public testing::TestWithParam<Kind> {};

TEST_P(Speculation, AnswersAreThoseOfTheOracle) {
  Counts counts;
  for (int64_t drafts = 1; drafts <= kMaxDrafts; ++drafts) {
    for (const bool caching : {false, true}) {
      Load load{.model = {.num_pages = 2000},
                .options = {.prefix_caching = caching, .eos_ids = {kFakeEos}},
                .num_requests = 40,
                .drafts = {drafts, GetParam()},
                .seed = static_cast<uint32_t>(drafts)};
      add(run_once(load), counts);
    }
  }
  EXPECT_GT(counts.drafted, 1000);
  EXPECT_GT(counts.errors, 0) << "dead ends of grammars";
  const double rate = static_cast<double>(counts.accepted) / static_cast<double>(counts.drafted);
  EXPECT_GT(rate, GetParam() == Kind::kRight ? 0.5 : 0);
  EXPECT_LT(rate, GetParam() == Kind::kWrong ? 0.25 : 1);
}

// Small caches, forced preemption, small budgets, aborts: all of them at once.
TEST_P(Speculation, AnswersAreThoseOfTheOracleWhenPagesRunOut) {
  Counts counts;
  for (uint32_t seed = 0; seed < 10; ++seed) {
    Load load{
        .model = {.num_pages = 5 + seed},
        .options = {.max_num_seqs = 12,
                    .max_batched_tokens = 12 + 15 * (seed % 4),
                    .max_prompt_logit_rows = 5,
                    .prefix_caching = seed % 3 != 0,
                    .adapts_drafts = seed % 4 == 1,
                    .eos_ids = {kFakeEos},
                    .preempt_every = std::initializer_list<int64_t>{0, 1, 3, 7}.begin()[seed % 4]},
        .num_requests = 30,
        .abort_share = seed % 2 == 0 ? 0.3 : 0,
        .drafts = {1 + seed % kMaxDrafts, GetParam()},
        .seed = 40 + seed};
    add(run_once(load), counts);
  }
  EXPECT_GT(counts.drafted, 500);
  EXPECT_GT(counts.preemptions, 20);
}

// Steps with drafts in turns with steps that overlap without.
TEST_P(Speculation, AnswersAreThoseOfTheOracleWithTwoStepsInFlight) {
  Counts counts;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Load load{.model = {.num_pages = seed % 2 == 0 ? 2000 : 9},
              .options = {.max_num_seqs = 12,
                          .max_batched_tokens = 60,
                          .adapts_drafts = seed % 3 != 2,
                          .eos_ids = {kFakeEos},
                          .preempt_every = seed % 2 == 0 ? 0 : 5},
              .num_requests = 30,
              .steps_in_flight = 2,
              .drafts = {1 + seed % kMaxDrafts, GetParam()},
              .seed = 80 + seed};
    add(run_once(load), counts);
  }
  EXPECT_GT(counts.drafted, 300);
  EXPECT_GT(counts.preemptions, 10);
}

TEST_P(Speculation, LanesAndOffloadKeepTheDraftersRows) {
  const int64_t page_bytes = FakeRunner(FakeModel{}).page_transfer(0)->page_bytes();
  Counts counts;
  for (const int lanes : {1, 3}) {
    Load load{.model = {.num_pages = 14, .num_lanes = lanes},
              .options = {.max_num_seqs = 6,
                          .max_batched_tokens = 70,
                          .kv_offload_bytes = 50 * page_bytes * lanes,
                          .eos_ids = {kFakeEos},
                          .preempt_every = 9},
              .num_requests = 60,
              .shared_share = 1,
              .copies = {.late = lanes == 3},
              .drafts = {kMaxDrafts, GetParam()},
              .seed = static_cast<uint32_t>(lanes)};
    const EngineStats stats = run_once(load);
    add(stats, counts);
    EXPECT_GT(stats.prefix_hits, 0);
  }
  EXPECT_GT(counts.drafted, 500);
}

std::string name_of_kind(const testing::TestParamInfo<Kind>& test) {
  const std::string names[] = {"Right", "Wrong", "InTurns", "Adversarial", "Repeating"};
  return names[static_cast<int>(test.param)];
}

INSTANTIATE_TEST_SUITE_P(Drafters, Speculation,
                         testing::Values(Kind::kRight, Kind::kWrong, Kind::kInTurns,
                                         Kind::kAdversarial, Kind::kRepeating),
                         name_of_kind);

}  // namespace
}  // namespace fathom
