#include "base/json.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace fathom {
namespace {

TEST(Json, ErrorsNameTheSourceAndThePlace) {
  for (const char* text : {"", "{", "{\"a\":}", "[1] 2", "nul", "\"\xFF\""}) {
    const auto parsed = parse_json(text, "x.json");
    ASSERT_FALSE(parsed) << text;
    EXPECT_TRUE(parsed.error().message.starts_with("x.json: ")) << parsed.error().message;
  }
  EXPECT_TRUE(parse_json(" {\"a\": [1, 2.5, null]}\n", "x.json"));
}

TEST(Json, AFileMayBeAsLongAsItsLimit) {
  const std::string path = testing::TempDir() + "/fathom_json_test.txt";
  std::ofstream(path, std::ios::binary) << "12345";
  EXPECT_EQ(*read_text_file(path, 5), "12345");
  EXPECT_EQ(read_text_file(path, 4).error().message,
            path + ": 5 bytes, the limit for this file is 4");
  std::filesystem::remove(path);
  EXPECT_EQ(read_text_file(path, 5).error().code, Code::kNotFound);
}

TEST(Json, LimitsDepth) {
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  const auto parsed = parse_json(deep, "x.json");
  ASSERT_FALSE(parsed);
  EXPECT_NE(parsed.error().message.find("deeper than 64"), std::string::npos);
}

TEST(Json, FieldsNameWhatIsWrong) {
  const auto value = parse_json(R"({"n": 5, "big": 1e300, "s": "x", "z": null})", "c.json");
  const JsonFields fields(value->as_object(), "c.json: ");
  EXPECT_EQ(*fields.integer("n", 1, 10), 5);
  EXPECT_EQ(fields.integer("n", 6, 10).error().message, "c.json: n is 5, allowed are 6 to 10");
  EXPECT_EQ(fields.integer("m", 1, 2).error().message, "c.json: m is missing");
  EXPECT_EQ(fields.integer("z", 1, 2).error().message, "c.json: z is missing");
  EXPECT_EQ(fields.integer("s", 1, 2).error().message,
            "c.json: s is \"x\", expected an integer from 1 to 2");
  EXPECT_FALSE(fields.integer("big", 1, 2));
  EXPECT_EQ(*fields.integer("n", 5, 10), 5) << "both bounds are allowed";
  EXPECT_EQ(*fields.integer("n", 1, 5), 5);
  EXPECT_FALSE(fields.string("n"));
  EXPECT_EQ(*fields.string("s"), "x");
}

}  // namespace
}  // namespace fathom
