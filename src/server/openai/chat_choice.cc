#include "server/openai/chat_choice.h"

#include <iterator>
#include <string>
#include <variant>

namespace fathom {

ChatChoice::ChatChoice(const ReplySpec& spec, size_t choice)
    : spec_(spec),
      choice_(choice),
      parser_(*spec.served->chat_format,
              spec.prompts[choice / static_cast<size_t>(spec.n)].opens_reasoning, spec.expect_tools,
              spec.prompts[choice / static_cast<size_t>(spec.n)].continues_answer, spec.tools) {}

StreamDelta ChatChoice::advance(const Event& event) {
  StreamDelta delta = parser_.push(event.text);
  if (event.finish) {
    const bool is_whole = event.finish == FinishReason::kStop &&
                          !std::holds_alternative<std::string>(event.matched_stop);
    StreamDelta rest = parser_.finish(!is_whole);
    delta.reasoning += rest.reasoning;
    delta.content += rest.content;
    std::move(rest.tool_calls.begin(), rest.tool_calls.end(), std::back_inserter(delta.tool_calls));
  }
  if (!delta.tool_calls.empty()) adjust_calls(delta);
  return delta;
}

void ChatChoice::adjust_calls(StreamDelta& delta) const {
  if (!spec_.parallel_calls) {
    std::erase_if(delta.tool_calls, [](const ToolCallDelta& call) { return call.index > 0; });
  }
  for (ToolCallDelta& call : delta.tool_calls) {
    if (call.name.empty() || !call.id.empty()) continue;
    const uint64_t number =
        (static_cast<uint64_t>(choice_) << 32) + 1 + static_cast<uint64_t>(call.index);
    call.id = spec_.identity.make_id("call_", number);
  }
}

std::string_view ChatChoice::finish_reason(FinishReason reason) const {
  return reason == FinishReason::kStop && saw_tool_calls() ? "tool_calls" : name_of(reason);
}

}  // namespace fathom
