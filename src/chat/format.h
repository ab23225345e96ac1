// Chat formats: how each generation of models expects a conversation to be written.
//
// A checkpoint specifies its format as a Jinja template. Templates are recognized, never evaluated,
// because a template from a checkpoint is untrusted code. Each format is implemented here in C++
// and tested byte for byte against the output of the published template.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "chat/message.h"
#include "chat/prompt.h"

namespace fathom {

enum class ChatFormat {
  kV2,      // V2, V2-Lite-Chat, Coder-V2-Instruct: words, no tools
  kV25,     // V2.5: role tokens
  kV3,      // V3 of December 2024
  kV30324,  // V3-0324 and R1-0528: one template
  kR1,      // R1 and its distillations
  kV31,     // V3.1, V3.1-Terminus, V3.2-Exp
  kV32,     // V3.2: an encoder in code, no template; DSML tool calls
  kKimiK2,  // Kimi K2 instruct
  kKimiK2Thinking,
  kKimiK25,     // Kimi K2.5: tools in TypeScript, reasoning that the prompt opens
  kMoonlight,   // Moonlight: Kimi's tokens, no tools
  kGlm47,       // GLM-4.7 and GLM-4.7-Flash
  kGlm5,        // GLM-5 and 5.1
  kGlm52,       // GLM-5.2: names a reasoning effort
  kGigachat3,   // GigaChat3-10B-A1.8B
  kGigachat31,  // GigaChat3.1: a call is a part of its message
  kFathomTiny,  // the bundled model: V3.1's form with tool instructions of its own
};

std::string_view chat_format_name(ChatFormat format);  // "deepseek-v3.1"
std::string chat_format_names();                       // all of them, for help and errors
Result<ChatFormat> chat_format_from_name(std::string_view name);

// Detects a checkpoint's format from characteristic parts of its chat template. If the template is
// empty, uses config.json's model_type and the special tokens that the tokenizer knows.
Result<ChatFormat> detect_chat_format(std::string_view model_type, std::string_view chat_template,
                                      const std::function<bool(std::string_view)>& has_token);

// Renders the prompt. It begins with the text of the BOS token if the format has one, so encode it
// without adding another.
//
// The prompt equals the output of the model's template, including its peculiarities, except where a
// template loses input: developer messages count as system messages (V3.2 and Kimi have their own
// rule); an empty list of tool calls counts as none; tools are declared in the system text for
// V2.5, V3, 0324 and R1, whose templates ignore them; V2 has no tools and refuses them.
//
// With continue_final_message the prompt ends with the last message's text, without an end token or
// a new turn. Content follows </think>: after its reasoning if it has any, otherwise as the format
// writes a message without reasoning (the V3.1 template would put the content of a prefix message
// into the reasoning; DeepSeek's API has reasoning_content for that).
Result<Prompt> render(ChatFormat format, const Conversation& conversation);

}  // namespace fathom
