#include "chat/python_json.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

std::string rewritten(std::string_view text) {
  const auto value = parse_json(text, "test");
  EXPECT_TRUE(value) << value.error().message;
  return to_python_json(*value);
}

// Expected strings: json.dumps(json.loads(text), ensure_ascii=False) of Python 3.11.
TEST(PythonJson, LayoutAndOrder) {
  EXPECT_EQ(rewritten(R"({"b":1,"a":[1,2,{"x":null}],"c":{},"d":[]})"),
            R"({"b": 1, "a": [1, 2, {"x": null}], "c": {}, "d": []})");
  EXPECT_EQ(rewritten("[true,false,null]"), "[true, false, null]");
}

TEST(PythonJson, Strings) {
  EXPECT_EQ(rewritten(R"("é你🙂 / \" \\ \n\r\t\f\b \u0001\u001f\u007f </b>")"),
            "\"é你🙂 / \\\" \\\\ \\n\\r\\t\\f\\b \\u0001\\u001f\x7f </b>\"");
}

TEST(PythonJson, Numbers) {
  const std::pair<const char*, const char*> kCases[] = {
      {"0", "0"},
      {"-5", "-5"},
      {"18446744073709551615", "18446744073709551615"},
      {"1.0", "1.0"},
      {"-0.0", "-0.0"},
      {"0.1", "0.1"},
      {"1e5", "100000.0"},
      {"123456789012345.0", "123456789012345.0"},
      {"1e15", "1000000000000000.0"},
      {"9999999999999998.0", "9999999999999998.0"},
      {"1e16", "1e+16"},
      {"1.5e300", "1.5e+300"},
      {"0.0001", "0.0001"},
      {"0.00001", "1e-05"},
      {"1.25e-7", "1.25e-07"},
      {"5e-324", "5e-324"},
      {"3.141592653589793", "3.141592653589793"},
  };
  for (const auto& [text, expected] : kCases) EXPECT_EQ(rewritten(text), expected) << text;
}

}  // namespace
}  // namespace fathom
