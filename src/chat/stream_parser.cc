#include "chat/stream_parser.h"

#include <utility>

#include "base/utf8.h"
#include "chat/reasoning.h"
#include "chat/tool_calls.h"

namespace fathom {
namespace {

constexpr CallMarkers deepseek_markers(CallMarkers::Header header) {
  return {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
          "<｜tool▁call▁end｜>",    "<｜tool▁calls▁end｜>",  header};
}

constexpr CallMarkers kKimiMarkers = {"<|tool_calls_section_begin|>", "<|tool_call_begin|>",
                                      "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                                      "<|tool_calls_section_end|>",   CallMarkers::Header::kKimiId};

ReasoningRules reasoning_rules(ChatFormat format, bool opens_reasoning, bool continues) {
  const bool trims = format == ChatFormat::kR1 || format == ChatFormat::kV30324;
  return {.starts_inside = opens_reasoning,
          .may_open = trims || format == ChatFormat::kKimiK2Thinking,
          .trims = trims,
          .continues = continues};
}

std::unique_ptr<ToolCallStage> make_stage(ChatFormat format, bool expect_tools,
                                          std::span<const Tool> tools) {
  if (format == ChatFormat::kGigachat3 || format == ChatFormat::kGigachat31) {
    return make_gigachat_stage(expect_tools);
  }
  if (!expect_tools) return make_content_only_stage();
  switch (format) {
    case ChatFormat::kV2:
    case ChatFormat::kMoonlight:
    case ChatFormat::kGigachat3:
    case ChatFormat::kGigachat31:
      return make_content_only_stage();
    case ChatFormat::kV25:
    case ChatFormat::kV3:
    case ChatFormat::kV30324:
    case ChatFormat::kR1:
      return make_marked_call_stage(deepseek_markers(CallMarkers::Header::kTypeThenFence));
    case ChatFormat::kV31:
    case ChatFormat::kFathomTiny:
      return make_marked_call_stage(deepseek_markers(CallMarkers::Header::kName));
    case ChatFormat::kKimiK2:
    case ChatFormat::kKimiK2Thinking:
    case ChatFormat::kKimiK25:
      return make_marked_call_stage(kKimiMarkers);
    case ChatFormat::kV32:
      return make_dsml_stage();
    case ChatFormat::kGlm47:
    case ChatFormat::kGlm5:
    case ChatFormat::kGlm52:
      return make_glm_stage(tools);
  }
  return make_content_only_stage();
}

}  // namespace

StreamParser::StreamParser(ChatFormat format, bool opens_reasoning, bool expect_tools,
                           bool continues_answer, std::span<const Tool> tools)
    : reasoning_(std::make_unique<ReasoningSplitter>(
          reasoning_rules(format, opens_reasoning, continues_answer))),
      calls_(make_stage(format, expect_tools, tools)) {}
StreamParser::~StreamParser() = default;
StreamParser::StreamParser(StreamParser&&) noexcept = default;
StreamParser& StreamParser::operator=(StreamParser&&) noexcept = default;

StreamDelta StreamParser::push(std::string_view text) {
  if (incomplete_.empty()) {
    const size_t whole = complete_utf8_prefix(text);
    incomplete_ = text.substr(whole);
    return advance(text.substr(0, whole), TextEnd::kOpen);
  }
  std::string joined = std::move(incomplete_);
  joined += text;
  const size_t whole = complete_utf8_prefix(joined);
  incomplete_ = joined.substr(whole);
  return advance(std::string_view(joined).substr(0, whole), TextEnd::kOpen);
}

StreamDelta StreamParser::finish(bool is_cut) {
  return advance(std::exchange(incomplete_, {}), is_cut ? TextEnd::kCut : TextEnd::kWhole);
}

StreamDelta StreamParser::advance(std::string_view text, TextEnd end) {
  StreamDelta delta;
  reasoning_->consume(text, end, delta, calls_->pending());
  calls_->consume(end, delta);
  return delta;
}

bool StreamParser::saw_tool_calls() const { return calls_->saw_calls(); }

void ParsedAnswer::add(const StreamDelta& delta) {
  reasoning += delta.reasoning;
  content += delta.content;
  for (const ToolCallDelta& part : delta.tool_calls) {
    if (static_cast<size_t>(part.index) == tool_calls.size()) {
      tool_calls.push_back({part.id, part.name, std::string()});
    }
    tool_calls[static_cast<size_t>(part.index)].arguments += part.arguments;
  }
}

ParsedAnswer parse_answer(ChatFormat format, bool opens_reasoning, bool expect_tools,
                          std::string_view text) {
  StreamParser parser(format, opens_reasoning, expect_tools);
  ParsedAnswer answer;
  answer.add(parser.push(text));
  answer.add(parser.finish());
  return answer;
}

}  // namespace fathom
