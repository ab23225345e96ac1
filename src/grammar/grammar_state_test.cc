#include <gtest/gtest.h>

#include <random>

#include "engine/fake_tokenizer.h"
#include "grammar/grammar_compiler.h"
#include "grammar/schema_validator.h"

namespace fathom {
namespace {

using Kind = GrammarSpec::Kind;

const Tokenizer& tokenizer() {
  static const auto shared = fake_tokenizer();
  return *shared;
}

std::unique_ptr<GrammarState> start(GrammarSpec spec, std::optional<int32_t> begins_after = {}) {
  // Four ids more than the tokenizer has, like a padded vocabulary.
  static GrammarCompiler compiler(fake_tokenizer(), tokenizer().vocab_size() + 4,
                                  {.deadline = GrammarCompilerOptions::kPatient});
  const auto grammar = compiler.compile(std::move(spec));
  EXPECT_TRUE(grammar) << grammar.error().message;
  auto state = (*grammar)->start(begins_after);
  return std::unique_ptr<GrammarState>(static_cast<GrammarState*>(state.release()));
}

std::vector<int32_t> allowed_ids(GrammarState& state) {
  std::vector<int32_t> ids;
  const auto allowed = state.allowed();
  for (int32_t id = 0; id < std::ssize(allowed) * 32; ++id) {
    if (allowed[id / 32] >> id % 32 & 1) ids.push_back(id);
  }
  return ids;
}

constexpr const char* kSchema = R"({
  "type":"object",
  "properties":{
    "name":{"type":"string","maxLength":6},
    "age":{"type":"integer","minimum":-3,"maximum":140},
    "kind":{"enum":["a","b c",3,null]},
    "tags":{"type":"array","items":{"anyOf":[{"type":"boolean"},{"$ref":"#/$defs/leaf"}]},
            "minItems":1,"maxItems":3}},
  "required":["name","tags"],
  "$defs":{"leaf":{"type":"object","properties":{"x":{"type":"number","minimum":-1.5,"maximum":20}},"required":["x"],
           "additionalProperties":false}}})";

// Random walks that compare each mask with what accept() accepts.
TEST(GrammarState, MaskIsWhatIsAccepted) {
  const auto schema = *parse_json(kSchema, "schema");
  int whole = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const auto state = start({Kind::kJsonSchema, kSchema, {}});
    std::vector<int32_t> tokens;
    for (int step = 0; step < 400; ++step) {
      const auto ids = allowed_ids(*state);
      if (step % 8 == 0) {
        const std::vector<uint32_t> before(state->allowed().begin(), state->allowed().end());
        for (int32_t id = 0; id < tokenizer().vocab_size() + 4; ++id) {
          const bool taken = state->accept(id);
          ASSERT_EQ(taken, std::find(ids.begin(), ids.end(), id) != ids.end())
              << "token " << id << " after " << tokenizer().decode(tokens);
          if (taken) state->rollback(1);
        }
        ASSERT_TRUE(std::equal(before.begin(), before.end(), state->allowed().begin()));
      }
      if (ids.empty()) break;
      const int32_t id = ids[random() % ids.size()];
      // Begins a possible surrogate, which is not valid UTF-8 and would be decoded as three U+FFFD.
      if (id == 0xED) continue;
      ASSERT_TRUE(state->accept(id));
      tokens.push_back(id);
    }
    if (!state->can_end()) continue;
    ++whole;
    const std::string text = tokenizer().decode(tokens);
    const auto value = parse_json(text, "answer");
    ASSERT_TRUE(value) << value.error().message << ": " << text;
    EXPECT_EQ(what_is_wrong(*value, schema, schema), "") << text;
  }
  EXPECT_GT(whole, 5);
}

TEST(GrammarState, SpecialAndPaddedTokensAreNeverAllowed) {
  const auto state = start({Kind::kRegex, ".*", {}});
  const auto ids = allowed_ids(*state);
  EXPECT_EQ(std::find(ids.begin(), ids.end(), kFakeEos), ids.end());
  EXPECT_LT(ids.back(), kFakeEos);
  EXPECT_TRUE(state->can_end());
}

TEST(GrammarState, RollsBackAnyNumber) {
  const auto state = start({Kind::kRegex, "abc[0-9]{4}", {}});
  const std::string text = "abc1234";
  std::vector<std::vector<int32_t>> masks;
  for (const char c : text) {
    masks.push_back(allowed_ids(*state));
    ASSERT_TRUE(state->accept(c));
  }
  EXPECT_TRUE(state->can_end());
  EXPECT_TRUE(allowed_ids(*state).empty());
  for (size_t back = 1; back <= text.size(); ++back) {
    state->rollback(static_cast<int64_t>(back));
    EXPECT_EQ(allowed_ids(*state), masks[text.size() - back]);
    EXPECT_FALSE(state->can_end());
    for (size_t i = text.size() - back; i < text.size(); ++i) ASSERT_TRUE(state->accept(text[i]));
  }
}

TEST(GrammarState, BeginsAfterAToken) {
  constexpr int32_t kMarker = 258;
  const auto state = start({Kind::kChoice, "", {"yes", "no"}}, kMarker);
  for (const int32_t id : std::vector<int32_t>{'x', 300, kFakeEos, 'y'}) {
    EXPECT_TRUE(state->allowed().empty()) << "everything may come";
    EXPECT_FALSE(state->can_end());
    EXPECT_TRUE(state->accept(id));
  }
  EXPECT_TRUE(state->accept(kMarker));
  EXPECT_EQ(allowed_ids(*state), (std::vector<int32_t>{'n', 'y'}));
  EXPECT_FALSE(state->accept(kMarker));
  EXPECT_TRUE(state->accept('n'));
  EXPECT_TRUE(state->accept('o'));
  EXPECT_TRUE(state->can_end());
  state->rollback(1);
  EXPECT_EQ(allowed_ids(*state), (std::vector<int32_t>{'o'}));
  state->rollback(2);
  EXPECT_TRUE(state->allowed().empty()) << "before the marker again";
  EXPECT_TRUE(state->accept(kMarker));
  EXPECT_EQ(allowed_ids(*state), (std::vector<int32_t>{'n', 'y'}));
}

TEST(GrammarState, OutlivesItsGrammar) {
  GrammarCompiler compiler(fake_tokenizer(), tokenizer().vocab_size(),
                           {.deadline = GrammarCompilerOptions::kPatient, .cache_bytes = 0});
  auto grammar = *compiler.compile({Kind::kRegex, "ab", {}});
  const auto state = grammar->start(std::nullopt);
  grammar.reset();
  EXPECT_TRUE(state->accept('a'));
  EXPECT_TRUE(state->accept('b'));
  EXPECT_TRUE(state->can_end());
}

}  // namespace
}  // namespace fathom
