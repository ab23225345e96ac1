#include "cli/eval_scoring.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

bool right(EvalCheck check, std::string_view expected, std::string_view text) {
  return is_right(check, *parse_json(expected, "expected"), ChatFormat::kFathomTiny, text);
}

TEST(EvalNumber, TakesTheLastInteger) {
  EXPECT_TRUE(right(EvalCheck::kNumber, "\"42\"", "12 + 30 = 42."));
  EXPECT_TRUE(right(EvalCheck::kNumber, "42", "42"));
  EXPECT_TRUE(right(EvalCheck::kNumber, "\"1234567\"", "It is 1,234,567!"));
  EXPECT_TRUE(right(EvalCheck::kNumber, "\"-5\"", "7 - 12 = -5"));
  EXPECT_TRUE(right(EvalCheck::kNumber, "\"5\"", "12-5"));
  EXPECT_FALSE(right(EvalCheck::kNumber, "\"42\"", "42 = 12 + 30"));
  EXPECT_FALSE(right(EvalCheck::kNumber, "\"42\"", "-42"));
  EXPECT_FALSE(right(EvalCheck::kNumber, "\"42\"", "142"));
  EXPECT_FALSE(right(EvalCheck::kNumber, "\"42\"", "forty-two"));
  EXPECT_FALSE(right(EvalCheck::kNumber, "\"42\"", ""));
}

TEST(EvalNumber, WhatIsThoughtDoesNotCount) {
  EXPECT_TRUE(right(EvalCheck::kNumber, "\"42\"", "41? 40?</think>42"));
  EXPECT_FALSE(right(EvalCheck::kNumber, "\"42\"", "42</think>"));
  EXPECT_TRUE(right(EvalCheck::kNumber, "\"42\"", "1</think>2</think>42"));
}

TEST(EvalContains, FindsAWholeInteger) {
  EXPECT_TRUE(right(EvalCheck::kContains, "\"50413\"", "The code of Violet is 50413, not 16371."));
  EXPECT_FALSE(right(EvalCheck::kContains, "\"50413\"", "The code is 504130."));
  EXPECT_FALSE(right(EvalCheck::kContains, "\"50413\"", "The code is 16371."));
}

TEST(EvalJson, ComparesValues) {
  EXPECT_TRUE(
      right(EvalCheck::kJson, R"({"a": 1, "b": ["x", null]})", R"( {"b":["x",null],"a":1.0})"));
  EXPECT_TRUE(right(EvalCheck::kJson, "149.77", "149.770"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": 1})", R"({"a": 1, "b": 2})"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": 1, "b": 2})", R"({"a": 1})"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": 1})", R"({"a": "1"})"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": 1})", R"({"a": true})"));
  EXPECT_FALSE(right(EvalCheck::kJson, "[1, 2]", "[2, 1]"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": 1})", R"(Here: {"a": 1})"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": 1})", R"({"a": 1)"));
  EXPECT_FALSE(right(EvalCheck::kJson, R"({"a": null})", R"({"b": null})"));
}

TEST(EvalJson, LargeIntegersAreExact) {
  EXPECT_FALSE(right(EvalCheck::kJson, "9007199254740993", "9007199254740992"));
  EXPECT_TRUE(right(EvalCheck::kJson, "18446744073709551615", "18446744073709551615"));
}

constexpr const char* kExpected =
    R"([{"name": "get_time", "arguments": {"place": "Paris"}},
        {"name": "get_time", "arguments": {"place": "Leeds"}}])";

std::string call(std::string_view name, std::string_view arguments) {
  return fmt::format("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>", name, arguments);
}

std::string block(const std::string& calls) {
  return "<｜tool▁calls▁begin｜>" + calls + "<｜tool▁calls▁end｜>";
}

TEST(EvalTool, OneBlockWithTheCallsInOrder) {
  const std::string paris = call("get_time", R"({"place": "Paris"})");
  const std::string leeds = call("get_time", R"({ "place" : "Leeds" })");
  EXPECT_TRUE(right(EvalCheck::kTool, kExpected, block(paris + leeds)));
  EXPECT_TRUE(right(EvalCheck::kTool, kExpected, "hm</think>" + block(paris + leeds)));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, block(leeds + paris)));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, block(paris)));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, block(paris + leeds + leeds)));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, block(paris) + block(leeds)));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, "I ask. " + block(paris + leeds)));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, block(paris + leeds) + " Done."));
  EXPECT_FALSE(
      right(EvalCheck::kTool, kExpected, block(paris + call("clock", R"({"place": "Leeds"})"))));
  EXPECT_FALSE(
      right(EvalCheck::kTool, kExpected, block(paris + call("get_time", R"({"place": "Leeds")"))));
  EXPECT_FALSE(right(EvalCheck::kTool, kExpected, "Paris and Leeds"));
}

TEST(EvalLimits, AreThoseOfTheSets) {
  EXPECT_EQ(max_answer_tokens(EvalCheck::kNumber, false), 48);
  EXPECT_EQ(max_answer_tokens(EvalCheck::kNumber, true), 260);
  EXPECT_EQ(max_answer_tokens(EvalCheck::kContains, false), 40);
  EXPECT_EQ(max_answer_tokens(EvalCheck::kJson, false), 120);
  EXPECT_EQ(max_answer_tokens(EvalCheck::kTool, false), 90);
}

TEST(EvalExpected, MustSuitTheCheck) {
  EXPECT_TRUE(validate_expected(EvalCheck::kNumber, "12").has_value());
  EXPECT_TRUE(validate_expected(EvalCheck::kNumber, 12).has_value());
  EXPECT_FALSE(validate_expected(EvalCheck::kNumber, "1,2").has_value());
  EXPECT_FALSE(validate_expected(EvalCheck::kNumber, "twelve").has_value());
  EXPECT_FALSE(validate_expected(EvalCheck::kContains, json::array{1}).has_value());
  EXPECT_TRUE(validate_expected(EvalCheck::kTool, *parse_json(kExpected, "x")).has_value());
  EXPECT_FALSE(validate_expected(EvalCheck::kTool, "get_time").has_value());
  EXPECT_FALSE(validate_expected(EvalCheck::kTool, *parse_json(R"([{"name": 1}])", "x")));
}

}  // namespace
}  // namespace fathom
