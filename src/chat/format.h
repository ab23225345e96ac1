// Chat formats: how each generation of models wants a conversation written.
//
// A checkpoint says its format in a Jinja template. Templates are recognised, never evaluated: a
// template from a checkpoint is a program from a stranger. Each format is written here in C++ and
// tested byte for byte against what the published template renders.
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
  kKimiK2,  // Kimi K2 instruct. Its tokenizer is a tiktoken file, which is not read here
  kKimiK2Thinking,
  kFathomTiny,  // the bundled model: V3.1's form with tool instructions of its own
};

std::string_view chat_format_name(ChatFormat format);  // "deepseek-v3.1"
std::string chat_format_names();                       // all of them, for help and errors
Result<ChatFormat> chat_format_from_name(std::string_view name);

// The format of a checkpoint: from what is characteristic in its chat template; without a template
// (empty) from config.json's model_type and the special tokens that its tokenizer knows.
Result<ChatFormat> detect_chat_format(std::string_view model_type, std::string_view chat_template,
                                      const std::function<bool(std::string_view)>& has_token);

// The prompt, beginning with the BOS token's text where the format has one: encode it without
// adding another.
//
// Equal to what the model's template gives, its oddities included, with these choices of ours where
// a template loses input: developer messages count as system messages (V3.2 and Kimi have their own
// rule); an empty list of tool calls counts as none; V2.5, V3, 0324 and R1 templates ignore tools,
// here they are declared in the system text; V2 has no tools and refuses them.
//
// With continue_final_message the prompt ends in the last message's text, with no end token and no
// new turn. Content stands behind </think>: after its reasoning if it has any, else as the format
// writes an answer without reasoning (the V3.1 template would put the content of a prefix message
// into the reasoning; DeepSeek's API has reasoning_content for that).
Result<Prompt> render(ChatFormat format, const Conversation& conversation);

}  // namespace fathom
