// Streamed pieces concatenate to the decoded text, and none ends inside a character.
#include "tokenizer/detokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "base/utf8.h"
#include "tokenizer/small_tokenizer.h"

namespace fathom {
namespace {

std::unique_ptr<Tokenizer> small() {
  return *Tokenizer::from_json(json::serialize(small_tokenizer()), "t.json");
}

TEST(Detokenizer, PiecesAreTheWholeForRandomBytes) {
  const auto tokenizer = small();
  std::mt19937 random(3);
  // Ids below 256 are single bytes; bytes that begin and continue characters are favoured.
  const int32_t favoured[] = {0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90, 0xFF};
  for (int round = 0; round < 20000; ++round) {
    const bool skip = round % 2 == 0;
    std::vector<int32_t> ids(random() % 12);
    for (int32_t& id : ids) {
      id = random() % 3 ? favoured[random() % std::size(favoured)]
                        : static_cast<int32_t>(random() % 270) - 2;
    }
    IncrementalDetokenizer stream(*tokenizer, skip);
    std::string streamed;
    for (const int32_t id : ids) {
      const std::string piece = stream.push(id);
      ASSERT_TRUE(is_valid_utf8(piece));
      streamed += piece;
    }
    const std::string rest = stream.flush();
    ASSERT_TRUE(is_valid_utf8(rest));
    ASSERT_EQ(streamed + rest, tokenizer->decode(ids, skip));
    ASSERT_EQ(stream.flush(), "");
  }
}

TEST(Detokenizer, HoldsBackOnlyWhatMayBeCompleted) {
  const auto tokenizer = small();
  IncrementalDetokenizer stream(*tokenizer);
  EXPECT_EQ(stream.push('a'), "a");
  EXPECT_EQ(stream.push(0xF0), "");  // the four bytes of U+1F600
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push(0x98), "");
  EXPECT_EQ(stream.push(0x80), "\U0001F600");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push('b'), "\uFFFDb");  // cannot be completed any more
  EXPECT_EQ(stream.push(0xFF), "\uFFFD");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
}

TEST(Detokenizer, SpecialTokensAreLeftOutByDefault) {
  const auto tokenizer = small();
  IncrementalDetokenizer shown(*tokenizer, false), hidden(*tokenizer);
  EXPECT_EQ(shown.push(260), "<｜bos｜>");
  EXPECT_EQ(hidden.push(260), "");
  EXPECT_EQ(hidden.push(261), "<think>");
}

}  // namespace
}  // namespace fathom
