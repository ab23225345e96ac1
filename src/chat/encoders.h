// One encoder per family of formats; render() in format.h selects it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "chat/message.h"
#include "chat/prompt.h"

namespace fathom {

inline constexpr std::string_view kBos = "<｜begin▁of▁sentence｜>";
inline constexpr std::string_view kEos = "<｜end▁of▁sentence｜>";

// The differences between the templates of V2.5, V3, 0324 and R1.
struct V3Style {
  bool joins_system;        // system messages are joined; otherwise the last one counts
  bool cuts_reasoning;      // drops history content up to its last </think>
  bool newline_in_results;  // between tool outputs
  bool r1_calls;            // calls count only without content; see encode_v3.cc
  // <｜Assistant｜> belongs to the user turn, and calls restart with each turn.
  bool assistant_with_user;
  bool reasons;              // <think> is the model's own word
  std::string_view opening;  // after <｜Assistant｜> in the generation prompt
};

// The differences between the templates of GLM-4.7, GLM-5 and GLM-5.2.
struct GlmStyle {
  bool trims_reasoning;           // white space around it, and newlines around the content's tags
  bool names_effort;              // a line about it, with thinking
  bool bare_tools;                // declares the function alone, not {"type": "function", …}
  std::string_view no_reasoning;  // before an answer without reasoning
};

Result<Prompt> encode_v2(const Conversation& conversation);
Result<Prompt> encode_v3(const Conversation& conversation, const V3Style& style);
Result<Prompt> encode_v31(const Conversation& conversation);
Result<Prompt> encode_fathom_tiny(const Conversation& conversation);
Result<Prompt> encode_v32(const Conversation& conversation);
Result<Prompt> encode_kimi(const Conversation& conversation, bool thinking_model);
Result<Prompt> encode_kimi_k25(const Conversation& conversation);
Result<Prompt> encode_moonlight(const Conversation& conversation);
// calls_inside: a call is a part of its message (3.1); otherwise it is one of its own (3).
Result<Prompt> encode_gigachat(const Conversation& conversation, bool calls_inside);
Result<Prompt> encode_glm(const Conversation& conversation, const GlmStyle& style);

inline bool is_system(const Message& message) {
  return message.role == Role::kSystem || message.role == Role::kDeveloper;
}

// All system texts, separated by blank lines.
inline std::string joined_system(const std::vector<Message>& messages) {
  std::string joined;
  bool first = true;
  for (const Message& message : messages) {
    if (!is_system(message)) continue;
    if (!first) joined += "\n\n";
    joined += message.text();
    first = false;
  }
  return joined;
}

}  // namespace fathom
