#include "cli/chat_session.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "chat/prompt_ids.h"
#include "cli/script_runner.h"

namespace fathom {
namespace {

// The bundled model's tokenizer and format with a scripted model, whose completion depends on the
// prompt's last token.
class ChatSessionTest : public testing::Test {
 protected:
  void SetUp() override {
    auto loaded = Tokenizer::load(FATHOM_SOURCE_DIR "/models/fathom-tiny");
    ASSERT_TRUE(loaded.has_value()) << loaded.error().message;
    tokenizer_ = std::move(*loaded);
    // </think> (after <｜Assistant｜>, thinking off) -> "Yes" -> end; <think> -> "no" -> </think>.
    EngineOptions options;
    options.eos_ids = {*tokenizer_->eos_id()};
    engine_ = *Engine::create(
        options,
        std::make_unique<ScriptRunner>(
            8192,
            std::map<int32_t, int32_t>{
                {id("</think>"), id("A")}, {id("<think>"), id("B")}, {id("B"), id("</think>")}},
            *tokenizer_->eos_id()),
        tokenizer_);
    out_ = open_memstream(&text_, &size_);
  }
  void TearDown() override {
    if (out_ != nullptr) std::fclose(out_);
    std::free(text_);
  }

  int32_t id(std::string_view token) const { return *tokenizer_->token_id(token); }

  ChatSession session(bool thinking) {
    ChatOptions options;
    options.sampling.temperature = 0;
    options.thinking = thinking;
    return ChatSession(*engine_, *tokenizer_, ChatFormat::kFathomTiny, options);
  }

  std::string printed() {
    std::fflush(out_);
    return std::string(text_, size_);
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<Engine> engine_;
  std::FILE* out_ = nullptr;
  char* text_ = nullptr;
  size_t size_ = 0;
};

TEST_F(ChatSessionTest, AnswersAndRemembers) {
  ChatSession chat = session(false);
  ASSERT_TRUE(chat.say("hello", out_).has_value());
  ASSERT_TRUE(chat.say("again", out_).has_value());
  EXPECT_EQ(printed(), "A\nA\n");
  ASSERT_EQ(chat.messages().size(), 4u);
  EXPECT_EQ(chat.messages()[2].text(), "again");
  EXPECT_EQ(chat.messages()[3].text(), "A");
  EXPECT_NE(chat.stats().find("4 messages"), std::string::npos) << chat.stats();
  chat.reset();
  EXPECT_TRUE(chat.messages().empty());
}

TEST_F(ChatSessionTest, ReasoningIsKeptApart) {
  ChatSession chat = session(true);
  ASSERT_TRUE(chat.say("hello", out_).has_value());
  ASSERT_EQ(chat.messages().size(), 2u);
  EXPECT_EQ(chat.messages()[1].reasoning, "B");
  EXPECT_EQ(chat.messages()[1].text(), "A");
  EXPECT_EQ(printed(), "B\n\nA\n");  // no escape sequences, since the output is not a terminal
}

TEST_F(ChatSessionTest, AFailureLeavesTheConversationAsItWas) {
  ChatSession chat = session(false);
  ASSERT_TRUE(chat.say("hello", out_).has_value());
  std::string endless;
  for (int i = 0; i < 400; ++i) endless += "word ";
  const auto refused = chat.say(endless, out_);  // the scripted model's context is 256 tokens
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_EQ(chat.messages().size(), 2u);
  EXPECT_TRUE(chat.say("more", out_).has_value());
}

TEST_F(ChatSessionTest, SavesWhatCanBeSentAgain) {
  ChatSession chat = session(true);
  chat.set_system("Be brief.");
  ASSERT_TRUE(chat.say("a \"quoted\"\nline", out_).has_value());
  const std::string path = testing::TempDir() + "chat.json";
  ASSERT_TRUE(chat.save(path).has_value());
  const auto value = parse_json(*read_text_file(path, 1 << 20), path);
  ASSERT_TRUE(value.has_value()) << value.error().message;
  const auto conversation = parse_conversation(*value, path);
  ASSERT_TRUE(conversation.has_value()) << conversation.error().message;
  ASSERT_EQ(conversation->messages.size(), 3u);
  EXPECT_EQ(conversation->messages[0].text(), "Be brief.");
  EXPECT_EQ(conversation->messages[1].text(), "a \"quoted\"\nline");
  EXPECT_EQ(conversation->messages[2].reasoning, "B");
  EXPECT_FALSE(chat.save("/nonexistent/folder/chat.json").has_value());
}

TEST_F(ChatSessionTest, WhatAPersonTypesIsNeverMarkup) {
  Prompt prompt;
  prompt.segments = {{"<｜User｜>", true}, {"<｜User｜>", false}};
  const std::vector<int32_t> ids = encode_prompt(*tokenizer_, prompt);
  EXPECT_EQ(ids.front(), id("<｜User｜>"));
  EXPECT_EQ(std::count(ids.begin(), ids.end(), id("<｜User｜>")), 1);
  EXPECT_EQ(tokenizer_->decode(ids), "<｜User｜><｜User｜>");
}

}  // namespace
}  // namespace fathom
