// How many of the bundled model's drafts are accepted, by kind of text, temperature and position;
// and what must not change it: prefix hits, grammars.
#include <gtest/gtest.h>

#include "e2e/speculation_runs.h"
#include "grammar/schema_validator.h"

namespace fathom {
namespace {

std::vector<Request> requests_of(const std::vector<std::vector<int32_t>>& prompts,
                                 double temperature, int64_t max_tokens, bool ignore_eos) {
  std::vector<Request> requests;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request& request = requests.emplace_back();
    request.prompt_ids = prompts[i];
    request.sampling.temperature = temperature;
    request.sampling.seed = i;
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = ignore_eos;
  }
  return requests;
}

constexpr int64_t kTexts = 60;

std::vector<Request> prose(double temperature, int64_t texts = kTexts) {
  return requests_of(prose_pieces(texts, 100), temperature, 160, true);
}

std::vector<Request> questions(const std::string& set, int64_t count, double temperature) {
  std::vector<std::vector<int32_t>> prompts;
  for (EvalPrompt& prompt : eval_prompts(set, count)) prompts.push_back(std::move(prompt.ids));
  return requests_of(prompts, temperature, 160, false);
}

// The share of windows in which the first drafts, up to each position, were the tokens that were
// sampled; and the tokens of a window.
struct Acceptance {
  std::array<double, kMaxDrafts> reached{};
  double tokens = 0;
};

Acceptance acceptance(const std::string& text, std::vector<Request> requests, int64_t drafts) {
  const double temperature = requests.front().sampling.temperature;
  const SpeculationStats stats = run_with_drafts(kServed, drafts, std::move(requests)).stats;
  const auto windows = static_cast<double>(stats.drafts);
  Acceptance found;
  found.tokens = 1 + static_cast<double>(stats.accepted_tokens) / windows;
  std::printf("%s, temperature %g, %lld drafts, %lld windows:", text.c_str(), temperature,
              static_cast<long long>(drafts), static_cast<long long>(stats.drafts));
  for (size_t i = 0; i < static_cast<size_t>(drafts); ++i) {
    found.reached[i] = static_cast<double>(stats.accepted_per_pos[i]) / windows;
    std::printf(" %.3f", found.reached[i]);
  }
  std::printf(", %.2f tokens a window\n", found.tokens);
  return found;
}

// Measured with another implementation of the model, over other texts and by the same rule: 0.516
// and 0.561; with a drafter that takes the largest logit 0.271 and 0.440, with noise of its own
// less than 0.3. Other choices of 40 and 60 texts give 0.510 to 0.539 at temperature 1.
void expect_shared_noise(int64_t texts, double within) {
  EXPECT_NEAR(acceptance("prose", prose(1, texts), 1).reached[0], 0.516, within);
  EXPECT_NEAR(acceptance("prose", prose(0.6, texts), 1).reached[0], 0.561, within);
}

TEST(SpeculationAcceptance, SampledDraftsShareTheSamplersNoise) { expect_shared_noise(8, 0.08); }

TEST(SpeculationAcceptance, DISABLED_SampledDraftsOfAllTextsShareTheSamplersNoise) {
  expect_shared_noise(kTexts, 0.02);
}

// Greedy ones as training measured them: 0.9955, 1, 0.9995 and 1.
TEST(SpeculationAcceptance, FloorsByText) {
  const auto first = [](const std::string& set, int64_t count, double temperature) {
    return acceptance(set, questions(set, count, temperature), 1).reached[0];
  };
  EXPECT_NEAR(first("arithmetic", 15, 0), 0.9955, 0.01);
  EXPECT_GE(first("json", 10, 0), 0.99);
  EXPECT_GE(first("tools", 10, 0), 0.99);
  EXPECT_GE(first("retrieval", 5, 0), 0.99);
  EXPECT_GE(first("json", 12, 1), 0.98);
}

// Another implementation, over other texts, prose by position: greedy 0.753, 0.547, 0.406; 0.561,
// 0.271, 0.135 at temperature 0.6; 0.516, 0.219, 0.095 at 1.
TEST(SpeculationAcceptance, DISABLED_ProseByTemperature) {
  for (const double temperature : {0.0, 0.6, 1.0}) {
    acceptance("prose", prose(temperature), kMaxDrafts);
  }
}

// At temperature 0.6 and 1 the same implementation's first drafts, which no set may fall short of
// by more than 0.02.
TEST(SpeculationAcceptance, DISABLED_AnswersByTemperature) {
  const struct {
    const char* set;
    double warm, hot;
  } sets[] = {{"arithmetic", 0.979, 0.985},
              {"json", 0.985, 0.988},
              {"tools", 0.986, 0.987},
              {"retrieval", 0.968, 0.974}};
  for (const auto& [set, warm, hot] : sets) {
    acceptance(set, questions(set, 60, 0), kMaxDrafts);
    EXPECT_GE(acceptance(set, questions(set, 60, 0.6), kMaxDrafts).reached[0], warm - 0.02);
    EXPECT_GE(acceptance(set, questions(set, 60, 1), kMaxDrafts).reached[0], hot - 0.02);
  }
}

// Completions behind a hit of one page, of two and of all pages of the prompt have the drafts of
// those whose prompt was computed whole.
TEST(SpeculationAcceptance, PrefixHitsDoNotChangeIt) {
  const std::vector<std::vector<int32_t>> texts = prose_pieces(2, 260);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < texts.size(); ++i) {
    prompts.push_back(texts[i]);
    for (const int64_t shared : {64, 128, 200}) {
      prompts.emplace_back(texts[i].begin(), texts[i].begin() + shared);
      const std::vector<int32_t>& other = texts[(i + 1) % texts.size()];
      prompts.back().insert(prompts.back().end(), other.begin() + 1, other.begin() + 30);
    }
    prompts.push_back(texts[i]);
  }
  for (const double temperature : {0.0, 1.0}) {
    const auto run = [&](bool shares_prefixes) {
      SpeculationSetting setting = kServed;
      setting.is_serial = true;
      setting.shares_prefixes = shares_prefixes;
      return run_with_drafts(setting, 2, requests_of(prompts, temperature, 24, true));
    };
    const SpeculationOutcome whole = run(false), behind_hits = run(true);
    EXPECT_EQ(whole.prefix_hits, 0);
    EXPECT_GE(behind_hits.prefix_hits, 2 * (64 + 128 + 192 + 256));
    EXPECT_EQ(behind_hits.choices, whole.choices);
    EXPECT_GT(whole.stats.accepted_tokens, whole.stats.draft_tokens / 4);
    EXPECT_EQ(behind_hits.stats.drafts, whole.stats.drafts);
    EXPECT_EQ(behind_hits.stats.accepted_per_pos, whole.stats.accepted_per_pos);
  }
}

// JSON by the schemas of the evaluation set's questions, at temperature 1: without drafts and with
// three the same answers, and all that come to their end match.
void expect_valid_json(int64_t answers) {
  constexpr std::string_view kBefore = "matches this schema:\n";
  std::vector<Request> requests;
  std::vector<json::value> schemas;  // of the requests
  for (const EvalPrompt& prompt : eval_prompts("json", 200)) {
    const size_t at = prompt.question.find(kBefore);
    if (at == std::string::npos) continue;
    const size_t begin = at + kBefore.size();
    const std::string text =
        prompt.question.substr(begin, prompt.question.find('\n', begin) - begin);
    const auto grammar = compile_grammar({.kind = GrammarSpec::Kind::kJsonSchema, .text = text});
    for (uint64_t seed = 0; seed < 8; ++seed) {
      if (std::ssize(requests) == answers) break;
      Request& request = requests.emplace_back();
      request.prompt_ids = prompt.ids;
      request.grammar = grammar;
      request.sampling.temperature = 1;
      request.sampling.seed = seed;
      request.sampling.max_tokens = 200;
      schemas.push_back(*parse_json(text, "schema"));
    }
  }
  ASSERT_EQ(std::ssize(requests), answers);
  const SpeculationOutcome without = run_with_drafts(kServed, 0, requests);
  const SpeculationOutcome with = run_with_drafts(kServed, 3, requests);
  EXPECT_EQ(with.choices, without.choices);
  EXPECT_GT(with.stats.accepted_tokens, with.stats.drafts);
  int64_t ended = 0;
  for (size_t i = 0; i < with.choices.size(); ++i) {
    if (with.choices[i].finish != FinishReason::kStop) continue;
    ++ended;
    const auto value = parse_json(with.choices[i].text, "answer");
    ASSERT_TRUE(value.has_value()) << with.choices[i].text;
    EXPECT_EQ(what_is_wrong(*value, schemas[i], schemas[i]), "") << with.choices[i].text;
  }
  std::printf("%lld of %lld answers ended\n", static_cast<long long>(ended),
              static_cast<long long>(answers));
  EXPECT_GE(ended, answers * 9 / 10);
}

TEST(SpeculationGrammar, JsonAnswersAreValidAndThoseWithoutDrafts) { expect_valid_json(16); }

TEST(SpeculationGrammar, DISABLED_200JsonAnswersAreValidAndThoseWithoutDrafts) {
  expect_valid_json(200);
}

}  // namespace
}  // namespace fathom
