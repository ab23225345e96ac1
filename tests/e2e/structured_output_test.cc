// The bundled model, sampling at temperature 1 with grammars: each completion that ends matches, in
// batches with requests without a grammar, whose completions do not change.
#include <gtest/gtest.h>

#include <latch>

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

constexpr int kSeeds = 40;
constexpr const char* kOffer = R"({
  "type":"object",
  "properties":{
    "color":{"type":"string","maxLength":20},
    "price":{"$ref":"#/$defs/amount"},
    "quantity":{"type":"integer","minimum":5,"maximum":120},
    "product":{"enum":["kite","lamp","\u00e9tag\u00e8re",null]}},
  "required":["color","price","quantity","product"],
  "$defs":{"amount":{"anyOf":[{"type":"null"},{"type":"number","minimum":-1,"maximum":900}]}}})";

struct Bundled {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<GrammarCompiler> compiler;
};

Bundled& bundled() {
  static Bundled shared = [] {
    Bundled made;
    made.tokenizer = std::move(*Tokenizer::load(bundled_model()));
    const auto checkpoint = Checkpoint::open(bundled_model());
    ModelRunnerOptions options;
    options.max_total_tokens = 32768;
    options.load.show_progress = false;
    auto runner = *ModelRunner::create(*checkpoint, options);
    made.compiler = std::make_unique<GrammarCompiler>(
        made.tokenizer, runner->vocab_size(),
        GrammarCompilerOptions{.deadline = GrammarCompilerOptions::kPatient});
    made.engine = *Engine::create(
        {.max_num_seqs = 64, .eos_ids = {*made.tokenizer->eos_id()}, .preempt_every = 40},
        std::move(runner), made.tokenizer);
    return made;
  }();
  return shared;
}

struct Outcome {
  std::string text;
  std::optional<FinishReason> finish;
};

Request prompt(const std::string& text, uint64_t seed) {
  Request request;
  request.prompt_ids =
      bundled().tokenizer->encode("<｜begin▁of▁sentence｜><｜User｜>" + text + "<｜Assistant｜>");
  request.sampling.seed = seed;
  request.sampling.temperature = 1;
  request.sampling.max_tokens = 200;
  return request;
}

std::vector<Outcome> answers(const std::vector<Request>& requests) {
  std::vector<Outcome> outcomes(requests.size());
  std::latch ended(std::ssize(requests));
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto id = bundled().engine->submit(requests[i], [&, i](const Event& event) {
      outcomes[i].text += event.text;
      if (!event.finish) return;
      outcomes[i].finish = event.finish;
      ended.count_down();
    });
    EXPECT_TRUE(id) << id.error().message;
  }
  ended.wait();
  return outcomes;
}

// Runs kSeeds completions with the grammar, and a quarter as many without. `check` returns what is
// wrong with a text.
template <typename Check>
void expect_all_match(const GrammarSpec& spec, const std::string& question, const Check& check) {
  const auto grammar = bundled().compiler->compile(spec);
  ASSERT_TRUE(grammar) << grammar.error().message;
  std::vector<Request> mixed, plain;
  std::vector<size_t> of_plain;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    mixed.push_back(prompt(question, seed));
    mixed.back().grammar = *grammar;
    if (seed % 4 != 0) continue;
    plain.push_back(prompt("Compute 314 + 159.", seed));
    plain.back().sampling.max_tokens = 20;
    of_plain.push_back(mixed.size());
    mixed.push_back(plain.back());
  }
  const auto outcomes = answers(mixed);
  const auto alone = answers(plain);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(outcomes[of_plain[i]].text, alone[i].text) << "a neighbour without a grammar";
  }
  int ended = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (!mixed[i].grammar) continue;
    ASSERT_TRUE(outcomes[i].finish == FinishReason::kStop ||
                outcomes[i].finish == FinishReason::kLength);
    if (outcomes[i].finish == FinishReason::kLength) continue;
    ++ended;
    EXPECT_EQ(check(outcomes[i].text), "") << "request " << i << ": " << outcomes[i].text;
  }
  // Texts that are cut off are not checked. At temperature 1 the small model sometimes drifts into
  // prose inside a string, which no grammar ends. How often depends on the rounding of the
  // instruction set: of 40 objects 7 with AVX2, 8 with AVX-512, 10 with AMX.
  EXPECT_GE(ended, kSeeds / 2) << "too few texts were checked";
}

TEST(StructuredOutput, JsonObject) {
  expect_all_match({Kind::kJsonObject, "", {}}, "Answer in JSON: name and age of a cat.",
                   [](const std::string& text) -> std::string {
                     const auto value = parse_json(text, "answer");
                     if (!value) return value.error().message;
                     return value->is_object() ? "" : "no object";
                   });
}

TEST(StructuredOutput, JsonSchema) {
  const auto schema = *parse_json(kOffer, "schema");
  expect_all_match(
      {Kind::kJsonSchema, kOffer, {}},
      "Return a JSON object with color, price, quantity and product. Text: Item: kite. "
      "Colour: silver. Price: 149.77. Number in stock: 53.",
      [&](const std::string& text) -> std::string {
        const auto value = parse_json(text, "answer");
        if (!value) return value.error().message;
        return what_is_wrong(*value, schema, schema);
      });
}

TEST(StructuredOutput, RegexMatches) {
  const std::string pattern = "(19|20)[0-9]{2}-(0[1-9]|1[0-2])( [a-z]+){0,3}!";
  const auto regex = Regex::compile("^(?:" + pattern + ")$");
  ASSERT_TRUE(regex);
  Regex::Scratch scratch;
  expect_all_match({Kind::kRegex, pattern, {}}, "When was it?", [&](const std::string& text) {
    return regex->find(text, 0, scratch) ? "" : "no match";
  });
}

TEST(StructuredOutput, OneOfTheChoices) {
  const std::vector<std::string> choices = {"yes", "no", "perhaps", "no, \"never\""};
  std::vector<int> counts(choices.size());
  expect_all_match({Kind::kChoice, "", choices}, "Is 7 a prime number?",
                   [&](const std::string& text) {
                     const auto found = std::find(choices.begin(), choices.end(), text);
                     if (found == choices.end()) return "no choice";
                     ++counts[found - choices.begin()];
                     return "";
                   });
  EXPECT_GT(counts[0] + counts[1], 0);
}

}  // namespace
}  // namespace fathom
