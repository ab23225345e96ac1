#include "server/openai/request_json.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>

namespace fathom {
namespace {

std::string repeated(std::string_view part, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += part;
  return out;
}

std::string many_keys(size_t count) {
  std::string out = "{";
  for (size_t i = 0; i < count; ++i) out += fmt::format("{}\"k{}\":0", i == 0 ? "" : ",", i);
  return out + "}";
}

struct Pathology {
  const char* name;
  std::string body;
  int status = 400;          // 200: accepted
  std::string message = {};  // substring of the error
};

std::vector<Pathology> pathologies() {
  const auto nested = [](size_t depth) {
    return "{\"a\":" + repeated("[", depth) + repeated("]", depth) + "}";
  };
  return {
      {"empty", ""},
      {"spaces", "  \n "},
      {"not_an_object", "[1]", 400, "the body is an array, expected a JSON object"},
      {"text", "\"x\"", 400, "expected a JSON object"},
      {"cut", "{\"a\":[1,", 400, "not valid JSON"},
      {"trailing_text", "{} x", 400, "something follows its end at byte 3"},
      {"two_objects", "{}{}", 400, "something follows its end at byte 2"},
      {"trailing_comma", "{\"a\":1,}"},
      {"single_quotes", "{'a':1}"},
      {"comment", "{/**/}"},
      {"nan", "{\"a\":NaN}"},
      {"infinity", "{\"a\":-Infinity}"},
      {"leading_zero", "{\"a\":01}"},
      {"plus", "{\"a\":+1}"},
      {"hexadecimal", "{\"a\":0x10}"},
      {"byte_order_mark", "\xEF\xBB\xBF{}", 400, "byte order mark"},
      {"utf16", std::string("\xFF\xFE{\0}\0", 6)},
      {"depth_63", nested(63), 200},
      {"depth_64", nested(64), 400, "deeper than 64 levels"},
      {"depth_million", nested(1'000'000), 400, "deeper than 64 levels"},
      {"open_brackets", repeated("[", 1'000'000), 400, "deeper than 64 levels"},
      {"open_objects", repeated("{\"a\":", 1'000'000), 400, "deeper than 64 levels"},
      {"keys_at_limit", many_keys(kMaxJsonKeys), 200},
      {"keys_above_limit", many_keys(kMaxJsonKeys + 1), 400, "more than 100000 keys"},
      {"million_keys", many_keys(1'000'000), 400, "more than 100000 keys"},
      {"too_many_values", "{\"a\":[" + repeated("0,", kMaxJsonValues) + "0]}", 400,
       "more than 1100000 values"},
      {"large_text", "{\"a\":\"" + std::string(16 << 20, 'x') + "\"}", 200},
      {"too_large", "{\"a\":\"" + std::string(64 << 20, 'x') + "\"}", 413,
       "bytes, the limit is 33554432"},
      {"bad_utf8_lead", "{\"a\":\"\xFF\"}"},
      {"bad_utf8_overlong", "{\"a\":\"\xC0\xAF\"}"},
      {"bad_utf8_surrogate", "{\"a\":\"\xED\xA0\x80\"}"},
      {"bad_utf8_cut", "{\"a\":\"\xE4\xBD\"}"},
      {"bad_utf8_key", "{\"\xFF\":1}"},
      {"lone_high_surrogate", "{\"a\":\"\\ud800\"}"},
      {"lone_low_surrogate", "{\"a\":\"\\udc00\"}"},
      {"high_surrogate_then_text", "{\"a\":\"\\ud800x\"}"},
      {"high_surrogate_then_escape", "{\"a\":\"\\ud800\\u0041\"}"},
      {"surrogate_pair", "{\"a\":\"\\ud83d\\ude00\"}", 200},
      {"surrogate_in_key", "{\"\\ud800\":1}"},
      {"escaped_nul", "{\"a\":\"\\u0000\"}", 200},
      {"raw_nul", std::string("{\"a\":\"\0\"}", 9)},
      {"raw_newline", "{\"a\":\"\n\"}"},
      {"duplicate_key", "{\"a\":1,\"a\":2}", 400, "the key \"a\" is there twice"},
      {"duplicate_inner", "{\"x\":[{\"b\":1,\"c\":2,\"b\":3}]}", 400,
       "the key \"b\" is there twice"},
      {"duplicate_escaped", "{\"a\":1,\"\\u0061\":2}", 400, "twice"},
      {"same_key_in_two_objects", "{\"a\":{\"k\":1},\"b\":{\"k\":1}}", 200},
      {"large_exponent", "{\"a\":1e999}"},
      {"negative_large_exponent", "{\"a\":-1e999}"},
      {"small_exponent", "{\"a\":1e-999}", 200},
      {"minus_zero", "{\"a\":-0}", 200},
      {"two_to_63", "{\"a\":9223372036854775808}", 200},
      {"long_number", "{\"a\":" + std::string(400, '9') + "}"},
  };
}

TEST(RequestJson, Pathologies) {
  for (const Pathology& one : pathologies()) {
    const auto start = std::chrono::steady_clock::now();
    const auto parsed = parse_request_json(one.body);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(parsed ? 200 : parsed.error().status, one.status)
        << one.name << (parsed ? "" : ": " + parsed.error().message);
    // The target is 100 ms; the limit leaves room for sanitizers and a busy machine.
    EXPECT_LT(took.count(), 2.0) << one.name;
    if (parsed) continue;
    EXPECT_NE(parsed.error().message.find(one.message), std::string::npos)
        << one.name << ": " << parsed.error().message;
    EXPECT_LT(parsed.error().message.size(), 300u) << one.name;
    EXPECT_FALSE(parsed.error().param) << one.name;
  }
}

TEST(RequestJson, LimitsStringsByTheContext) {
  const auto code_of = [](std::string text, size_t limit) {
    const auto parsed = parse_request_json("{\"a\":[\"" + std::move(text) + "\"]}", limit);
    return parsed ? "" : parsed.error().code.value_or("none");
  };
  EXPECT_EQ(code_of(std::string(100, 'a'), 100), "");
  EXPECT_EQ(code_of(std::string(101, 'a'), 100), "context_length_exceeded");
  // Escapes split a string into parts; the limit counts decoded bytes.
  std::string escaped;
  for (int i = 0; i < 50; ++i) escaped += "\\u0061\\n";
  EXPECT_EQ(code_of(escaped, 100), "");
  EXPECT_EQ(code_of(escaped + "a", 100), "context_length_exceeded");
}

TEST(RequestJson, KeepsOrderAndValues) {
  const auto parsed = parse_request_json(
      R"({"b":[1,-2,3.5,true,null,"x\u00e9\n"],"a":{"long key":18446744073709551615}})");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(json::serialize(*parsed),
            R"({"b":[1,-2,3.5E0,true,null,"xé\n"],"a":{"long key":18446744073709551615}})");
}

// Every number is the nearest double, also where the parser's own conversion is off by some units.
TEST(RequestJson, NumbersAreExact) {
  const auto number = [](const std::string& text) {
    const auto parsed = parse_request_json("{\"a\":" + text + "}");
    EXPECT_TRUE(parsed) << text;
    return parsed->at("a").to_number<double>();
  };
  for (const char* text : {"0.1", "0.7", "1e-5", "9.999999999999999e-6", "100.00000000000001",
                           "2.0000000000000004", "1.0000000000000002", "0.009999999999999998",
                           "5e-324", "1e-310", "-2.2250738585072014e-308", "1.7976931348623157e308",
                           "123456789012345678901234567890.5", "0.30000000000000004"}) {
    EXPECT_EQ(number(text), std::strtod(text, nullptr)) << text;
  }
  EXPECT_EQ(number("0e400"), 0);
  EXPECT_EQ(number("1e-400"), 0);
  EXPECT_TRUE(std::signbit(number("-0.0")));
}

}  // namespace
}  // namespace fathom
