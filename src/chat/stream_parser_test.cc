#include "chat/stream_parser.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/random.h"
#include "base/utf8.h"
#include "chat/stream_test_case.h"

namespace fathom {
namespace {

// GLM's format does not say what is a string; the tool's schema does.
TEST(StreamParser, GlmArgumentsAreStringsWhereTheToolSaysSo) {
  const Tool tool = make_tool("f", "",
                              parse_json(R"({"type": "object", "properties":
      {"id": {"type": "string"}, "n": {"type": "integer"}}})",
                                         "test")
                                  .value());
  StreamParser parser(ChatFormat::kGlm47, false, true, false, {&tool, 1});
  ParsedAnswer answer;
  answer.add(
      parser.push("<tool_call>f<arg_key>id</arg_key><arg_value>42</arg_value>"
                  "<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>"
                  "<tool_call>g<arg_key>id</arg_key><arg_value>7</arg_value></tool_call>"));
  answer.add(parser.finish());
  ASSERT_EQ(answer.tool_calls.size(), 2u);
  EXPECT_EQ(answer.tool_calls[0].arguments, R"({"id": "42", "n": 7})");
  EXPECT_EQ(answer.tool_calls[1].arguments, R"({"id": 7})");
}

// Random sequences of markers, partial markers and words.
TEST(StreamParser, RandomTextsDoNotDependOnCuts) {
  const std::string kWords[] = {kBlock,
                                kBlockEnd,
                                kCall,
                                kCallEnd,
                                kSep,
                                kDsml,
                                kDsmlEnd,
                                "\n",
                                "\n```",
                                "```json",
                                "f",
                                "{\"a\":1}",
                                "</think>",
                                "<think>",
                                "function",
                                kInvokeEnd,
                                kSection,
                                kSectionEnd,
                                "é",
                                " ",
                                "<｜",
                                "\">",
                                "```",
                                "<|tool_call_begin|>",
                                "<｜DSML｜invoke name=\"",
                                "<|tool_call_argument_begin|>",
                                "<｜DSML｜parameter name=\"",
                                "</｜DSML｜parameter>",
                                "\" string=\"true",
                                "<|tool_call_end|>",
                                "<tool_call>",
                                "</tool_call>",
                                "<arg_key>",
                                "</arg_key>",
                                "<arg_value>",
                                "</arg_value>"};
  constexpr uint64_t kSeed = 7;
  uint64_t draw = 0;
  const auto pick = [&](uint64_t below) { return random_bits(kSeed, 1, draw++) % below; };
  for (int round = 0; round < 3000; ++round) {
    Case item;
    item.format = static_cast<ChatFormat>(pick(14));
    item.opens_reasoning = pick(4) == 0;
    for (uint64_t words = pick(16); words > 0; --words) {
      std::string word = kWords[pick(std::size(kWords))];
      if (pick(6) == 0) word.resize(pick(word.size() + 1));
      item.text += word;
    }
    std::vector<size_t> cuts;
    for (uint64_t count = pick(6); count > 0; --count) cuts.push_back(pick(item.text.size() + 1));
    std::sort(cuts.begin(), cuts.end());
    ASSERT_EQ(shown(parsed_in_pieces(item, cuts)),
              shown(parse_answer(item.format, item.opens_reasoning, true, item.text)))
        << chat_format_name(item.format) << ": " << item.text;
  }
}

TEST(StreamParser, WithoutToolsMarkersAreContent) {
  const std::string text = "a</think>" + kBlock + v31_call("f", "{}") + kBlockEnd;
  const auto answer = parse_answer(ChatFormat::kV31, true, false, text);
  EXPECT_EQ(answer.reasoning, "a");
  EXPECT_EQ(answer.content, kBlock + v31_call("f", "{}") + kBlockEnd);
  EXPECT_TRUE(answer.tool_calls.empty());
}

// Output cut at any byte contains no markup: its text and calls are prefixes of those of the whole
// output.
TEST(StreamParser, AnswersThatAreCutShowNoMarkup) {
  const std::pair<ChatFormat, std::string_view> kAnswers[] = {
      {ChatFormat::kV31,
       "so</think>Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_it<｜tool▁sep｜>{\"a\": 1}"
       "<｜tool▁call▁end｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
       "<｜tool▁calls▁end｜>"},
      {ChatFormat::kR1,
       "so</think>Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_it\n"
       "```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
       "other\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {ChatFormat::kKimiK2Thinking,
       "so</think>Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_it:0"
       "<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_call_begin|>"
       "functions.other:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
       "<|tool_calls_section_end|>"},
      {ChatFormat::kV32,
       "so</think>Yes.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_it\">\n"
       "<｜DSML｜parameter name=\"a\" string=\"true\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
       "<｜DSML｜invoke name=\"other\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"},
      {ChatFormat::kGlm47,
       "so</think>Yes.\n<tool_call>get_it<arg_key>a</arg_key><arg_value>1</arg_value>"
       "<arg_key>b</arg_key>\n<arg_value>x</arg_value></tool_call>\n<tool_call>other</tool_call>"},
      {ChatFormat::kGigachat3,
       "so</think>Yes.<|message_sep|>\n\nfunction call<|role_sep|>\n"
       "{\"name\": \"get_it\", \"arguments\": {\"a\": 1}}"},
      {ChatFormat::kGigachat31,
       "so</think>Yes.<|function_call|>{\"name\": \"get_it\", \"arguments\": {\"a\": 1}}"
       "<|message_sep|>"}};
  for (const auto& [format, text] : kAnswers) {
    for (size_t length = 0; length <= text.size(); ++length) {
      if (complete_utf8_prefix(text.substr(0, length)) != length) continue;
      StreamParser parser(format, /*opens_reasoning=*/true, /*expect_tools=*/true);
      ParsedAnswer answer;
      answer.add(parser.push(text.substr(0, length)));
      answer.add(parser.finish(/*is_cut=*/true));
      // Up to three bytes may be text as well: a "<", the newlines before a block.
      std::string content = answer.content;
      while (!content.empty() && (content.back() == '<' || content.back() == '\n')) {
        content.pop_back();
      }
      EXPECT_TRUE(std::string_view("Yes.").starts_with(content))
          << chat_format_name(format) << " cut at " << length << ": " << answer.content;
      EXPECT_LE(answer.content.size() - content.size(), 3u);
      for (const ToolCall& call : answer.tool_calls) {
        EXPECT_TRUE(call.name == "get_it" || call.name == "other") << call.name;
        for (const char* marker : {"｜", "|", "<t", "<a", "</"}) {
          EXPECT_EQ(call.arguments.find(marker), std::string::npos)
              << chat_format_name(format) << " cut at " << length << ": " << call.arguments;
        }
      }
    }
  }
}

TEST(StreamParser, SendsTextAndArgumentsAsTheyArrive) {
  StreamParser parser(ChatFormat::kV31, true, true);
  EXPECT_EQ(parser.push("so").reasoning, "so");
  EXPECT_EQ(parser.push(" it</").reasoning, " it");
  EXPECT_EQ(parser.push("think>Hel").content, "Hel");
  EXPECT_EQ(parser.push("lo" + kBlock + kCall + "f" + kSep).content, "lo");
  auto delta = parser.push("{\"a\"");
  ASSERT_EQ(delta.tool_calls.size(), 1u);
  EXPECT_EQ(delta.tool_calls[0].arguments, "{\"a\"");
  EXPECT_EQ(delta.tool_calls[0].name, "");
  delta = parser.push(": 1}" + kCallEnd);
  ASSERT_EQ(delta.tool_calls.size(), 1u);
  EXPECT_EQ(delta.tool_calls[0].arguments, ": 1}");
  EXPECT_TRUE(parser.push(kBlockEnd).empty());
  EXPECT_TRUE(parser.finish().empty());
}

TEST(StreamParser, TheV32EncodersParseVectors) {
  const std::string path = FATHOM_SOURCE_DIR "/tests/data/chat/deepseek-v3.2.encoding_vectors.json";
  const auto vectors = parse_json(read_text_file(path, 1 << 20).value(), path).value();
  for (const json::value& vector : vectors.at("parse").as_array()) {
    std::string text(vector.at("text").as_string());
    const std::string eos = "<｜end▁of▁sentence｜>";
    ASSERT_TRUE(text.ends_with(eos));
    text.resize(text.size() - eos.size());  // the stop token is not part of the text
    const json::value& wanted = vector.at("parsed");
    const auto answer =
        parse_answer(ChatFormat::kV32, vector.at("thinking_mode") == "thinking", true, text);
    EXPECT_EQ(answer.content, std::string(wanted.at("content").as_string()));
    EXPECT_EQ(answer.reasoning, std::string(wanted.at("reasoning_content").as_string()));
    const json::array& calls = wanted.at("tool_calls").as_array();
    ASSERT_EQ(answer.tool_calls.size(), calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      const json::value& function = calls[i].at("function");
      EXPECT_EQ(answer.tool_calls[i].name, std::string(function.at("name").as_string()));
      EXPECT_EQ(answer.tool_calls[i].arguments, std::string(function.at("arguments").as_string()));
    }
  }
}

// Parsing a long text in single bytes takes linear time: each case would take minutes if a piece
// cost as much as all text before it.
TEST(StreamParser, LongAnswersInSmallPieces) {
  const std::string spaces(1 << 19, '\n');
  const std::string call = kBlock + kCall + "function" + kSep + "f\n```json\n{";
  const std::pair<ChatFormat, std::string> kTexts[] = {
      {ChatFormat::kR1, "a" + spaces + "</think>"},
      {ChatFormat::kV3, call + spaces + "}\n```"},
      {ChatFormat::kV3, kBlock + spaces},
      {ChatFormat::kV32, kDsml + dsml_open("f") + dsml_value("a", "false", spaces)},
      {ChatFormat::kV31, kBlock + kCall + spaces},
  };
  for (const auto& [format, text] : kTexts) {
    StreamParser parser(format, format == ChatFormat::kR1, true);
    size_t bytes = 0;
    const auto count = [&](const StreamDelta& delta) {
      bytes += delta.reasoning.size() + delta.content.size();
      for (const auto& part : delta.tool_calls) bytes += part.arguments.size();
    };
    for (size_t i = 0; i < text.size(); ++i)
      count(parser.push(std::string_view(text).substr(i, 1)));
    count(parser.finish());
    EXPECT_GT(bytes, 0u);
  }
}

}  // namespace
}  // namespace fathom
