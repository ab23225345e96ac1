// V2, V2-Lite-Chat, Coder-V2-Instruct: roles are plain words. There is no space after the last
// "Assistant:": the model generates it, and Coder-V2 switches language if it is given
// (DeepSeek-Coder-V2 issue 12).
#include "chat/encoders.h"

namespace fathom {

Result<Prompt> encode_v2(const Conversation& conversation) {
  if (!conversation.tools.empty()) {
    return invalid("tools: the deepseek-v2 chat format cannot declare tools");
  }
  PromptWriter writer;
  writer.fixed(kBos);
  for (size_t i = 0; i < conversation.messages.size(); ++i) {
    const Message& message = conversation.messages[i];
    if (message.role == Role::kTool || !message.tool_calls.empty()) {
      return invalid("messages[{}]: the deepseek-v2 chat format has no tool calls", i);
    }
    if (message.role == Role::kUser) writer.fixed("User: ");
    const bool continues =
        conversation.continue_final_message && i + 1 == conversation.messages.size();
    if (message.role == Role::kAssistant) {
      writer.fixed(continues && message.text().empty() ? "Assistant:" : "Assistant: ");
    }
    writer.text(message.text());
    if (continues) return std::move(writer).finish();
    writer.fixed(message.role == Role::kAssistant ? kEos : "\n\n");
  }
  if (conversation.add_generation_prompt) writer.fixed("Assistant:");
  return std::move(writer).finish();
}

}  // namespace fathom
