#include "chat/prefill.h"

#include "chat/marker_scan.h"
#include "chat/think_tags.h"

namespace fathom {

bool format_reasons(ChatFormat format) {
  switch (format) {
    case ChatFormat::kV2:
    case ChatFormat::kV25:
    case ChatFormat::kV3:
    case ChatFormat::kKimiK2:
    case ChatFormat::kMoonlight:
    case ChatFormat::kGigachat3:
    case ChatFormat::kGigachat31:
      return false;
    case ChatFormat::kV30324:
    case ChatFormat::kR1:
    case ChatFormat::kV31:
    case ChatFormat::kV32:
    case ChatFormat::kKimiK2Thinking:
    case ChatFormat::kKimiK25:
    case ChatFormat::kGlm47:
    case ChatFormat::kGlm5:
    case ChatFormat::kGlm52:
    case ChatFormat::kFathomTiny:
      return true;
  }
  return false;
}

Prefill read_prefill(const Message& message, bool reasons) {
  Prefill prefill;
  prefill.reasoning = message.reasoning;
  prefill.content = message.text();
  bool closed = !prefill.content.empty();
  if (reasons && prefill.reasoning.empty()) {
    std::string_view rest = prefill.content;
    rest.remove_prefix(leading_space(rest));
    const bool opened = rest.starts_with(kThinkOpen);
    if (opened) rest.remove_prefix(kThinkOpen.size());
    const size_t end = rest.find(kThinkClose);
    if (opened || end != std::string_view::npos) {
      closed = end != std::string_view::npos;
      prefill.reasoning = rest.substr(0, end);
      prefill.content = closed ? rest.substr(end + kThinkClose.size()) : std::string_view();
    }
  }
  if (closed) {
    prefill.stage = Prefill::Stage::kContent;
  } else if (!prefill.reasoning.empty()) {
    prefill.stage = Prefill::Stage::kReasoning;
  }
  return prefill;
}

Result<> check_prefill(const Conversation& conversation, ChatFormat format) {
  if (conversation.messages.empty()) return invalid("messages is empty: nothing can be continued");
  const Message& last = conversation.messages.back();
  const size_t index = conversation.messages.size() - 1;
  if (last.role != Role::kAssistant) {
    return invalid("messages[{}].role is {}: only an assistant's last message can be continued",
                   index, role_name(last.role));
  }
  if (!last.tool_calls.empty()) {
    return invalid("messages[{}].tool_calls: a message that calls tools cannot be continued",
                   index);
  }
  if (!last.reasoning.empty() && !format_reasons(format)) {
    return invalid(
        "messages[{}].reasoning_content: the {} chat format has no reasoning to continue", index,
        chat_format_name(format));
  }
  return {};
}

void write_prefill(PromptWriter& writer, const Prefill& prefill, const ThinkTags& tags,
                   bool is_open) {
  const bool reasoned = !prefill.reasoning.empty();
  if (reasoned && !is_open) writer.fixed(tags.open);
  writer.text(prefill.reasoning);
  if (prefill.stage != Prefill::Stage::kContent) return;
  if (reasoned || is_open) writer.fixed(tags.close);
  writer.text(prefill.content);
}

}  // namespace fathom
