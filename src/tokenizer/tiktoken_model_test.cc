// The tokenizer of Kimi K2: vectors are in tests/data/tokenizers/kimi-form (tokenizer_test.cc), the
// refusals here.
#include "tokenizer/tiktoken_model.h"

#include <gmock/gmock.h>

#include "base/json.h"

namespace fathom {
namespace {

using testing::HasSubstr;

const std::string kFolder = FATHOM_SOURCE_DIR "/tests/data/tokenizers/kimi-form/";

std::string text_of(const std::string& name) {
  const auto text = read_text_file(kFolder + name, 1 << 20);
  EXPECT_TRUE(text) << text.error().message;
  return text.value_or("");
}

std::string refusal(const std::string& ranks, const std::string& config) {
  const auto parsed = parse_tiktoken(ranks, "tiktoken.model", config, "tokenizer_config.json");
  return parsed ? "" : parsed.error().message;
}

// A vocabulary without tokens across a border would not show where it is.
TEST(TiktokenModel, SplitsAsThePublishedPattern) {
  const PreTokenizer pre_tokenizer = PreTokenizer::kimi();
  const auto vectors = parse_json(text_of("golden_vectors.json"), "golden_vectors.json");
  ASSERT_TRUE(vectors) << vectors.error().message;
  for (const json::value& vector : vectors->as_array()) {
    std::vector<std::string> pieces;
    pre_tokenizer.split(std::string(vector.at("text").as_string()),
                        [&](std::string_view piece) { pieces.emplace_back(piece); });
    EXPECT_EQ(pieces, json::value_to<std::vector<std::string>>(vector.at("pieces")))
        << vector.at("text").as_string();
  }
}

TEST(TiktokenModel, NamesTheLineThatIsWrong) {
  const std::string ranks = text_of("tiktoken.model"), config = text_of("tokenizer_config.json");
  EXPECT_EQ(refusal(ranks, config), "");
  const struct {
    const char* line;
    const char* part;
  } cases[] = {
      {"QUJD", "line 321 is \"QUJD\", expected a token in base64"},
      {"QUJ 500", "expected a token in base64"},
      {"QU*D 500", "expected a token in base64"},
      {"QUJD -1", "expected a token in base64"},
      {"QUJD 5x", "expected a token in base64"},
      {"QUJD 99999999", "rank 99999999"},
      {"QUJD 7", "another line has its token or its rank, 7"},
      {"QQ== 500", "another line has its token or its rank, 500"},  // "A"
  };
  for (const auto& bad : cases) {
    EXPECT_THAT(refusal(ranks + bad.line + "\n", config), HasSubstr(bad.part)) << bad.line;
  }
  EXPECT_EQ(refusal("", config), "tiktoken.model: has no tokens");
  // Without a byte some text could not be encoded.
  EXPECT_THAT(refusal(ranks.substr(ranks.find('\n') + 1), config), HasSubstr("the byte 0x00"));
}

TEST(TiktokenModel, NamesTheSpecialTokenThatIsWrong) {
  const std::string ranks = text_of("tiktoken.model");
  const auto config = [](const std::string& rest) {
    return R"({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": )" + rest + "}";
  };
  EXPECT_EQ(refusal(ranks, config("{}")), "");
  EXPECT_THAT(refusal(ranks, config(R"({"319": {"content": "a"}})")),
              HasSubstr("added_tokens_decoder.319 is no id from 320 to 575"));
  EXPECT_THAT(refusal(ranks, config(R"({"576": {"content": "a"}})")), HasSubstr("is no id from"));
  EXPECT_THAT(refusal(ranks, config(R"({"x": {"content": "a"}})")), HasSubstr("is no id from"));
  EXPECT_THAT(refusal(ranks, config(R"({"320": {"content": ""}})")), HasSubstr("content is empty"));
  EXPECT_THAT(refusal(ranks, "{}"), HasSubstr("tokenizer_class is missing"));
  // Another tokenizer with such a file has another pattern.
  EXPECT_THAT(refusal(ranks, R"({"tokenizer_class": "QWenTokenizer"})"),
              HasSubstr("tokenizer_class is \"QWenTokenizer\""));
}

}  // namespace
}  // namespace fathom
