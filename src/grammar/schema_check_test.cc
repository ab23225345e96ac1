#include "grammar/schema_check.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "grammar/text_limits.h"

namespace fathom {
namespace {

std::string error_of(std::string_view schema) {
  const auto checked = check_schema(schema);
  return checked ? "" : checked.error().message;
}

TEST(SchemaCheck, TakesWhatToolsWrite) {
  for (
      const char* schema :
      {R"({})", R"(true)", R"({"type":"object"})",
       R"({"type":"object","title":"T","description":"d","properties":{"a":{"type":"string",
               "default":"x","examples":["y"]}},"required":["a"],"additionalProperties":false})",
       R"({"$defs":{"A":{"type":"integer","minimum":0}},"type":"array","items":{"$ref":"#/$defs/A"}})",
       R"({"definitions":{"A":{"type":"null"}},"$ref":"#/definitions/A","description":"d"})",
       R"({"anyOf":[{"type":"string"},{"type":"null"}],"default":null,"title":"Name"})",
       R"({"allOf":[{"$ref":"#/$defs/A"}],"$defs":{"A":{"type":"string"}}})",
       R"({"enum":["a","b"],"type":"string"})", R"({"enum":["a",null],"type":["string","null"]})",
       R"({"const":3,"type":"integer"})", R"({"properties":{"a":{}}})",
       R"({"type":"array","items":{},"uniqueItems":false})", R"({"type":"string","format":"date"})",
       R"({"type":"string","pattern":"^[a-z]{1,20}$"})"}) {
    EXPECT_EQ(error_of(schema), "") << schema;
  }
}

TEST(SchemaCheck, NamesWhatItRefuses) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"({"type":"object","not":{}})", "json_schema: not is not supported"},
      {R"({"type":"object","properties":{"a":{"if":{}}}})",
       "json_schema at /properties/a: if is not supported"},
      {R"({"type":"array","items":{},"uniqueItems":true})",
       "json_schema: uniqueItems is not supported"},
      {R"({"type":"array","contains":{}})", "json_schema: contains is not supported"},
      {R"({"type":"object","anyOf":[{"required":["a"]}]})",
       "json_schema: type beside anyOf is not supported"},
      {R"({"$ref":"#/$defs/A","$defs":{"A":{}},"required":["x"]})",
       "json_schema: required beside $ref is not supported"},
      {R"({"anyOf":[{}],"oneOf":[{}]})", "json_schema: oneOf beside anyOf is not supported"},
      {R"({"allOf":[{"type":"string"},{"minLength":3}]})",
       "json_schema: allOf with other than one schema is not supported"},
      {R"({"minLength":3})", "json_schema: minLength needs a type beside it"},
      {R"({"enum":["a",1],"type":"string"})",
       "json_schema: enum has a value that is not of type \"string\""},
      {R"({"$ref":"other.json"})",
       "json_schema: $ref is \"other.json\"; only references inside the schema (\"#/…\") are "
       "supported"},
      {R"({"$ref":"#/$defs/B","$defs":{"A":{}}})",
       "json_schema: $ref is \"#/$defs/B\", which is not in the schema"},
      {R"({"$ref":"#"})", "json_schema: $ref \"#\" leads to itself"},
      {R"({"type":"array","items":{"$ref":"#/$defs/A"},
           "$defs":{"A":{"$ref":"#/$defs/B"},"B":{"$ref":"#/$defs/A"}}})",
       "json_schema at /items: $ref \"#/$defs/A\" leads to itself"},
      {R"({"$ref":"#/x","x":{"not":{}}})", "json_schema at #/x: not is not supported"},
      {R"({"$ref":7})", "json_schema: $ref is 7, expected a string"},
      {R"({"type":"string","pattern":7})", "json_schema: pattern is 7, expected a string"},
      {R"({"type":"string","pattern":"a{2000000}"})",
       "json_schema: pattern repeats more than 1000000 times"},
      {R"({"properties":[]})", "json_schema at /properties is an array, expected an object"},
      {R"({"anyOf":[]})", "json_schema at /anyOf is an array, expected a list of schemas"},
      {R"(7)", "json_schema is 7, expected a schema"},
      {R"({"type":"object","properties":{"a":{}},"required":["a","b"]})",
       "json_schema: required names \"b\", which properties does not declare"},
      {R"({"type":"object","required":["b"],"additionalProperties":true})",
       "json_schema: required names \"b\", which properties does not declare"},
      {R"({"type":"object","properties":{"a":{}},"required":["a","a"]})",
       "json_schema: required names \"a\" twice"},
      {R"({"type":"integer","multipleOf":0})",
       "json_schema: multipleOf is 0, expected a number above 0"},
      {R"({"type":"object","required":"b"})",
       "json_schema: required is \"b\", expected a list of names"},
      {R"({"type":"object","required":[3]})", "json_schema: required has 3, expected names"},
      {R"({"type":"string","format":"date","pattern":"a"})",
       "json_schema: pattern beside format is not supported"},
      {R"({"enum":"a"})", "json_schema: enum is \"a\", expected a list of values"},
      {R"({"type":"object","properties":{"é":{}},"propertyNames":{"enum":["a"]}})",
       "json_schema: propertyNames beside properties is not supported"},
      {R"({"type":"string","format":3})", "json_schema: format is 3, expected a string"},
      {R"({"type":[]})",
       "json_schema: type is [], expected the name of a type or a list of such names"},
      {R"({"type":["string",3]})",
       "json_schema: type is [\"string\",3], expected the name of a type or a list of such names"},
      {R"({"type":"text"})",
       "json_schema: type is \"text\", expected the name of a type or a list of such names"},
      {R"({"type":["string","string"]})", "json_schema: type names \"string\" twice"},
      {R"({"type":"object","patternProperties":{"^a":{}}})",
       "json_schema: patternProperties is not supported"},
      {R"({"type":"object","additionalProperties":{},"minProperties":2})",
       "json_schema: minProperties beside additionalProperties is not supported"},
      {R"({"type":"string","minLength":-1})",
       "json_schema: minLength is -1, expected an integer that is not negative"},
      {R"({"type":"integer","exclusiveMinimum":true})",
       "json_schema: exclusiveMinimum is true, expected a number"},
      {R"({"type":"array","items":{"$id":"x"}})",
       "json_schema at /items: $id is not supported here"},
  };
  for (const auto& [schema, message] : kCases) EXPECT_EQ(error_of(schema), message) << schema;
}

TEST(SchemaCheck, LimitsSizeDepthAndNumber) {
  EXPECT_EQ(error_of(std::string(kMaxGrammarBytes + 1, ' ')),
            "json_schema has 65537 bytes, at most 65536 are allowed");
  std::string deep;
  for (int i = 0; i < 40; ++i) deep += R"({"properties":{"a":)";
  deep += "{}";
  for (int i = 0; i < 40; ++i) deep += "}}";
  EXPECT_TRUE(error_of(deep).starts_with("json_schema: ")) << error_of(deep);
  std::string many = R"({"anyOf":[{})";
  for (int i = 0; i < kMaxGrammarRules; ++i) many += ",{}";
  EXPECT_EQ(error_of(many + "]}"), "json_schema has more than 2000 schemas in it");
  std::string patterns = R"({"type":"array","prefixItems":[{})";
  for (int i = 0; i < 100; ++i) patterns += R"(,{"type":"string","pattern":"[a-z]{1,100}"})";
  EXPECT_NE(error_of(patterns + "]}").find("patterns have more than 8192"), std::string::npos);
  std::string counted = R"({"type":"object","minProperties":150,"properties":{"a":{})";
  for (int i = 0; i < 200; ++i) counted += fmt::format(R"(,"k{}":{{}})", i);
  EXPECT_NE(error_of(counted + "}}").find("minProperties is 150 beside 201 properties"),
            std::string::npos);
}

TEST(TextLimits, CountsWhatRepetitionsCopy) {
  EXPECT_EQ(*check_regex("abc", "regex"), 3);
  EXPECT_EQ(*check_regex("[a-z]{10}", "regex"), 10);
  EXPECT_EQ(*check_regex("(ab[c{9}]){10}x", "regex"), 31);
  EXPECT_EQ(*check_regex("\\d{3}-\\d{4}", "regex"), 8);
  EXPECT_EQ(*check_regex("é{5}", "regex"), 5);
  EXPECT_EQ(*check_regex("a{1,100000}", "regex"), 128) << "counted, not copied, beyond 128";
  EXPECT_EQ(check_regex("((.{100}){100}){100}", "regex").error().message,
            "regex has more than 8192 characters and classes, with repetitions written out");
  EXPECT_EQ(check_regex(std::string(65, '(') + "a", "regex").error().message,
            "regex nests groups deeper than 64");
  EXPECT_EQ(check_regex("a{x}", "regex").error().message,
            "regex has a { that begins no repetition");
  EXPECT_EQ(check_regex(std::string("a\0b", 3), "regex").error().message, "regex contains a NUL");
  EXPECT_EQ(check_regex("a\xFF", "regex").error().message, "regex is not UTF-8");
}

TEST(TextLimits, ReadsEbnf) {
  EXPECT_TRUE(check_ebnf("root ::= \"(((\" [({] a{2} # ((( comment\na ::= \"\\\"(\"", "grammar"));
  std::string rules;
  for (int i = 0; i <= kMaxGrammarRules; ++i) rules += fmt::format("a{} ::= \"x\"\n", i);
  EXPECT_EQ(check_ebnf(rules, "grammar").error().message, "grammar has more than 2000 rules");
  EXPECT_EQ(check_ebnf("root ::= " + std::string(65, '('), "grammar").error().message,
            "grammar nests groups deeper than 64");
}

}  // namespace
}  // namespace fathom
