// The hand-written scanner compared with the patterns it implements, and the translation of
// patterns.
#include "tokenizer/pre_tokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "base/utf8.h"
#include "tokenizer/oniguruma_pattern.h"

namespace fathom {
namespace {

using Pieces = std::vector<std::string>;

Pieces pieces_of(const PreTokenizer& pre_tokenizer, std::string_view text) {
  Pieces pieces;
  pre_tokenizer.split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

json::value v3_config() {
  const std::string path = FATHOM_SOURCE_DIR "/tests/data/tokenizers/deepseek-v3/tokenizer.json";
  const auto text = read_text_file(path, 16 << 20);
  EXPECT_TRUE(text) << text.error().message;
  return parse_json(*text, path)->at("pre_tokenizer");
}

// A Split by one pattern, then ByteLevel.
Result<PreTokenizer> splitting_by(const std::string& pattern) {
  const json::value config = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"},
         {"pattern", {{"Regex", pattern}}},
         {"behavior", "Isolated"},
         {"invert", false}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  return PreTokenizer::from_json(config, "t.json");
}

// Random characters of all classes of the patterns, in proportions that make them adjacent.
std::string random_text(std::mt19937& random) {
  static const std::vector<std::pair<char32_t, char32_t>> kRanges = {
      {'a', 'z'},         {'A', 'Z'},         {'0', '9'},         {'!', '/'},
      {'[', '`'},         {' ', ' '},         {' ', ' '},         {'\n', '\n'},
      {'\t', '\r'},       {0, 0x1F},          {0x7F, 0xBF},       {0xC0, 0x24F},
      {0x300, 0x36F},     {0x370, 0x52F},     {0x590, 0x6FF},     {0x900, 0xDFF},
      {0x180B, 0x180F},   {0x2000, 0x206F},   {0x2070, 0x218B},   {0x2190, 0x27BF},
      {0x3000, 0x303F},   {0x3040, 0x30FF},   {0x30F8, 0x3105},   {0x4DFC, 0x4E03},
      {0x4E00, 0x9FA5},   {0x9FA0, 0x9FAA},   {0xAC00, 0xD7A3},   {0xFF00, 0xFFEF},
      {0x10D40, 0x10D90}, {0x16D40, 0x16D80}, {0x1D7CE, 0x1D7FF}, {0x1F300, 0x1FAFF},
      {0x2EBF0, 0x2EC10}, {0xE0000, 0xE01EF}, {0, 0x10FFFF}};
  std::string text;
  const int parts = 1 + static_cast<int>(random() % 12);
  for (int part = 0; part < parts; ++part) {
    const auto [first, last] = kRanges[random() % kRanges.size()];
    const int length = 1 + static_cast<int>(random() % 5);
    for (int i = 0; i < length; ++i) {
      char32_t c = first + static_cast<char32_t>(random() % (last - first + 1));
      if (c >= 0xD800 && c <= 0xDFFF) c = 'x';
      append_utf8(text, c);
    }
  }
  return text;
}

TEST(PreTokenizer, ScannerEqualsThePatterns) {
  const json::value config = v3_config();
  const auto scanner = PreTokenizer::from_json(config, "t.json");
  const auto patterns = PreTokenizer::from_json(config, "t.json", false);
  ASSERT_TRUE(scanner && patterns);
  ASSERT_TRUE(scanner->uses_scanner());
  ASSERT_FALSE(patterns->uses_scanner());
  std::mt19937 random(7);
  for (int i = 0; i < 60000; ++i) {
    const std::string text = random_text(random);
    ASSERT_EQ(pieces_of(*scanner, text), pieces_of(*patterns, text)) << text;
  }
}

TEST(PreTokenizer, ScannerEqualsThePatternsOnEveryCodePoint) {
  const json::value config = v3_config();
  const auto scanner = PreTokenizer::from_json(config, "t.json");
  const auto patterns = PreTokenizer::from_json(config, "t.json", false);
  ASSERT_TRUE(scanner && patterns);
  std::string text;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    append_utf8(text, c);
    append_utf8(text, U"a .\n1の"[c % 6]);  // followed by a character of each kind
    append_utf8(text, c);
    if (c % 0x800 != 0x7FF) continue;
    ASSERT_EQ(pieces_of(*scanner, text), pieces_of(*patterns, text)) << static_cast<uint32_t>(c);
    text.clear();
  }
}

TEST(PreTokenizer, TrailingSpaceIsThatOfLines) {
  const auto pre_tokenizer = splitting_by(R"(\s+$)");
  ASSERT_TRUE(pre_tokenizer) << pre_tokenizer.error().message;
  // Expected: the output of Oniguruma (tokenizers 0.23.3).
  EXPECT_EQ(pieces_of(*pre_tokenizer, " \n a \n\n"), (Pieces{" ", "\n a", " \n\n"}));
  EXPECT_EQ(pieces_of(*pre_tokenizer, "a  \nb"), (Pieces{"a", "  ", "\nb"}));
  EXPECT_EQ(pieces_of(*pre_tokenizer, "\n\na"), (Pieces{"\n", "\na"}));
  EXPECT_EQ(pieces_of(*pre_tokenizer, "a \r\n"), (Pieces{"a", " \r\n"}));
  EXPECT_EQ(pieces_of(*pre_tokenizer, "\n"), (Pieces{"\n"}));
  EXPECT_EQ(pieces_of(*pre_tokenizer, "a\na"), (Pieces{"a\na"}));
  EXPECT_EQ(pieces_of(*pre_tokenizer, "\u3000\u00A0"), (Pieces{"\u3000\u00A0"}));
}

TEST(PreTokenizer, SpacesAreOnigurumas) {
  const auto pre_tokenizer = splitting_by(R"(\s)");
  ASSERT_TRUE(pre_tokenizer);
  EXPECT_EQ(pieces_of(*pre_tokenizer, "a\u180Eb"), (Pieces{"a\u180Eb"}));  // PCRE2's \s contains it
  EXPECT_EQ(pieces_of(*pre_tokenizer, "a\u0085b"), (Pieces{"a", "\u0085", "b"}));
}

TEST(PreTokenizer, AnchorsAreThoseOfLines) {
  const auto begins = splitting_by("^a");
  ASSERT_TRUE(begins);
  EXPECT_EQ(pieces_of(*begins, "a\na"), (Pieces{"a", "\n", "a"}));
}

TEST(PreTokenizer, SplitsLinearlyWhatARegexWouldNot) {
  const auto pre_tokenizer = splitting_by(R"(\s+$)");
  ASSERT_TRUE(pre_tokenizer);
  EXPECT_EQ(pieces_of(*pre_tokenizer, std::string(1 << 20, ' ') + "x").size(), 1u);
}

TEST(OnigurumaPattern, RefusesWhatItCannotCarryOver) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"(\w+)", "uses \\w"},
      {R"(\bfoo)", "uses \\b"},
      {R"(\h)", "uses \\h"},
      {R"(\p{Foo})", "the property Foo"},
      {R"([\P{L}])", "inside brackets"},
      {"[a&&b]", "&&"},
      {"[a[bc]]", "brackets inside brackets"},
      {"[a", "not closed"},
      {"[]a]", "empty bracket"},
      {"a{1,2}+", "{1,2}+"},
      {"a{,2}", "begins no {n,m}"},
      {"(?i)a", "the group (?i)"},
      {R"([\s-x])", "hyphen"},
      {R"([a-\s])", "hyphen"},
      {R"(\x{D800})", "not a character"},
      {R"(\xE9)", "not a character"},
      {R"(\)", "ends with a backslash"},
      {"(", "is not a valid pattern"},
      {"a*", "empty text"},
  };
  for (const auto& [pattern, reason] : kCases) {
    const auto refused = splitting_by(pattern);
    ASSERT_FALSE(refused) << pattern;
    EXPECT_NE(refused.error().message.find(reason), std::string::npos) << refused.error().message;
    EXPECT_NE(refused.error().message.find("t.json: pre_tokenizer.pretokenizers[0]"),
              std::string::npos)
        << refused.error().message;
  }
}

TEST(OnigurumaPattern, CarriesOverWhatItCan) {
  for (const char* pattern :
       {R"([^\r\n\p{L}\p{N}]?\p{Lu}+(?i:'s|'t))", R"(\x{4e00}-\u9fa5|\x41|\S\d?)", R"([\-\s-])",
        R"((?<=a)b|(?<!a)c|(?>d+)(?:e|f){2,3}g{4})", R"([^\s\S]|a)", R"(\$\.\\[\[\]])"}) {
    const auto accepted = splitting_by(pattern);
    EXPECT_TRUE(accepted) << accepted.error().message;
  }
}

}  // namespace
}  // namespace fathom
