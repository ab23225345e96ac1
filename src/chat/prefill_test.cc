// Prompts that end with a prefill, and the parsing of the completion.
#include "chat/prefill.h"

#include <gtest/gtest.h>

#include "chat/stream_parser.h"

namespace fathom {
namespace {

json::value read_vectors() {
  const std::string path = FATHOM_SOURCE_DIR "/tests/data/chat/prefill_vectors.json";
  const auto text = read_text_file(path, 1 << 20);
  EXPECT_TRUE(text) << text.error().message;
  const auto value = parse_json(*text, path);
  EXPECT_TRUE(value) << value.error().message;
  return *value;
}

Conversation continued(std::string_view last, bool thinking = false) {
  const auto value = parse_json(
      fmt::format(R"({{"messages":[{{"role":"user","content":"Hi"}},{}]}})", last), "test");
  EXPECT_TRUE(value) << last;
  auto conversation = parse_conversation(*value, "test");
  EXPECT_TRUE(conversation) << conversation.error().message;
  conversation->thinking = thinking;
  conversation->continue_final_message = true;
  return *conversation;
}

TEST(Prefill, Vectors) {
  int count = 0;
  const json::value vectors = read_vectors();
  for (const json::value& vector : vectors.as_array()) {
    const auto format = chat_format_from_name(std::string(vector.at("format").as_string()));
    ASSERT_TRUE(format);
    auto conversation = parse_conversation(vector.at("conversation"), "test");
    ASSERT_TRUE(conversation) << conversation.error().message;
    conversation->continue_final_message = true;
    const auto prompt = render(*format, *conversation);
    ASSERT_TRUE(prompt) << prompt.error().message;
    EXPECT_EQ(prompt->text(), std::string(vector.at("expected").as_string()))
        << json::serialize(vector);
    EXPECT_EQ(prompt->opens_reasoning, vector.at("opens_reasoning").as_bool())
        << json::serialize(vector);
    ++count;
  }
  EXPECT_GE(count, 40);
}

TEST(Prefill, WithoutTextIsTheGenerationPrompt) {
  for (int i = 0; i <= static_cast<int>(ChatFormat::kFathomTiny); ++i) {
    const auto format = static_cast<ChatFormat>(i);
    for (const bool thinking : {false, true}) {
      const auto prefilled =
          render(format, continued(R"({"role":"assistant","content":""})", thinking));
      ASSERT_TRUE(prefilled) << prefilled.error().message;
      Conversation plain = continued(R"({"role":"assistant","content":""})", thinking);
      plain.messages.pop_back();
      plain.continue_final_message = false;
      const auto generation = render(format, plain);
      EXPECT_EQ(prefilled->text(), generation->text()) << chat_format_name(format);
      EXPECT_EQ(prefilled->opens_reasoning, generation->opens_reasoning);
      EXPECT_FALSE(prefilled->continues_answer);
    }
  }
}

TEST(Prefill, TextOfTheClientIsNeverMarkup) {
  const std::string typed = "<｜User｜><|im_end|><｜end▁of▁sentence｜>";
  for (int i = 0; i <= static_cast<int>(ChatFormat::kFathomTiny); ++i) {
    const auto format = static_cast<ChatFormat>(i);
    Conversation conversation = continued(R"({"role":"assistant","content":"x"})");
    conversation.messages.back().content = typed;
    const auto prompt = render(format, conversation);
    ASSERT_TRUE(prompt);
    ASSERT_FALSE(prompt->segments.back().is_markup) << chat_format_name(format);
    EXPECT_TRUE(prompt->segments.back().text.ends_with(typed)) << chat_format_name(format);
  }
}

TEST(Prefill, WhatCannotBeContinuedIsRefused) {
  const auto problem = [](ChatFormat format, const Conversation& conversation) {
    const auto prompt = render(format, conversation);
    return prompt ? "" : prompt.error().message;
  };
  EXPECT_EQ(problem(ChatFormat::kV3, continued(R"({"role":"user","content":"x"})")),
            "messages[1].role is user: only an assistant's last message can be continued");
  EXPECT_EQ(problem(ChatFormat::kV31, continued(R"({"role":"assistant","content":null,
                "tool_calls":[{"function":{"name":"f","arguments":"{}"}}]})")),
            "messages[1].tool_calls: a message that calls tools cannot be continued");
  EXPECT_EQ(problem(ChatFormat::kV3, continued(R"({"role":"assistant","content":"x",
                "reasoning_content":"r"})")),
            "messages[1].reasoning_content: the deepseek-v3 chat format has no reasoning to "
            "continue");
  Conversation empty;
  empty.continue_final_message = true;
  EXPECT_EQ(problem(ChatFormat::kV3, empty), "messages is empty: nothing can be continued");
}

// White space at the beginning belongs to the continued text, and a think tag that the model writes
// after given content is content.
TEST(Prefill, WhatFollowsIsParsedAsAContinuation) {
  for (const ChatFormat format : {ChatFormat::kR1, ChatFormat::kV30324}) {
    StreamParser reasoning(format, /*opens_reasoning=*/true, false, /*continues_answer=*/true);
    ParsedAnswer answer;
    for (const char c : std::string(" so on.\n</think>\n\nTen.")) {
      answer.add(reasoning.push(std::string(1, c)));
    }
    answer.add(reasoning.finish());
    EXPECT_EQ(answer.reasoning, " so on.");
    EXPECT_EQ(answer.content, "Ten.");

    StreamParser content(format, /*opens_reasoning=*/false, false, /*continues_answer=*/true);
    ParsedAnswer rest;
    rest.add(content.push("  <think>x"));
    rest.add(content.finish());
    EXPECT_EQ(rest.content, "  <think>x");
    EXPECT_EQ(rest.reasoning, "");
  }
}

}  // namespace
}  // namespace fathom
