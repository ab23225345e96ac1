// Whole tokenizers: published vocabularies, ids made with Hugging Face's `tokenizers`, round trips.
#include "tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "base/json.h"
#include "base/utf8.h"
#include "tokenizer/small_tokenizer.h"

namespace fathom {
namespace {

const std::string kData = FATHOM_SOURCE_DIR "/tests/data/tokenizers/";

json::value read_json(const std::string& path) {
  const auto text = read_text_file(path, 16 << 20);
  EXPECT_TRUE(text) << text.error().message;
  auto value = parse_json(*text, path);
  EXPECT_TRUE(value) << value.error().message;
  return *value;
}

std::vector<int32_t> ids_of(const json::value& value) {
  return json::value_to<std::vector<int32_t>>(value);
}

// Tokenizers are loaded once each; they are immutable.
const Tokenizer& published(const std::string& name) {
  static std::unordered_map<std::string, std::unique_ptr<Tokenizer>> loaded;
  auto& tokenizer = loaded[name];
  if (tokenizer == nullptr) {
    auto result = Tokenizer::load(name == "fathom-tiny" ? FATHOM_SOURCE_DIR "/models/fathom-tiny"
                                                        : kData + name);
    EXPECT_TRUE(result) << result.error().message;
    tokenizer = std::move(*result);
  }
  return *tokenizer;
}

class Published : public testing::TestWithParam<const char*> {};

TEST_P(Published, GoldenVectors) {
  const json::value file = read_json(kData + GetParam() + "/golden_vectors.json");
  const json::array& vectors =
      file.is_array() ? file.as_array() : file.as_object().at("vectors").as_array();
  ASSERT_GE(vectors.size(), 8u);
  for (const json::value& vector : vectors) {
    const std::string text(vector.at("text").as_string());
    EXPECT_EQ(published(GetParam()).encode(text), ids_of(vector.at("ids"))) << text;
  }
}
INSTANTIATE_TEST_SUITE_P(Tokenizer, Published,
                         testing::Values("deepseek-v3", "deepseek-v2", "deepseek-coder-v1",
                                         "glm-form", "kimi-form"));

TEST(Tokenizer, RandomStringsHaveTheReferenceIds) {
  const json::value sample = read_json(kData + "random_sample.json");
  const json::array& texts = sample.at("texts").as_array();
  ASSERT_GE(texts.size(), 1500u);
  for (const char* name : {"deepseek-v3", "deepseek-v2"}) {
    const json::array& expected = sample.at(name).as_array();
    ASSERT_EQ(expected.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      const std::string text(texts[i].as_string());
      EXPECT_EQ(published(name).encode(text), ids_of(expected[i])) << name << ": " << text;
    }
  }
}

TEST(Tokenizer, DecodingGivesTheTextBack) {
  std::mt19937 random(11);
  for (const char* name : {"deepseek-v3", "deepseek-v2", "deepseek-coder-v1", "fathom-tiny"}) {
    const Tokenizer& tokenizer = published(name);
    for (int i = 0; i < 3000; ++i) {
      std::string text;
      for (uint32_t length = random() % 30; length > 0; --length) {
        const uint32_t limits[] = {0x80, 0x800, 0x3100, 0x10000, 0x110000};
        const char32_t c = random() % limits[random() % 5];
        append_utf8(text, c >= 0xD800 && c <= 0xDFFF ? U'<' : c);
      }
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << name;
      EXPECT_EQ(tokenizer.decode(tokenizer.encode_ordinary(text)), text) << name;
    }
  }
}

TEST(Tokenizer, AddedTokensAreLeftmostLongestAndPlainTextInOrdinary) {
  const auto tokenizer = *Tokenizer::from_json(json::serialize(small_tokenizer()), "t.json");
  const auto ids = [&](std::string_view text) { return tokenizer->encode(text); };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(ids("<think>hello"), (Ids{261, 259}));
  EXPECT_EQ(ids("<｜bos｜><｜bos｜>"), (Ids{260, 260}));
  EXPECT_EQ(ids("<thinking>"), (Ids{262}));
  EXPECT_EQ(ids("<<think>"), (Ids{'<', 261}));
  EXPECT_EQ(ids("<thin"), (Ids{'<', 't', 'h', 'i', 'n'}));
  const Ids ordinary = tokenizer->encode_ordinary("<think>");
  EXPECT_EQ(ordinary, (Ids{'<', 't', 'h', 'i', 'n', 'k', '>'}));
  EXPECT_EQ(tokenizer->decode(ordinary), "<think>");
}

TEST(Tokenizer, AddedTokensThatBeginAlikeAreTakenAtFullLength) {
  json::value file = small_tokenizer();
  for (const auto& [id, content] : {std::pair{263, "<|t"}, {264, "<|t|>"}, {265, "<|t|>>>"}}) {
    file.at("added_tokens")
        .as_array()
        .push_back({{"id", id}, {"content", content}, {"special", true}, {"normalized", false}});
  }
  const auto tokenizer = *Tokenizer::from_json(json::serialize(file), "t.json");
  const auto ids = [&](std::string_view text) { return tokenizer->encode(text); };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(ids("<|t"), (Ids{263}));
  EXPECT_EQ(ids("<|t|>"), (Ids{264}));
  EXPECT_EQ(ids("<|t|>>>"), (Ids{265}));
  // Where the longer one breaks off, the longest whole one stands.
  EXPECT_EQ(ids("<|t|x"), (Ids{263, '|', 'x'}));
  EXPECT_EQ(ids("<|t|>>x"), (Ids{264, '>', 'x'}));
}

TEST(Tokenizer, SpecialTokensAndUnknownIds) {
  const Tokenizer& v3 = published("deepseek-v3");
  EXPECT_EQ(v3.vocab_size(), 128815);
  EXPECT_EQ(v3.bos_id(), 0);
  EXPECT_EQ(v3.eos_id(), 1);
  EXPECT_FALSE(v3.add_bos_by_default());
  EXPECT_TRUE(v3.chat_template().has_value());
  EXPECT_TRUE(v3.is_special(0));
  EXPECT_FALSE(v3.is_special(128803));
  EXPECT_FALSE(v3.is_special(-1));
  EXPECT_EQ(v3.token_id("<｜User｜>"), 128803);
  EXPECT_EQ(v3.token_id(" hello"), v3.encode(" hello")[0]);
  EXPECT_EQ(v3.token_id("no such token at all"), std::nullopt);
  EXPECT_EQ(v3.token_bytes(128804), "<｜Assistant｜>");
  EXPECT_EQ(v3.token_bytes(128815), "");
  EXPECT_EQ(v3.encode("hi", true)[0], 0);
  const std::vector<int32_t> ids = {0, 19923, -5, 128803, 1 << 30, 2058, 1};
  EXPECT_EQ(v3.decode(ids), "<｜begin▁of▁sentence｜>Hello<｜User｜> world<｜end▁of▁sentence｜>");
  EXPECT_EQ(v3.decode(ids, true), "Hello<｜User｜> world");
  const Tokenizer& v2 = published("deepseek-v2");
  EXPECT_EQ(v2.bos_id(), 100000);
  EXPECT_TRUE(v2.add_bos_by_default());
}

TEST(Tokenizer, IllFormedUtf8IsReplaced) {
  const Tokenizer& v3 = published("deepseek-v3");
  for (const std::string bad : {"\xFF", "a\xC3", "\xED\xA0\x80", "\xF0\x9F\x98", "x\x80\x80y"}) {
    EXPECT_EQ(v3.encode(bad), v3.encode(replace_ill_formed(bad)));
    EXPECT_EQ(v3.encode_ordinary(bad), v3.encode_ordinary(replace_ill_formed(bad)));
  }
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(random() % 40, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_EQ(v3.decode(v3.encode(bytes)), replace_ill_formed(bytes));
  }
}

TEST(Tokenizer, HardTextsTakeNoLongerThanOthers) {
  const size_t size = 1 << 18;
  std::string spaces_then_letter(size, ' ');
  spaces_then_letter += "x";
  std::string brackets;
  while (brackets.size() < size) brackets += "<｜tool▁calls▁begi";
  for (const char* name : {"deepseek-v3", "deepseek-v2", "deepseek-coder-v1"}) {
    for (const std::string& text :
         {std::string(size, 'a'), std::string(size, '\n'), std::string(size, '7'),
          std::string(size, '!'), std::string(size, '\0'), spaces_then_letter, brackets}) {
      const std::clock_t begin = std::clock();
      EXPECT_EQ(published(name).decode(published(name).encode(text)), text);
      // CPU seconds, with room for sanitizers; quadratic time would take a minute.
      EXPECT_LT(std::clock() - begin, 10 * CLOCKS_PER_SEC) << name;
    }
  }
}

TEST(Tokenizer, ThreadsAgree) {
  auto fresh = *Tokenizer::load(kData + "deepseek-v3");  // nothing cached yet
  const json::value sample = read_json(kData + "random_sample.json");
  std::vector<std::vector<std::vector<int32_t>>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back([&] {
      for (const json::value& text : sample.at("texts").as_array()) {
        result.push_back(fresh->encode(std::string(text.as_string())));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < results[0].size(); ++i) {
    const auto expected = ids_of(sample.at("deepseek-v3").as_array()[i]);
    for (const auto& result : results) ASSERT_EQ(result[i], expected);
  }
}

TEST(Tokenizer, LoadSaysWhatIsWrongWithADirectory) {
  const std::filesystem::path directory =
      std::filesystem::path(testing::TempDir()) / "fathom_tokenizer_test";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(directory / name, std::ios::binary) << text;
  };
  const auto missing = Tokenizer::load(directory.string());
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  write("tokenizer.json", json::serialize(small_tokenizer()));
  EXPECT_TRUE(Tokenizer::load(directory.string()));
  write("tokenizer_config.json", R"({"bos_token": "<s>"})");
  const auto unknown = Tokenizer::load(directory.string());
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().message.find("bos_token is \"<s>\", which is no token"),
            std::string::npos)
      << unknown.error().message;
  write("tokenizer_config.json", R"({"bos_token": "<｜bos｜>", "chat_template": "old"})");
  write("chat_template.jinja", "new");
  const auto loaded = Tokenizer::load(directory.string());
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_EQ((*loaded)->bos_id(), 260);
  EXPECT_EQ((*loaded)->eos_id(), std::nullopt);
  EXPECT_EQ((*loaded)->chat_template(), "new");
  for (const char* target : {"tokenizer_config.json", "nowhere.json"}) {
    std::filesystem::remove(directory / "tokenizer_config.json");
    std::filesystem::create_symlink(target, directory / "tokenizer_config.json");
    const auto linked = Tokenizer::load(directory.string());
    ASSERT_FALSE(linked) << "a link to " << target << " is no missing file";
    EXPECT_EQ(linked.error().code, Code::kInvalidArgument);
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace fathom
