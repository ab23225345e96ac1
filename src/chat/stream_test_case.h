// Shared by the stream parsers' tests: markers, and parsing a text in pieces.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/utf8.h"
#include "chat/stream_parser.h"

namespace fathom {

struct Call {
  std::string name;
  std::string arguments;
  std::string id = "";
};

struct Case {
  const char* what;
  ChatFormat format;
  bool opens_reasoning;
  std::string text;
  std::string reasoning;
  std::string content;
  std::vector<Call> calls = {};
};

inline void PrintTo(const Case& item, std::ostream* out) { *out << item.what; }

inline const std::string kBlock = "<｜tool▁calls▁begin｜>";
inline const std::string kBlockEnd = "<｜tool▁calls▁end｜>";
inline const std::string kCall = "<｜tool▁call▁begin｜>";
inline const std::string kCallEnd = "<｜tool▁call▁end｜>";
inline const std::string kSep = "<｜tool▁sep｜>";

inline std::string v3_call(const std::string& name, const std::string& arguments) {
  return kCall + "function" + kSep + name + "\n```json\n" + arguments + "\n```" + kCallEnd;
}
inline std::string v31_call(const std::string& name, const std::string& arguments) {
  return kCall + name + kSep + arguments + kCallEnd;
}

inline const std::string kDsml = "<｜DSML｜function_calls>";
inline const std::string kDsmlEnd = "</｜DSML｜function_calls>";
inline std::string dsml_open(const std::string& name) {
  return "<｜DSML｜invoke name=\"" + name + "\">\n";
}
inline const std::string kInvokeEnd = "</｜DSML｜invoke>\n";
inline std::string dsml_value(const std::string& name, const std::string& is_string,
                              const std::string& value) {
  return "<｜DSML｜parameter name=\"" + name + "\" string=\"" + is_string + "\">" + value +
         "</｜DSML｜parameter>\n";
}

inline const std::string kSection = "<|tool_calls_section_begin|>";
inline const std::string kSectionEnd = "<|tool_calls_section_end|>";
inline std::string kimi_call(const std::string& id, const std::string& arguments) {
  return "<|tool_call_begin|>" + id + "<|tool_call_argument_begin|>" + arguments +
         "<|tool_call_end|>";
}

inline std::string shown(const ParsedAnswer& answer) {
  std::string text = "reasoning=" + answer.reasoning + "|content=" + answer.content;
  for (const ToolCall& call : answer.tool_calls) {
    text += "|" + call.name + "(" + call.arguments + ")#" + call.id;
  }
  return text;
}

inline void expect_delta_is_whole(const StreamDelta& delta, bool input_is_utf8) {
  if (!input_is_utf8) return;
  EXPECT_TRUE(is_valid_utf8(delta.reasoning));
  EXPECT_TRUE(is_valid_utf8(delta.content));
  for (const ToolCallDelta& call : delta.tool_calls) {
    EXPECT_TRUE(is_valid_utf8(call.name) && is_valid_utf8(call.arguments));
  }
}

inline ParsedAnswer parsed_in_pieces(const Case& item, const std::vector<size_t>& cuts) {
  StreamParser parser(item.format, item.opens_reasoning, true);
  ParsedAnswer answer;
  const bool is_utf8 = is_valid_utf8(item.text);
  size_t begin = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const size_t end = i < cuts.size() ? cuts[i] : item.text.size();
    const StreamDelta delta = parser.push(std::string_view(item.text).substr(begin, end - begin));
    expect_delta_is_whole(delta, is_utf8);
    answer.add(delta);
    begin = end;
  }
  const StreamDelta delta = parser.finish();
  expect_delta_is_whole(delta, is_utf8);
  answer.add(delta);
  EXPECT_EQ(parser.saw_tool_calls(), !answer.tool_calls.empty());
  return answer;
}

}  // namespace fathom
