// What compiles and what is refused, including inputs made to exhaust a compiler.
#include "grammar/grammar_compiler.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>

#include "engine/fake_tokenizer.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;
using Kind = GrammarSpec::Kind;

std::shared_ptr<const Tokenizer> bundled_tokenizer() {
  static const std::shared_ptr<const Tokenizer> shared =
      std::move(*Tokenizer::load(FATHOM_SOURCE_DIR "/models/fathom-tiny"));
  return shared;
}

// No deadline that a slow machine could miss.
GrammarCompiler& compiler() {
  static GrammarCompiler shared(bundled_tokenizer(), bundled_tokenizer()->vocab_size(),
                                {.deadline = GrammarCompilerOptions::kPatient});
  return shared;
}

// Whether the grammar accepts all of the text, one byte per token.
bool matches(const GrammarSpec& spec, std::string_view text) {
  static const auto bytes = fake_tokenizer();
  static GrammarCompiler of_bytes(bytes, bytes->vocab_size(),
                                  {.deadline = GrammarCompilerOptions::kPatient});
  const auto grammar = of_bytes.compile(spec);
  EXPECT_TRUE(grammar) << grammar.error().message;
  if (!grammar) return false;
  const auto state = (*grammar)->start(std::nullopt);
  for (const char c : text) {
    const auto id = static_cast<int32_t>(static_cast<unsigned char>(c));
    const bool allowed = state->allowed()[id / 32] >> id % 32 & 1;
    EXPECT_EQ(state->accept(id), allowed) << spec.text << " " << text;
    if (!allowed) return false;
  }
  return state->can_end();
}

TEST(GrammarCompiler, TakesExactlyWhatMatches) {
  struct Case {
    GrammarSpec spec;
    std::vector<const char*> yes, no;
  };
  const Case kCases[] = {
      {{Kind::kRegex, "[a-c]{2,3}x?", {}}, {"ab", "abc", "abx", "cccx"}, {"a", "abcd", "x", ""}},
      {{Kind::kRegex, "^(é|\\d+\\.)$", {}}, {"é", "12."}, {"12", "e", "\xC3"}},
      {{Kind::kRegex, "a|", {}}, {"", "a"}, {"b"}},
      {{Kind::kChoice, "", {"yes", "no", "no way", "\"q\" \\ \n\té"}},
       {"yes", "no", "no way", "\"q\" \\ \n\té"},
       {"", "ye", "no ", "yesno", "q"}},
      {{Kind::kEbnf, "root ::= \"(\" root \")\" | \"x\"", {}}, {"x", "((x))"}, {"((x)", ")x("}},
      {{Kind::kJsonObject, "", {}},
       {"{}", R"({"a": [1, -2.5e3, null, true, {"b": "\u00e9\n"}]})", "{ \"é\" : \"/\" }"},
       {"[]", "1", R"({"a":1)", R"({a:1})", R"({"a":01})", R"({"a":"
"})"}},
      {{Kind::kJsonSchema,
        R"({"type":"object","properties":{"n":{"type":"integer","minimum":3,"maximum":12},
            "s":{"enum":["a/b","é",null]}},"required":["n"]})",
        {}},
       {R"({"n": 3})", R"({"n":12, "s":null})"},
       {R"({"n": 2})", R"({"n": 13})", "{}", R"({"s":null})", R"({"n":3,"x":1})"}},
  };
  for (const Case& c : kCases) {
    for (const char* text : c.yes) EXPECT_TRUE(matches(c.spec, text)) << c.spec.text << " " << text;
    for (const char* text : c.no) EXPECT_FALSE(matches(c.spec, text)) << c.spec.text << " " << text;
  }
}

// In each of these a completion could reach a state from which no text leads out.
TEST(GrammarCompiler, DeadEndsAreRefused) {
  const std::pair<Kind, const char*> kDead[] = {
      {Kind::kEbnf, "root ::= root"},
      {Kind::kEbnf, "root ::= a\na ::= b\nb ::= a"},
      {Kind::kEbnf, "root ::= \"a\" root"},
      {Kind::kEbnf, "root ::= root \"a\""},
      {Kind::kEbnf, "root ::= \"a\" | \"b\" [^\\x00-\\U0010FFFF]"},
      {Kind::kEbnf, "root ::= \"a\" (b | \"c\")\nb ::= \"x\" b"},
      {Kind::kJsonSchema, R"({"$defs":{"a":{"type":"array","items":{"$ref":"#/$defs/a"},
                              "minItems":1}},"$ref":"#/$defs/a"})"},
      {Kind::kJsonSchema, R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})"}};
  for (const auto& [kind, text] : kDead) {
    const auto compiled = compiler().compile({kind, text, {}});
    ASSERT_FALSE(compiled) << text;
    EXPECT_EQ(compiled.error().code, Code::kInvalidArgument);
    EXPECT_TRUE(compiled.error().message.ends_with("matches no text at all"))
        << compiled.error().message;
  }
  for (const char* alive : {"root ::= \"a\" root | \"b\"", "root ::= a*\na ::= \"x\"",
                            "root ::= \"\"", "root ::= [^a]"}) {
    EXPECT_TRUE(compiler().compile({Kind::kEbnf, alive, {}})) << alive;
  }
}

bool is_allowed(const GrammarSpec& spec, std::string_view before, std::string_view token) {
  const auto grammar = compiler().compile(spec);
  EXPECT_TRUE(grammar) << grammar.error().message;
  if (!grammar) return false;
  const auto state = (*grammar)->start(std::nullopt);
  for (const int32_t id : bundled_tokenizer()->encode(before)) {
    EXPECT_TRUE(state->accept(id)) << before;
  }
  const int32_t id = bundled_tokenizer()->token_id(token).value();
  const bool allowed = state->allowed()[id / 32] >> id % 32 & 1;
  EXPECT_EQ(state->accept(id), allowed);
  return allowed;
}

TEST(GrammarCompiler, MarkupIsForGrammarsThatNameIt) {
  const GrammarSpec object{Kind::kJsonObject};
  const GrammarSpec schema{Kind::kJsonSchema,
                           R"({"type":"object","properties":{"s":{"type":"string"},
      "m":{"type":"string","maxLength":40},"p":{"type":"string","pattern":".*"}}})"};
  for (const char* marker : {"<think>", "</think>", "<｜User｜>", "<｜tool▁call▁begin｜>",
                             "<｜end▁of▁sentence｜>", "<|EOT|>", "<｜fim▁hole｜>"}) {
    EXPECT_FALSE(is_allowed(object, "", marker)) << marker;
    EXPECT_FALSE(is_allowed(object, "{\"", marker)) << marker;
    EXPECT_FALSE(is_allowed(object, "{\"a\": \"x", marker)) << marker;
    EXPECT_FALSE(is_allowed(schema, "{\"s\": \"x", marker)) << marker;
    EXPECT_FALSE(is_allowed(schema, "{\"m\": \"x", marker)) << marker;
    EXPECT_FALSE(is_allowed(schema, "{\"p\": \"x", marker)) << marker;
    EXPECT_FALSE(is_allowed({Kind::kRegex, "[^a]*"}, "x", marker)) << marker;
    EXPECT_FALSE(is_allowed({Kind::kEbnf, "root ::= [^a]* \"<b>\""}, "x", marker)) << marker;
  }
  EXPECT_TRUE(is_allowed({Kind::kRegex, "<think>[a-z]+</think>x"}, "", "<think>"));
  EXPECT_TRUE(is_allowed({Kind::kRegex, "<think>[a-z]+</think>x"}, "<think>so", "</think>"));
  EXPECT_FALSE(is_allowed({Kind::kRegex, "<think>[a-z]+</think>x"}, "<think>so", "<think>"));
  EXPECT_TRUE(is_allowed({Kind::kChoice, "", {"a", "<think>"}}, "", "<think>"));
  EXPECT_TRUE(is_allowed({Kind::kEbnf, "root ::= \"x</think>\" # \"<think>\"\n"}, "x", "</think>"));
  // Tool calls, their arguments, and the text before them.
  const GrammarSpec calls{Kind::kStructuralTag,
                          R"({"type":"structural_tag","format":{"type":"triggered_tags",
      "triggers":["<｜tool▁call▁begin｜>"],"tags":[{"type":"tag",
      "begin":"<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
      "content":{"type":"json_schema","json_schema":{"type":"object"}},
      "end":"<｜tool▁call▁end｜>"}]}})"};
  EXPECT_TRUE(is_allowed(calls, "Let me see.", "<｜tool▁calls▁begin｜>"));
  EXPECT_TRUE(is_allowed(calls, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"));
  EXPECT_TRUE(is_allowed(calls, "<｜tool▁call▁begin｜>f", "<｜tool▁sep｜>"));
  EXPECT_FALSE(is_allowed(calls, "<｜tool▁call▁begin｜>f", "<｜tool▁call▁end｜>"));
  const std::string arguments = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"";
  EXPECT_FALSE(is_allowed(calls, arguments, "<｜tool▁call▁end｜>"));
  EXPECT_FALSE(is_allowed(calls, arguments, "<think>"));
  EXPECT_TRUE(is_allowed(calls, arguments + "x\"}", "<｜tool▁call▁end｜>"));
}

TEST(GrammarCompiler, WhiteSpaceBetweenTokensOfJsonIsBounded) {
  const GrammarSpec schema{Kind::kJsonSchema,
                           R"({"type":"object","properties":{"a":{"type":"integer"}}})"};
  const std::string tag =
      R"({"type":"structural_tag","format":{"type":"json_schema","json_schema":)" + schema.text +
      "}}";
  const std::string in_list =
      R"({"type":"structural_tag","format":{"type":"sequence","elements":[
          {"type":"json_schema","json_schema":)" +
      schema.text + "}]}}";
  for (const GrammarSpec& spec :
       {schema, GrammarSpec{Kind::kJsonObject}, GrammarSpec{Kind::kStructuralTag, tag},
        GrammarSpec{Kind::kStructuralTag, in_list}}) {
    const std::string deep = "\n" + std::string(32, ' ');
    for (const std::string& white : {std::string(), std::string(" "), std::string("\n"),
                                     std::string("\n  "), std::string("\n\t"), deep}) {
      EXPECT_TRUE(matches(spec, "{" + white + "\"a\"" + ":" + white + "1" + white + "}")) << white;
    }
    for (const std::string& white :
         {std::string("  "), std::string("\n\n"), std::string("\t"), deep + " "}) {
      EXPECT_FALSE(matches(spec, "{" + white + "\"a\":1}")) << white;
      EXPECT_FALSE(matches(spec, "{\"a\":" + white + "1}")) << white;
    }
  }
}

// The limit is the tag's; a schema keeps its own words, whatever its properties are called.
TEST(GrammarCompiler, PropertiesMayBeCalledAsTagsFieldsAre) {
  const GrammarSpec spec{Kind::kStructuralTag,
                         R"({"type":"structural_tag","format":{"type":"json_schema","json_schema":
                         {"type":"object","properties":{"json_schema":{"type":"integer"}},
                          "required":["json_schema"],"additionalProperties":false}}})"};
  EXPECT_TRUE(matches(spec, R"({"json_schema":1})"));
  EXPECT_FALSE(matches(spec, R"({"json_schema":1,"max_whitespace_cnt":32})"));
}

TEST(GrammarCompiler, RefusalsNameTheField) {
  const auto message = [](Kind kind, std::string text, std::vector<std::string> choices = {}) {
    const auto compiled = compiler().compile({kind, std::move(text), std::move(choices)});
    EXPECT_FALSE(compiled);
    if (compiled) return std::string();
    EXPECT_EQ(compiled.error().code, Code::kInvalidArgument);
    return compiled.error().message;
  };
  EXPECT_EQ(message(Kind::kChoice, ""), "choice has no strings");
  EXPECT_EQ(message(Kind::kChoice, "", {"a", ""}), "choice[1] is empty");
  EXPECT_EQ(message(Kind::kChoice, "", {std::string(40000, 'a'), std::string(40000, 'b')}),
            "choice has more than 65536 bytes");
  EXPECT_EQ(message(Kind::kRegex, "a(?=b)"),
            "regex: Regex parsing error at position 4: Lookahead is not supported yet.");
  EXPECT_TRUE(message(Kind::kRegex, "(a").starts_with("regex: ")) << "unclosed";
  EXPECT_TRUE(message(Kind::kRegex, "a^b").starts_with("regex: ")) << "would be ignored";
  EXPECT_TRUE(message(Kind::kEbnf, "root ::= missing").starts_with("grammar: "));
  EXPECT_TRUE(message(Kind::kEbnf, "").starts_with("grammar: "));
  EXPECT_TRUE(message(Kind::kEbnf, "root ::= \xC3\xA9").ends_with("character: \xEF\xBF\xBD"))
      << "a message is UTF-8, though the library shows a character's first byte";
  EXPECT_NE(message(Kind::kJsonSchema, R"({"type":"number","multipleOf":0.1})").find("multipleOf"),
            std::string::npos);
  EXPECT_NE(message(Kind::kJsonSchema, R"({"oneOf":[{"type":"string"},{"type":"string"}]})")
                .find("oneOf"),
            std::string::npos);
  EXPECT_NE(message(Kind::kJsonSchema, R"({"type":"strung"})").find("strung"), std::string::npos);
  EXPECT_TRUE(message(Kind::kJsonSchema, "{").starts_with("json_schema: "));
  // Again: an error is not cached as a result.
  EXPECT_NE(message(Kind::kJsonSchema, R"({"type":"number","multipleOf":0.1})").find("multipleOf"),
            std::string::npos);
}

std::string repeated(std::string_view text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

std::string nested(std::string_view open, std::string_view inner, std::string_view close,
                   int count) {
  return fmt::format("{}{}{}", repeated(open, count), inner, repeated(close, count));
}

// Inputs made to exhaust time, memory or the stack. The limits alone make each return an error or a
// usable grammar: no deadline cuts the work off.
TEST(GrammarCompiler, BombsEnd) {
  std::string enum_values, properties, references, wide;
  for (int i = 0; i < 10'000; ++i) enum_values += fmt::format("{}\"{}\"", i > 0 ? "," : "", i);
  for (int i = 0; i < 1900; ++i) properties += fmt::format("{}\"k{}\":{{}}", i > 0 ? "," : "", i);
  for (int i = 1; i < 60; ++i) {
    references += fmt::format(
        R"(,"d{0}":{{"type":"object","properties":{{"x":{{"$ref":"#/$defs/d{1}"}},"y":{{"$ref":"#/$defs/d{1}"}}}}}})",
        i, i - 1);
  }
  for (int i = 0; i < 1500; ++i) wide += fmt::format("a{} ::= a{} a{}\n", i, i + 1, i + 1);
  const GrammarSpec kBombs[] = {
      {Kind::kJsonSchema, repeated("[", 60'000), {}},
      {Kind::kJsonSchema, repeated(R"({"items":)", 7'000), {}},
      {Kind::kJsonSchema, nested(" ", "{}", "", 1 << 20), {}},
      {Kind::kJsonSchema, nested(R"({"type":"array","items":)", "{}", "}", 31), {}},
      {Kind::kJsonSchema, fmt::format(R"({{"enum":[{}]}})", enum_values), {}},
      {Kind::kJsonSchema,
       fmt::format(R"({{"type":"object","properties":{{{}}}}})", properties),
       {}},
      {Kind::kJsonSchema,
       fmt::format(R"({{"type":"object","properties":{{{}}},"minProperties":900}})", properties),
       {}},
      {Kind::kJsonSchema, R"({"$ref":"#"})", {}},
      {Kind::kJsonSchema,
       R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})",
       {}},
      {Kind::kJsonSchema, R"({"anyOf":[{"$ref":"#"},{"type":"array","items":{"$ref":"#"}}]})", {}},
      {Kind::kJsonSchema,
       fmt::format(R"({{"$ref":"#/$defs/d59","$defs":{{"d0":{{"type":"string"}}{}}}}})",
                   references),
       {}},
      {Kind::kJsonSchema, R"({"type":"string","minLength":2147483647})", {}},
      {Kind::kJsonSchema, R"({"type":"string","maxLength":100000})", {}},
      {Kind::kJsonSchema, R"({"type":"array","items":{"type":"string"},"minItems":1000000})", {}},
      {Kind::kJsonSchema, R"({"type":"object","minProperties":2147483647})", {}},
      {Kind::kJsonSchema,
       R"({"type":"integer","minimum":-9223372036854775808,"maximum":1e30})",
       {}},
      {Kind::kJsonSchema, R"({"type":"string","pattern":"(.*a.{30}){30}"})", {}},
      {Kind::kRegex, nested("(", "a", ")", 60'000), {}},
      {Kind::kRegex, nested("(", "a", ")*", 64), {}},
      {Kind::kRegex, "(a+)+", {}},
      {Kind::kRegex, "(a|a)*b", {}},
      {Kind::kRegex, "a{1,100000}", {}},
      {Kind::kRegex, "((a{1,1000}){1,1000}){1,1000}", {}},
      {Kind::kRegex, ".{1,10000}", {}},
      {Kind::kRegex, repeated("[a-z]{1,128}", 5000), {}},
      {Kind::kRegex, repeated("[a-z]{1,128}", 60), {}},
      {Kind::kRegex, repeated("(a?){50}", 150), {}},
      {Kind::kRegex, repeated("(x+x+)+y", 1500), {}},
      {Kind::kEbnf, nested("", "root ::= ", "(", 60'000), {}},
      {Kind::kEbnf, "root ::= root | root root | \"a\" | \"\"", {}},
      {Kind::kEbnf, fmt::format("root ::= a0\n{}a1500 ::= \"x\"", wide), {}},
      {Kind::kEbnf, "root ::= \"a\"{1000000000}", {}},
      {Kind::kEbnf, "root ::= (\"a\" | root){5000}", {}},
      {Kind::kChoice, "", std::vector<std::string>(30'000, "ab")},
  };
  for (const GrammarSpec& bomb : kBombs) {
    const auto compiled = compiler().compile(bomb);
    const std::string name = bomb.text.substr(0, 60);
    if (!compiled) {
      EXPECT_EQ(compiled.error().code, Code::kInvalidArgument) << name;
      EXPECT_LT(compiled.error().message.size(), 1000u) << name;
      continue;
    }
    EXPECT_LT((*compiled)->memory_bytes(), 200 << 20) << name;
    const auto state = (*compiled)->start(std::nullopt);
    for (int i = 0; i < 20; ++i) {
      const auto allowed = state->allowed();
      int32_t id = 0;
      while (id < std::ssize(allowed) * 32 && (allowed[id / 32] >> id % 32 & 1) == 0) ++id;
      if (id == std::ssize(allowed) * 32) break;
      EXPECT_TRUE(state->accept(id)) << name;
    }
  }
  // The compiler still works.
  EXPECT_TRUE(compiler().compile({Kind::kRegex, "still here", {}}));
}

TEST(GrammarCompiler, NobodyWaitsBeyondTheDeadline) {
  // Without threads nothing is ever compiled: the deadline alone ends the call.
  GrammarCompiler idle(bundled_tokenizer(), bundled_tokenizer()->vocab_size(),
                       {.num_threads = 0, .deadline = 1ms});
  const auto none = idle.compile({Kind::kRegex, "a", {}});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().message, "the grammar took longer than 0.001 s to compile");
  GrammarCompiler slow(bundled_tokenizer(), bundled_tokenizer()->vocab_size(),
                       {.num_threads = 1, .threads_a_grammar = 1, .deadline = 1ms});
  const GrammarSpec spec{Kind::kJsonSchema, R"({"type":"string","maxLength":400})", {}};
  const auto first = slow.compile(spec);
  ASSERT_FALSE(first);
  EXPECT_EQ(first.error().message, "the grammar took longer than 0.001 s to compile");
  // A grammar whose compilation has begun is completed and cached despite the deadline. One that
  // expired before a thread took it has not begun; repeated requests compile it eventually.
  while (!slow.compile(spec)) std::this_thread::sleep_for(10ms);
}

TEST(GrammarCompiler, CacheKeepsTheLatestUsed) {
  const GrammarSpec one{Kind::kRegex, "[a-z]{20}", {}}, two{Kind::kRegex, "[a-y]{20}", {}},
      three{Kind::kRegex, "[a-x]{20}", {}};
  const int64_t bytes = (*compiler().compile(one))->memory_bytes();
  GrammarCompiler small(
      bundled_tokenizer(), bundled_tokenizer()->vocab_size(),
      {.deadline = GrammarCompilerOptions::kPatient, .cache_bytes = bytes * 5 / 2});
  const auto first = *small.compile(one);
  const auto second = *small.compile(two);
  EXPECT_EQ(*small.compile(one), first) << "the same object";
  EXPECT_LE(small.cache_bytes(), bytes * 5 / 2);
  (void)*small.compile(three);
  EXPECT_LE(small.cache_bytes(), bytes * 5 / 2);
  EXPECT_EQ(*small.compile(one), first);
  EXPECT_NE(*small.compile(two), second) << "the least recently used was given up";
}

TEST(GrammarCompiler, ManyCallersAtOnce) {
  GrammarCompiler busy(bundled_tokenizer(), bundled_tokenizer()->vocab_size(),
                       {.deadline = GrammarCompilerOptions::kPatient, .max_waiting = 40});
  std::atomic<int> good{0}, refused{0}, full{0};
  constexpr int kCalls = 200;
  std::latch all(kCalls);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int i = t; i < kCalls; i += 4) {
        GrammarSpec spec{Kind::kRegex, fmt::format("x{{{}}}[a-z]+", 1 + i % 37), {}};
        if (i % 10 == 0) spec.text.insert(0, 1, '(');
        busy.compile(std::move(spec), [&](GrammarCompiler::Compiled compiled) {
          ++(compiled ? good : compiled.error().code == Code::kResourceExhausted ? full : refused);
          all.count_down();
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  all.wait();
  EXPECT_EQ(good + refused + full, kCalls);
  EXPECT_GT(good, 0);
  EXPECT_LE(refused, kCalls / 10);
}

TEST(GrammarCompiler, ShutsDownWithCallsWaiting) {
  std::atomic<int> answered{0};
  {
    GrammarCompiler brief(bundled_tokenizer(), bundled_tokenizer()->vocab_size(),
                          {.num_threads = 1, .deadline = GrammarCompilerOptions::kPatient});
    for (int i = 0; i < 30; ++i) {
      brief.compile({Kind::kRegex, fmt::format("[a-z]{{{}}}", 60 + i), {}},
                    [&](const GrammarCompiler::Compiled&) { ++answered; });
    }
  }
  EXPECT_EQ(answered, 30);
}

}  // namespace
}  // namespace fathom
