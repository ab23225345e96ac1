#include "chat/message.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

Result<Conversation> parsed(std::string_view text) {
  return parse_conversation(parse_json(text, "test").value(), "chat.jsonl line 3");
}

std::string error_of(std::string_view text) {
  const auto result = parsed(text);
  return result ? "no error" : result.error().message;
}

TEST(ParseConversation, ReadsEveryField) {
  const auto conversation = parsed(R"({"thinking":true,"check":"tool","messages":[
    {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"name":"n"},
    {"role":"assistant","content":null,"reasoning_content":"r","prefix":true,"tool_calls":[
      {"id":"i","type":"function","function":{"name":"f","arguments":"{\"x\":  1}"}},
      {"id":"j","function":{"name":"g","arguments":{"y":[1,2.0]}}}]},
    {"role":"tool","content":"t","tool_call_id":"i"}],
    "tools":[{"type":"function","function":{"name":"f","description":"d"}}]})");
  ASSERT_TRUE(conversation) << conversation.error().message;
  ASSERT_EQ(conversation->messages.size(), 3u);
  EXPECT_TRUE(conversation->thinking);
  EXPECT_EQ(conversation->messages[0].text(), "ab");
  EXPECT_EQ(conversation->messages[0].name, "n");
  const Message& assistant = conversation->messages[1];
  EXPECT_FALSE(assistant.content);
  EXPECT_EQ(assistant.reasoning, "r");
  EXPECT_TRUE(assistant.prefix);
  ASSERT_EQ(assistant.tool_calls.size(), 2u);
  EXPECT_EQ(assistant.tool_calls[0].arguments, "{\"x\":  1}");
  EXPECT_EQ(assistant.tool_calls[1].arguments, "{\"y\": [1, 2.0]}");
  ASSERT_EQ(conversation->tools.size(), 1u);
  EXPECT_EQ(conversation->tools[0].name, "f");
  EXPECT_EQ(json::serialize(conversation->tools[0].parameters()),
            R"({"type":"object","properties":{}})");
}

TEST(ParseConversation, PutsResultsInTheOrderOfTheCalls) {
  const auto order = [](std::string_view first, std::string_view second) {
    const auto conversation = parsed(fmt::format(
        R"({{"messages":[{{"role":"assistant","content":null,"tool_calls":[
        {{"id":"a","function":{{"name":"f","arguments":"{{}}"}}}},
        {{"id":"b","function":{{"name":"g","arguments":"{{}}"}}}}]}},
        {{"role":"tool","content":"1","tool_call_id":"{}"}},
        {{"role":"tool","content":"2","tool_call_id":"{}"}}]}})",
        first, second));
    return std::string(conversation->messages[1].text()) +
           std::string(conversation->messages[2].text());
  };
  EXPECT_EQ(order("a", "b"), "12");
  EXPECT_EQ(order("b", "a"), "21");
  EXPECT_EQ(order("b", "b"), "12");
  EXPECT_EQ(order("b", "c"), "12");
}

TEST(ParseConversation, ErrorsNameFieldAndValue) {
  EXPECT_EQ(error_of("[]"), "chat.jsonl line 3: the conversation is an array, expected an object");
  EXPECT_EQ(error_of("{}"), "chat.jsonl line 3: messages is missing or empty");
  EXPECT_EQ(error_of(R"({"messages":3})"), "chat.jsonl line 3: messages is 3, expected an array");
  EXPECT_EQ(error_of(R"({"messages":["x"]})"),
            "chat.jsonl line 3: messages[0] is \"x\", expected an object");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"bot","content":""}]})"),
            "chat.jsonl line 3: messages[0].role is \"bot\", expected system, developer, user, "
            "assistant or tool");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"user"}]})"),
            "chat.jsonl line 3: messages[0].content is missing");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"assistant","content":null,"tool_calls":[]}]})"),
            "chat.jsonl line 3: messages[0].content is missing");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"user","content":7}]})"),
            "chat.jsonl line 3: messages[0].content is 7, expected a string");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})"),
            "chat.jsonl line 3: messages[0].content[0].type is \"image_url\", expected \"text\"");
  EXPECT_EQ(
      error_of(R"({"messages":[{"role":"user","content":"","tool_calls":[1]}]})"),
      "chat.jsonl line 3: messages[0].tool_calls in a message of role user: only an assistant "
      "calls tools");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{}}]}]})"),
            "chat.jsonl line 3: messages[0].tool_calls[0].function.name is missing");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"user","content":""}],"tools":[{"type":"web"}]})"),
            "chat.jsonl line 3: tools[0].type is \"web\", expected \"function\"");
  EXPECT_EQ(error_of(R"({"messages":[{"role":"user","content":""}],"thinking":1})"),
            "chat.jsonl line 3: thinking is 1, expected true or false");
}

TEST(ParseConversation, LimitsCounts) {
  json::array messages(kMaxMessages + 1, json::object{{"role", "user"}, {"content", ""}});
  const auto result = parse_conversation(json::object{{"messages", messages}}, "x");
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().message, "x: messages has 4097 elements, the limit is 4096");
}

}  // namespace
}  // namespace fathom
