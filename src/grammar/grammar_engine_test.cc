// Requests with a grammar, in an engine with many requests without: their completions match, and no
// other completion changes.
#include <gtest/gtest.h>

#include <random>

#include "engine/engine.h"
#include "engine/fake_runner.h"
#include "engine/serial_oracle.h"
#include "grammar/grammar_compiler.h"
#include "grammar/schema_validator.h"
#include "tokenizer/regex.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;
using Kind = GrammarSpec::Kind;

constexpr int32_t kMarker = 258;
constexpr const char* kSchema = R"({
  "type":"object",
  "properties":{"s":{"type":"string","maxLength":5},"n":{"type":"integer","minimum":10,"maximum":99},
                "a":{"type":"array","items":{"enum":["a","bc"]},"maxItems":3}},
  "required":["s","n"]})";

std::shared_ptr<const Tokenizer> tokenizer() {
  static const auto shared = fake_tokenizer();
  return shared;
}

std::shared_ptr<const TokenGrammar> compiled(GrammarSpec spec) {
  static GrammarCompiler compiler(tokenizer(), FakeModel{}.vocab_size,
                                  {.deadline = GrammarCompilerOptions::kPatient});
  auto grammar = compiler.compile(std::move(spec));
  EXPECT_TRUE(grammar) << grammar.error().message;
  return *grammar;
}

std::string what_is_wrong_with(const std::string& text, const GrammarSpec& spec) {
  switch (spec.kind) {
    case Kind::kJsonObject:
    case Kind::kJsonSchema: {
      const auto value = parse_json(text, "answer");
      if (!value) return value.error().message;
      if (spec.kind == Kind::kJsonObject) return value->is_object() ? "" : "no object";
      const auto schema = *parse_json(spec.text, "schema");
      return what_is_wrong(*value, schema, schema);
    }
    case Kind::kRegex: {
      const auto regex = Regex::compile("^(?:" + spec.text + ")$");
      Regex::Scratch scratch;
      return regex->find(text, 0, scratch) ? "" : "no match";
    }
    case Kind::kChoice:
      return std::count(spec.choices.begin(), spec.choices.end(), text) > 0 ? "" : "no choice";
    case Kind::kEbnf:
    case Kind::kStructuralTag:
      break;
  }
  return "not checked";
}

const GrammarSpec kSpecs[] = {
    {Kind::kJsonObject, "", {}},
    {Kind::kJsonSchema, kSchema, {}},
    {Kind::kRegex, "[a-c]{2,9}(S|T)+ é[0-9]{3}", {}},
    {Kind::kChoice, "", {"abcab", "abc", "b", "STOP it"}},
};

Request plain_request(uint64_t seed) {
  Request request;
  std::mt19937 random(static_cast<uint32_t>(seed));
  for (size_t i = 1 + random() % 150; i > 0; --i) {
    request.prompt_ids.push_back(static_cast<int32_t>(random() % 290));
  }
  request.sampling.seed = seed;
  request.sampling.max_tokens = 60;
  return request;
}

Request constrained_request(uint64_t seed, const GrammarSpec& spec) {
  Request request = plain_request(seed);
  request.grammar = compiled(spec);
  // The fake model rarely generates characters that end a string or an object.
  for (const char c : {'"', '}', ':', ','}) request.sampling.logit_bias.emplace_back(c, 13.0f);
  request.sampling.max_tokens = 400;
  request.sampling.n = 1 + static_cast<int>(seed % 3);
  return request;
}

struct Outcome {
  std::vector<std::unique_ptr<AnswerCollector>> collectors;
  EngineStats stats;
};

Outcome run_all(const std::vector<Request>& requests, const FakeModel& model,
                EngineOptions options) {
  Outcome outcome;
  options.max_queued_tokens = 1 << 20;
  auto engine = *Engine::create(options, std::make_unique<FakeRunner>(model), tokenizer());
  for (const Request& request : requests) {
    outcome.collectors.push_back(std::make_unique<AnswerCollector>(request.sampling.n));
    const auto id = engine->submit(request, [collector = outcome.collectors.back().get()](
                                                const Event& e) { collector->add(e); });
    EXPECT_TRUE(id) << id.error().message;
  }
  EXPECT_TRUE(engine->drain(60s));
  outcome.stats = engine->stats();
  return outcome;
}

Answer answer_of(Request request, EngineOptions options) {
  request.sampling.n = 1;
  return run_all({request}, {}, std::move(options)).collectors[0]->answers[0];
}

TEST(GrammarEngine, EveryAnswerMatchesAndNobodyElseChanges) {
  std::vector<Request> requests;
  std::vector<const GrammarSpec*> specs;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    specs.push_back(&kSpecs[seed % 4]);
    requests.push_back(constrained_request(seed, *specs.back()));
    specs.push_back(nullptr);
    requests.push_back(plain_request(1000 + seed));
  }
  const FakeModel tight{.num_pages = 40};
  const EngineOptions options{
      .max_num_seqs = 32, .max_batched_tokens = 200, .eos_ids = {kFakeEos}, .preempt_every = 5};
  const Outcome crowded = run_all(requests, tight, options);
  EXPECT_GT(crowded.stats.preemptions, 50);
  EXPECT_EQ(crowded.stats.failed, 0);
  const Outcome roomy =
      run_all(requests, {.num_pages = 2000}, {.max_num_seqs = 256, .eos_ids = {kFakeEos}});
  int ended = 0, constrained = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    for (size_t i = 0; i < crowded.collectors[r]->answers.size(); ++i) {
      const Answer& answer = crowded.collectors[r]->answers[i];
      const std::string what = fmt::format("request {} choice {}", r, i);
      expect_equal(answer, roomy.collectors[r]->answers[i], what + " in another batch");
      if (specs[r] == nullptr) {
        expect_equal(answer, serial_answer(tight, *tokenizer(), requests[r], static_cast<int>(i)),
                     what);
        continue;
      }
      ++constrained;
      if (answer.finish != FinishReason::kStop) continue;
      ++ended;
      EXPECT_EQ(what_is_wrong_with(answer.text, *specs[r]), "") << what << ": " << answer.text;
    }
  }
  EXPECT_GT(ended, constrained * 2 / 3) << "most come to their end";
}

TEST(GrammarEngine, EndsWhereNothingMayFollow) {
  Request request = constrained_request(3, {Kind::kChoice, "", {"abc"}});
  request.sampling.max_tokens = 50;
  // With an end-of-sequence id, without one, and with one that is ignored.
  for (const std::vector<int32_t>& eos : {std::vector<int32_t>{kFakeEos}, std::vector<int32_t>{}}) {
    for (const bool ignore_eos : {false, true}) {
      for (const int64_t min_tokens : {0, 20}) {
        request.sampling.ignore_eos = ignore_eos;
        request.sampling.min_tokens = min_tokens;
        const Answer answer = answer_of(request, {.eos_ids = eos});
        EXPECT_EQ(answer.text, "abc");
        EXPECT_EQ(answer.finish, FinishReason::kStop);
      }
    }
  }
}

TEST(GrammarEngine, AnEmptyAnswerIsOneToo) {
  for (const std::vector<int32_t>& eos : {std::vector<int32_t>{kFakeEos}, std::vector<int32_t>{}}) {
    const Answer answer =
        answer_of(constrained_request(3, {Kind::kRegex, "", {}}), {.eos_ids = eos});
    EXPECT_EQ(answer.text, "");
    EXPECT_EQ(answer.finish, FinishReason::kStop);
  }
}

TEST(GrammarEngine, EndOfSequenceOnlyWhereTheGrammarCanEnd) {
  Request request = constrained_request(1, {Kind::kRegex, "[xy]{3}d{0,20}", {}});
  request.sampling.logit_bias = {{kFakeEos, 100.0f}, {'x', 50.0f}};
  EXPECT_EQ(answer_of(request, {.eos_ids = {kFakeEos}}).text, "xxx") << "as soon as it can";
  // An id that ends sequences cannot be part of the text.
  EXPECT_EQ(answer_of(request, {.eos_ids = {kFakeEos, 'x'}}).text, "yyy");
}

TEST(GrammarEngine, BeginsAfterReasoning) {
  const GrammarSpec spec{Kind::kRegex, "[0-9]{4}", {}};
  int began = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Request request = constrained_request(seed, spec);
    request.grammar_begins_after = kMarker;
    request.sampling.logit_bias = {{kFakeEos, 3.0f}};
    request.sampling.max_tokens = 100;
    const Answer answer = answer_of(request, {.eos_ids = {kFakeEos}});
    const auto marker = std::find(answer.ids.begin(), answer.ids.end(), kMarker);
    if (marker == answer.ids.end()) {
      EXPECT_EQ(answer.finish, FinishReason::kLength) << "no end before the answer has begun";
      continue;
    }
    if (answer.finish != FinishReason::kStop) continue;
    ++began;
    const std::vector<int32_t> rest(marker + 1, answer.ids.end());
    EXPECT_EQ(what_is_wrong_with(tokenizer()->decode(rest, true), spec), "");
  }
  EXPECT_GT(began, 20);
}

// While a sequence reasons, end-of-sequence ids are masked. The request's own stop ids are masked
// exactly as long as min_tokens requires.
TEST(GrammarEngine, MinTokensHoldsForOwnStopIdsWhileReasoning) {
  for (const int64_t min_tokens : {0, 20}) {
    Request request = constrained_request(3, {Kind::kRegex, "[0-9]{4}", {}});
    request.sampling.n = 1;
    request.grammar_begins_after = kMarker;
    request.sampling.stop_token_ids = {'x'};
    request.sampling.min_tokens = min_tokens;
    request.sampling.logit_bias = {{'x', 100.0f}, {kFakeEos, 50.0f}, {kMarker, -100.0f}};
    const Answer answer = answer_of(request, {.eos_ids = {kFakeEos}});
    EXPECT_EQ(answer.finish, FinishReason::kStop);
    ASSERT_EQ(std::ssize(answer.ids), min_tokens + 1);
    EXPECT_EQ(answer.ids.back(), 'x');
    EXPECT_EQ(std::count(answer.ids.begin(), answer.ids.end(), kFakeEos), 0);
  }
}

TEST(GrammarEngine, LogprobsStayTheModels) {
  Request request = constrained_request(3, {Kind::kChoice, "", {"0123456789"}});
  request.sampling.logprobs = 2;
  const Answer answer = answer_of(request, {.eos_ids = {kFakeEos}});
  ASSERT_EQ(answer.logprobs.size(), answer.ids.size());
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(answer.ids[i], '0' + static_cast<int32_t>(i));
    EXPECT_LT(answer.logprobs[i].logprob, -8) << "the model thinks nothing of it";
    EXPECT_GT(answer.logprobs[i].top[0].second, -5);
  }
}

// Allows `count` tokens 'a' and then nothing.
class DeadEnd : public TokenGrammar, public TokenGrammarState {
 public:
  explicit DeadEnd(int64_t count) : left_(count) { mask_['a' / 32] = uint32_t{1} << 'a' % 32; }
  std::unique_ptr<TokenGrammarState> start(std::optional<int32_t>) const override {
    return std::make_unique<DeadEnd>(left_);
  }
  std::span<const uint32_t> allowed() override { return left_ > 0 ? mask_ : none_; }
  bool can_end() const override { return false; }
  bool accept(int32_t) override { return --left_ >= 0; }
  void rollback(int64_t count) override { left_ += count; }

 private:
  int64_t left_;
  std::vector<uint32_t> mask_ = std::vector<uint32_t>(10), none_ = std::vector<uint32_t>(10);
};

// A dead end that compilation does not detect is the client's error, and the text before it is
// kept.
TEST(GrammarEngine, ADeadEndIsTheRequestsFault) {
  for (const int64_t count : {0, 3}) {
    Request stuck = plain_request(3);
    stuck.grammar = std::make_shared<DeadEnd>(count);
    auto engine = *Engine::create({.eos_ids = {kFakeEos}},
                                  std::make_unique<FakeRunner>(FakeModel{}), tokenizer());
    int64_t tokens = 0;
    std::optional<Event> last;
    ASSERT_TRUE(engine->submit(stuck, [&](const Event& event) {
      tokens += std::ssize(event.ids);
      if (event.finish) last = event;
    }));
    ASSERT_TRUE(engine->drain(60s));
    ASSERT_TRUE(last);
    EXPECT_EQ(last->finish, FinishReason::kError);
    EXPECT_EQ(tokens, count);
    EXPECT_EQ(last->error.code, Code::kInvalidArgument);
    EXPECT_EQ(last->error.message,
              fmt::format("the grammar has a dead end: nothing may follow the {} tokens of the "
                          "answer so far, which is not whole",
                          count));
  }
}

TEST(GrammarEngine, MarkerNeedsAGrammarAndAnId) {
  auto engine = *Engine::create({}, std::make_unique<FakeRunner>(FakeModel{}), tokenizer());
  Request request = plain_request(1);
  request.grammar_begins_after = kMarker;
  EXPECT_FALSE(engine->submit(request, [](const Event&) {}));
  request.grammar = compiled(kSpecs[0]);
  request.grammar_begins_after = 300;
  const auto refused = engine->submit(request, [](const Event&) {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(
      refused.error().message,
      "grammar_begins_after is 300, expected an id inside the vocabulary of 300 and a grammar");
}

}  // namespace
}  // namespace fathom
