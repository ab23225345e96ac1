// What is accepted in tokenizer.json, and the errors with which everything else is refused.
#include "tokenizer/tokenizer_json.h"

#include <gtest/gtest.h>

#include <functional>

#include "tokenizer/small_tokenizer.h"
#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

using Change = std::function<void(json::object& root)>;

std::string changed(const Change& change) {
  json::value value = small_tokenizer();
  change(value.as_object());
  return json::serialize(value);
}

json::object& model(json::object& root) { return root["model"].as_object(); }
json::object& vocab(json::object& root) { return model(root)["vocab"].as_object(); }
json::array& merges(json::object& root) { return model(root)["merges"].as_array(); }
json::object& added(json::object& root, size_t i) {
  return root["added_tokens"].as_array()[i].as_object();
}

TEST(TokenizerJson, TheSmallOneIsAccepted) {
  const auto tokenizer = Tokenizer::from_json(changed([](auto&) {}), "t.json");
  ASSERT_TRUE(tokenizer) << tokenizer.error().message;
  EXPECT_EQ((*tokenizer)->encode("hello"), std::vector<int32_t>{259});
  EXPECT_EQ((*tokenizer)->vocab_size(), 263);
}

TEST(TokenizerJson, RefusesWithFieldAndValue) {
  const std::pair<Change, const char*> kCases[] = {
      {[](auto& r) { r.erase("model"); }, "t.json: model is missing"},
      {[](auto& r) { r["model"] = 3; }, "t.json: model is 3, expected an object"},
      {[](auto& r) { model(r)["type"] = "Unigram"; }, "model.type is \"Unigram\""},
      {[](auto& r) { model(r).erase("vocab"); }, "model.vocab is missing"},
      {[](auto& r) { model(r)["vocab"] = json::array(); }, "model.vocab is an array"},
      {[](auto& r) { model(r)["vocab"] = json::object(); }, "model.vocab is empty"},
      {[](auto& r) { vocab(r)["he"] = -1; }, "model.vocab[\"he\"] is -1, ids are 0 to 1048575"},
      {[](auto& r) { vocab(r)["he"] = 1 << 20; }, "model.vocab[\"he\"] is 1048576"},
      {[](auto& r) { vocab(r)["he"] = int64_t{1} << 40; }, "model.vocab[\"he\"] is 1099511627776"},
      {[](auto& r) { vocab(r)["he"] = 1.5; }, "model.vocab[\"he\"] is 1.5"},
      {[](auto& r) { vocab(r)["he"] = "5"; }, "model.vocab[\"he\"] is \"5\""},
      {[](auto& r) { vocab(r)["he"] = 257; }, "is 257, an id that another entry has"},
      {[](auto& r) { vocab(r).erase("a"); }, "no entry for the byte 0x61 (\"a\")"},
      {[](auto& r) { model(r).erase("merges"); }, "model.merges is missing"},
      {[](auto& r) { merges(r)[1] = "l l l"; }, "model.merges[1] is \"l l l\""},
      {[](auto& r) { merges(r)[1] = "ll"; }, "model.merges[1] is \"ll\", expected"},
      {[](auto& r) { merges(r)[1] = json::array({"l"}); }, "model.merges[1] is an array"},
      {[](auto& r) {
         merges(r)[1] = json::array({"l", 2});
       },
       "model.merges[1] is an array"},
      {[](auto& r) { merges(r)[1] = 7; }, "model.merges[1] is 7"},
      {[](auto& r) { merges(r)[1] = "l x"; },
       "model.merges[1] (\"l\" and \"x\"): \"lx\" is not in model.vocab"},
      {[](auto& r) { merges(r)[1] = "zz l"; }, "\"zz\" is not in model.vocab"},
      {[](auto& r) { merges(r)[1] = "｜ l"; }, "not written in byte-level characters"},
      {[](auto& r) { model(r)["dropout"] = 0.1; }, "model.dropout is 0.1"},
      {[](auto& r) { model(r)["byte_fallback"] = true; }, "model.byte_fallback is true"},
      {[](auto& r) { model(r)["end_of_word_suffix"] = "</w>"; },
       "model.end_of_word_suffix is \"</w>\""},
      {[](auto& r) {
         r["normalizer"] = {{"type", "NFC"}};
       },
       "normalizer has type \"NFC\""},
      {[](auto& r) {
         r["decoder"] = {{"type", "Metaspace"}};
       },
       "decoder.type is \"Metaspace\""},
      {[](auto& r) { r.erase("pre_tokenizer"); }, "pre_tokenizer is missing"},
      {[](auto& r) { r["pre_tokenizer"] = nullptr; }, "pre_tokenizer is null"},
      {[](auto& r) {
         r["pre_tokenizer"] = {{"type", "Metaspace"}};
       },
       "pre_tokenizer.type is \"Metaspace\""},
      {[](auto& r) { r["pre_tokenizer"].as_object()["add_prefix_space"] = true; },
       "pre_tokenizer.add_prefix_space is true"},
      {[](auto& r) {
         r["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Removed"}};
       },
       "pre_tokenizer.behavior is \"Removed\""},
      {[](auto& r) {
         r["pre_tokenizer"] = {{"type", "Digits"}};
       },
       "has no ByteLevel"},
      {[](auto& r) { r["added_tokens"] = 5; }, "added_tokens is 5"},
      {[](auto& r) { added(r, 0).erase("id"); }, "added_tokens[0].id is missing"},
      {[](auto& r) { added(r, 1)["id"] = 1 << 20; }, "added_tokens[1].id is 1048576"},
      {[](auto& r) { added(r, 1)["id"] = 65; }, "added_tokens[1].id is 65"},
      {[](auto& r) { added(r, 0)["id"] = 270; }, "model.vocab has 260 for it"},
      {[](auto& r) { added(r, 2)["id"] = 261; }, "contradicts an earlier added token"},
      {[](auto& r) { added(r, 1)["content"] = ""; }, "added_tokens[1].content has 0 bytes"},
      {[](auto& r) { added(r, 1)["content"] = std::string(5000, 'x'); }, "content has 5000 bytes"},
      {[](auto& r) { added(r, 1)["lstrip"] = true; }, "added_tokens[1].lstrip is true"},
      {[](auto& r) { added(r, 1)["single_word"] = 1; }, "added_tokens[1].single_word is 1"},
  };
  for (const auto& [change, sentence] : kCases) {
    const auto refused = Tokenizer::from_json(changed(change), "t.json");
    ASSERT_FALSE(refused) << sentence;
    EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
    EXPECT_TRUE(refused.error().message.starts_with("t.json: ")) << refused.error().message;
    EXPECT_NE(refused.error().message.find(sentence), std::string::npos)
        << refused.error().message << "\nexpected: " << sentence;
    EXPECT_EQ(refused.error().message.find('\n'), std::string::npos);
  }
}

TEST(TokenizerJson, EveryTruncationIsRefused) {
  const std::string text = changed([](auto&) {});
  for (size_t length = 0; length < text.size(); length += 1 + length % 7) {
    EXPECT_FALSE(Tokenizer::from_json(std::string_view(text).substr(0, length), "t.json"));
  }
}

TEST(TokenizerConfig, ReadsBothForms) {
  const auto objects = parse_tokenizer_config(
      R"({"bos_token": {"content": "<b>"}, "eos_token": "<e>", "add_bos_token": false,
          "tokenizer_class": "LlamaTokenizerFast", "chat_template": "T"})",
      "c.json");
  ASSERT_TRUE(objects);
  EXPECT_EQ(objects->bos_token, "<b>");
  EXPECT_EQ(objects->eos_token, "<e>");
  EXPECT_FALSE(objects->add_bos);
  EXPECT_EQ(objects->chat_template, "T");
  const auto lists = parse_tokenizer_config(
      R"({"bos_token": null, "tokenizer_class": "LlamaTokenizerFast", "chat_template":
          [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]})",
      "c.json");
  ASSERT_TRUE(lists);
  EXPECT_FALSE(lists->bos_token);
  EXPECT_TRUE(lists->add_bos);
  EXPECT_EQ(lists->chat_template, "D");
}

TEST(TokenizerConfig, RefusesWithFieldAndValue) {
  const std::pair<const char*, const char*> kCases[] = {
      {"[]", "c.json: is an array"},
      {R"({"bos_token": 5})", "c.json: bos_token is 5"},
      {R"({"bos_token": {}})", "c.json: bos_token.content is missing"},
      {R"({"add_bos_token": "yes"})", "c.json: add_bos_token is \"yes\""},
      {R"({"chat_template": 1})", "c.json: chat_template is 1"},
      {R"({"chat_template": [1]})", "c.json: chat_template holds 1"},
  };
  for (const auto& [text, sentence] : kCases) {
    const auto refused = parse_tokenizer_config(text, "c.json");
    ASSERT_FALSE(refused) << text;
    EXPECT_NE(refused.error().message.find(sentence), std::string::npos) << refused.error().message;
  }
}

}  // namespace
}  // namespace fathom
