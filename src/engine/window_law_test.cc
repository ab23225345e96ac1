// The law of what a window gives: the tokens of many seeds against the model's exact distribution,
// without drafts and with three, whatever the drafter does.
#include <gtest/gtest.h>

#include <latch>

#include "engine/engine.h"
#include "engine/fake_runner.h"
#include "ops/sampling/chi_square.h"

namespace fathom {
namespace {

using Kind = FakeDrafts::Kind;
using Tokens = std::vector<int32_t>;

// The first token is the prompt's step's, the others one window's: the newest token's row and those
// of three drafts.
constexpr int64_t kTokens = 1 + 1 + kMaxDrafts;

// Temperature 1 without filters. A bias leaves three tokens whose probabilities are not negligible,
// so that all sequences of kTokens tokens can be counted.
Request request_of(uint64_t seed) {
  Request request;
  request.prompt_ids = {3, 1, 4};
  request.sampling.seed = seed;
  request.sampling.temperature = 1;
  request.sampling.max_tokens = kTokens;
  request.sampling.ignore_eos = true;
  request.sampling.logit_bias = {{'a', 40.0f}, {'b', 41.0f}, {'c', 40.5f}};
  return request;
}

// Each sequence's probability by the model's own logits, in double precision; those without the
// biased tokens only are less likely than 10^-12 together.
void add_probabilities(const FakeModel& model, uint64_t hash, const Tokens& tokens, double p,
                       std::map<Tokens, double>& law) {
  if (std::ssize(tokens) == kTokens) {
    law[tokens] = p;
    return;
  }
  std::vector<float> logits;
  model.logits_after(hash, logits);
  double sum = 0;
  const auto bias = request_of(0).sampling.logit_bias;
  for (const auto& [id, value] : bias) logits[static_cast<size_t>(id)] += value;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  for (const auto& [id, value] : bias) {
    Tokens longer = tokens;
    longer.push_back(id);
    add_probabilities(model, FakeModel::extend(hash, id), longer,
                      p * std::exp(static_cast<double>(logits[static_cast<size_t>(id)])) / sum,
                      law);
  }
}

struct Draws {
  std::map<Tokens, int> counts;
  SpeculationStats stats;
};

Draws draw(const FakeModel& model, const FakeDrafts& drafts, uint64_t count) {
  constexpr uint64_t kAtOnce = 500;
  auto runner = std::make_unique<FakeRunner>(model);
  runner->drafts = drafts;
  auto engine =
      *Engine::create({.max_num_seqs = 64, .prefix_caching = false, .eos_ids = {kFakeEos}},
                      std::move(runner), fake_tokenizer());
  Draws draws;
  for (uint64_t first = 0; first < count; first += kAtOnce) {
    std::vector<Tokens> tokens(kAtOnce);
    std::latch ended(kAtOnce);
    for (uint64_t i = 0; i < kAtOnce; ++i) {
      const auto id = engine->submit(request_of(first + i), [&, i](const Event& event) {
        tokens[i].insert(tokens[i].end(), event.ids.begin(), event.ids.end());
        if (event.last) ended.count_down();
      });
      EXPECT_TRUE(id.has_value()) << id.error().message;
    }
    ended.wait();
    for (const Tokens& of_request : tokens) ++draws.counts[of_request];
  }
  draws.stats = engine->stats().speculation;
  return draws;
}

// Sequences that are expected less than ten times count as one, the empty one.
template <typename Value>
std::map<Tokens, Value> with_rare_ones_merged(const std::map<Tokens, Value>& values,
                                              const std::map<Tokens, double>& law, uint64_t count) {
  std::map<Tokens, Value> merged;
  for (const auto& [tokens, value] : values) {
    const auto found = law.find(tokens);
    const bool is_rare = found != law.end() && found->second * static_cast<double>(count) < 10;
    merged[is_rare ? Tokens() : tokens] += value;
  }
  return merged;
}

void expect_law(uint64_t count) {
  const FakeModel model{.num_pages = 200};
  uint64_t hash = 0;
  for (const int32_t id : request_of(0).prompt_ids) hash = FakeModel::extend(hash, id);
  std::map<Tokens, double> law;
  add_probabilities(model, hash, {}, 1, law);
  ASSERT_EQ(law.size(), 243u);
  const auto deviation = [&](const Draws& draws) {
    return chi_square_deviation(with_rare_ones_merged(draws.counts, law, count),
                                with_rare_ones_merged(law, law, count));
  };
  ASSERT_GT(with_rare_ones_merged(law, law, count).size(), 50u);
  const Draws without = draw(model, {}, count);
  EXPECT_EQ(without.stats.drafts, 0);
  EXPECT_LT(deviation(without), kMostDeviation);
  for (const Kind kind : {Kind::kRight, Kind::kWrong, Kind::kInTurns, Kind::kRepeating}) {
    const Draws with = draw(model, {kMaxDrafts, kind}, count);
    const double accepted = static_cast<double>(with.stats.accepted_tokens) /
                            static_cast<double>(with.stats.draft_tokens);
    std::printf("drafter %d: %.3f of the drafts accepted, chi-square %+.2f deviations\n",
                static_cast<int>(kind), accepted, deviation(with));
    EXPECT_EQ(accepted == 1, kind == Kind::kRight);
    EXPECT_GT(accepted, 0.05);
    EXPECT_LT(deviation(with), kMostDeviation) << "drafter " << static_cast<int>(kind);
    // The law could hold with other tokens for each seed.
    EXPECT_EQ(with.counts, without.counts);
  }
}

TEST(WindowLaw, TokensFollowTheDistribution) { expect_law(20'000); }

TEST(WindowLaw, DISABLED_TokensFollowTheDistributionOver100000Draws) { expect_law(100'000); }

}  // namespace
}  // namespace fathom
