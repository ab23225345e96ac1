#include "base/utf8.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

TEST(Utf8, RoundTripsEveryCodePoint) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(text, c);
    const Utf8Char decoded = decode_utf8(text, 0);
    ASSERT_TRUE(decoded.valid);
    ASSERT_EQ(decoded.code_point, c);
    ASSERT_EQ(decoded.length, static_cast<int>(text.size()));
  }
}

TEST(Utf8, RefusesIllFormedBytes) {
  for (const char* text :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "a\xE4\xBD"}) {
    EXPECT_FALSE(is_valid_utf8(text)) << text;
  }
  EXPECT_TRUE(is_valid_utf8("a\xE4\xBD\xA0\xF0\x9F\x98\x80"));
}

TEST(Utf8, FindsWhereAnUnfinishedCharacterBegins) {
  const std::string text = "ab\xF0\x9F\x98\x80";
  EXPECT_EQ(complete_utf8_prefix(text), 6u);
  for (size_t cut = 3; cut < 6; ++cut) EXPECT_EQ(complete_utf8_prefix(text.substr(0, cut)), 2u);
  EXPECT_EQ(complete_utf8_prefix("a\xF0\x9Fz"), 4u);  // cannot be completed any more
  EXPECT_EQ(complete_utf8_prefix("\x80"), 1u);
}

TEST(Utf8, ReplacesMaximalIllFormedParts) {
  EXPECT_EQ(replace_ill_formed("a\xF0\x9F\x98z"), "a\xEF\xBF\xBDz");
  EXPECT_EQ(replace_ill_formed("\xE0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(replace_ill_formed("ok"), "ok");
}

}  // namespace
}  // namespace fathom
