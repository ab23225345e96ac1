// Grammars on a model with sparse attention (DeepSeek-V3.2): constrained answers are the same with
// every dense threshold, with 0 to 3 drafts a step and in a crowded engine, to the bit. The weights
// are random, so the answers are nonsense of the right form; what is compared is that all settings
// see the same logits and mask them at the same tokens.
#include <gtest/gtest.h>

#include <latch>

#include "base/json.h"
#include "checkpoint/test_files.h"
#include "e2e/golden.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "grammar/grammar_compiler.h"
#include "grammar/schema_validator.h"
#include "tokenizer/regex.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

using Kind = GrammarSpec::Kind;

constexpr int64_t kTopk = 16;  // of the golden v32
constexpr const char* kSchema = R"({"type":"object","properties":{
  "id":{"type":"integer","minimum":100,"maximum":999},
  "kind":{"enum":["a lamp","a kite","nothing at all"]},
  "seen":{"type":"array","items":{"type":"boolean"},"minItems":2,"maxItems":3}},
  "required":["id","kind","seen"],"additionalProperties":false})";
constexpr const char* kPattern = "(north|south)( [a-z]{2,5}){3}\\.";

// The golden v32's form with the bundled model's vocabulary.
struct Shared {
  TestFolder folder;
  std::shared_ptr<const Tokenizer> tokenizer = std::move(*Tokenizer::load(bundled_model()));
  Checkpoint checkpoint;
  std::shared_ptr<const TokenGrammar> schema, pattern;
  int32_t think_end = *tokenizer->token_id("</think>");

  Shared() {
    const int64_t vocab = Checkpoint::open(bundled_model())->config().vocab_size;
    auto config =
        parse_json(file_text(goldens_directory() + "v32/config.json"), "config.json")->as_object();
    config["vocab_size"] = vocab;
    folder.write("config.json", json::serialize(config));
    checkpoint = *Checkpoint::open_dummy(folder.path());
    GrammarCompiler compiler(tokenizer, vocab, {.deadline = GrammarCompilerOptions::kPatient});
    schema = *compiler.compile({Kind::kJsonSchema, kSchema, {}});
    pattern = *compiler.compile({Kind::kRegex, kPattern, {}});
  }
};

const Shared& shared() {
  static const Shared made;
  return made;
}

struct Answer {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<float> logprobs;
  std::optional<FinishReason> finish;
  bool operator==(const Answer&) const = default;
};

// Prompts of about 8 to 100 tokens. Every fourth request has no grammar; of the others every third
// one's begins behind a marker.
constexpr int kRequests = 16;

Request request_of(int number) {
  const Shared& with = shared();
  Request request;
  std::string text = "<｜begin▁of▁sentence｜><｜User｜>Number " + std::to_string(number);
  for (int i = 0; i < 2 * (number % 8); ++i) text += " and " + std::to_string(7 * i + number);
  request.prompt_ids = with.tokenizer->encode(text + "<｜Assistant｜>");
  request.sampling.seed = static_cast<uint64_t>(number);
  request.sampling.temperature = number % 3 == 0 ? 0 : 1;
  request.sampling.max_tokens = 60;
  request.sampling.logprobs = 1;
  if (number % 4 == 3) return request;
  request.grammar = number % 4 == 0 ? with.pattern : with.schema;
  if (number % 3 == 1) {
    request.grammar_begins_after = with.think_end;
    request.sampling.logit_bias = {{with.think_end, 12.0f}};
  }
  return request;
}

struct Setting {
  std::optional<int64_t> dense_keys = {};
  int64_t drafts = 0;
  bool is_crowded = false;  // small chunks, shared prefixes, preemption
};

struct Outcome {
  std::vector<Answer> answers = std::vector<Answer>(kRequests);
  EngineStats stats;
};

Outcome run(const Setting& setting) {
  ModelRunnerOptions options;
  options.compute = DType::kF32;
  options.cache_format = CacheFormat::kF32;
  options.attention = {.form = AttentionForm::kAbsorbed, .dense_keys = setting.dense_keys};
  options.max_batched_tokens = setting.is_crowded ? 24 : 2048;
  options.max_total_tokens = setting.is_crowded ? 640 : 8192;
  options.max_drafts = setting.drafts;
  options.num_threads = 2;
  options.load.show_progress = false;
  auto runner = ModelRunner::create(shared().checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  EngineOptions engine_options = {.max_num_seqs = setting.is_crowded ? 5 : 16};
  engine_options.max_batched_tokens = options.max_batched_tokens;
  engine_options.preempt_every = setting.is_crowded ? 7 : 0;
  engine_options.adapts_drafts = false;
  engine_options.eos_ids = {*shared().tokenizer->eos_id()};
  auto engine = Engine::create(engine_options, std::move(*runner), shared().tokenizer);
  FATHOM_CHECK(engine.has_value(), "{}", engine.error().message);
  Outcome outcome;
  std::latch ended(kRequests);
  for (int i = 0; i < kRequests; ++i) {
    Answer& answer = outcome.answers[static_cast<size_t>(i)];
    const auto id = (*engine)->submit(request_of(i), [&answer, &ended](const Event& event) {
      answer.ids.insert(answer.ids.end(), event.ids.begin(), event.ids.end());
      answer.text += event.text;
      for (const TokenLogprob& token : event.logprobs) answer.logprobs.push_back(token.logprob);
      if (event.finish) answer.finish = event.finish;
      if (event.last) ended.count_down();
    });
    FATHOM_CHECK(id.has_value(), "{}", id.error().message);
  }
  ended.wait();
  outcome.stats = (*engine)->stats();
  EXPECT_EQ(outcome.stats.failed + outcome.stats.aborted, 0);
  return outcome;
}

const Outcome& usual() {
  static const Outcome outcome = run({});
  return outcome;
}

void expect_equal(const Outcome& actual) {
  for (size_t i = 0; i < kRequests; ++i) {
    EXPECT_EQ(actual.answers[i].ids, usual().answers[i].ids) << "answer " << i;
    EXPECT_TRUE(actual.answers[i] == usual().answers[i]) << "answer " << i;
  }
}

TEST(SparseGrammars, AnswersHaveTheirForm) {
  const auto schema = *parse_json(kSchema, "schema");
  const auto regex = Regex::compile("^(?:" + std::string(kPattern) + ")$");
  Regex::Scratch scratch;
  int matched = 0;
  for (int i = 0; i < kRequests; ++i) {
    const Answer& answer = usual().answers[static_cast<size_t>(i)];
    if (i % 4 == 3 || answer.finish != FinishReason::kStop) continue;
    const size_t marker = answer.text.find("</think>");
    const std::string text =
        marker == std::string::npos ? answer.text : answer.text.substr(marker + 8);
    ++matched;
    if (i % 4 == 0) {
      EXPECT_TRUE(regex->find(text, 0, scratch)) << i << ": " << text;
    } else {
      const auto value = parse_json(text, "answer");
      ASSERT_TRUE(value) << i << ": " << text;
      EXPECT_EQ(what_is_wrong(*value, schema, schema), "") << text;
    }
  }
  EXPECT_GE(matched, kRequests / 2);
}

TEST(SparseGrammars, EveryThresholdGivesTheSameAnswers) {
  for (const int64_t dense : {int64_t{0}, int64_t{1}, kTopk / 2, kTopk - 1, kTopk}) {
    SCOPED_TRACE(dense);
    expect_equal(run({.dense_keys = dense}));
  }
}

TEST(SparseGrammars, EveryNumberOfDraftsGivesTheSameAnswers) {
  for (const int64_t drafts : {1, 2, 3}) {
    SCOPED_TRACE(drafts);
    for (const std::optional<int64_t> dense :
         {std::optional<int64_t>(), std::optional<int64_t>(0)}) {
      const Outcome outcome = run({.dense_keys = dense, .drafts = drafts});
      EXPECT_GT(outcome.stats.speculation.draft_tokens, 0);
      EXPECT_GT(outcome.stats.speculation.accepted_tokens, 0);
      expect_equal(outcome);
    }
  }
}

TEST(SparseGrammars, ACrowdedEngineGivesTheSameAnswers) {
  for (const int64_t drafts : {0, 1, 3}) {
    SCOPED_TRACE(drafts);
    const Outcome outcome = run({.dense_keys = kTopk / 2, .drafts = drafts, .is_crowded = true});
    EXPECT_GT(outcome.stats.preemptions, 0);
    expect_equal(outcome);
  }
}

}  // namespace
}  // namespace fathom
