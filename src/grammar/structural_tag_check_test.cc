#include "grammar/structural_tag_check.h"

#include <gtest/gtest.h>

#include <string>

namespace fathom {
namespace {

std::string problem(const std::string& format) {
  const auto checked = check_structural_tag(R"({"type":"structural_tag","format":)" + format + "}");
  return checked ? "" : checked.error().message;
}

TEST(StructuralTagCheck, TakesWhatToolCallsNeed) {
  EXPECT_EQ(problem(R"_({"type":"sequence","elements":[{"type":"const_string","value":"<c>"},
      {"type":"tags_with_separator","separator":",","tags":[{"type":"tag","begin":"f(","end":")",
       "content":{"type":"json_schema","json_schema":{"type":"object"}}}]},
      {"type":"regex","pattern":"[0-9]{1,4}"},{"type":"any_text"}]})_"),
            "");
}

TEST(StructuralTagCheck, NamesThePlaceAndTheProblem) {
  EXPECT_EQ(check_structural_tag("{}").error().message,
            "structural_tag: expected an object with the field format");
  EXPECT_EQ(problem("3"), "structural_tag at /format: expected an object");
  EXPECT_EQ(problem("{}"), "structural_tag at /format: type is missing or no string");
  EXPECT_EQ(problem(R"({"type":"dispatch"})"),
            "structural_tag at /format: the type \"dispatch\" is not supported");
  EXPECT_EQ(problem(R"({"type":"or","elements":[{"type":"regex"}]})"),
            "structural_tag at /format/elements/0: pattern is missing or no string");
  EXPECT_TRUE(problem(R"({"type":"tag","content":{"type":"json_schema",
      "json_schema":{"type":"object","not":{}}}})")
                  .starts_with("structural_tag at /format/content: "));
  EXPECT_NE(problem(R"({"type":"regex","pattern":")" + std::string(100'000, 'a') + "\"}"), "");
}

}  // namespace
}  // namespace fathom
