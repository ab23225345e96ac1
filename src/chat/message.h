// A conversation as every chat format takes it, and its reading from OpenAI-style JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace fathom {

enum class Role { kSystem, kDeveloper, kUser, kAssistant, kTool };

std::string_view role_name(Role role);  // "system", …

// One call that the assistant made. `arguments` is JSON text, kept as it was written: most formats
// paste it into the prompt unchanged.
struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;
};

// A function that the assistant may call. `declaration` is the whole {"type": "function",
// "function": {…}} with its keys in the order in which they came, because formats print it.
struct Tool {
  std::string name;
  std::string description;
  json::object declaration;

  const json::object& function() const { return declaration.at("function").get_object(); }
  // The JSON schema; that of a function without arguments when none was declared.
  json::value parameters() const;
};

struct Message {
  Role role = Role::kUser;
  std::optional<std::string> content;  // none is null: an assistant turn that is only calls
  std::string reasoning;               // an assistant's, when the client sends it back
  std::vector<ToolCall> tool_calls;    // an assistant's
  std::string tool_call_id;            // a tool result's
  std::string name;
  bool prefix = false;  // an assistant's: text to be continued
  // V3.2 places these in the system or developer message that carries them.
  std::vector<Tool> tools;
  std::optional<json::value> response_schema;

  std::string_view text() const { return content ? std::string_view(*content) : ""; }
};

struct Conversation {
  std::vector<Message> messages;
  std::vector<Tool> tools;
  bool thinking = false;
  bool add_generation_prompt = true;
  // The last message is the beginning of the answer (chat/prefill.h); no generation prompt then.
  bool continue_final_message = false;
  std::optional<json::value> response_schema;  // only V3.2 can say it in the prompt
};

Tool make_tool(std::string name, std::string description, std::optional<json::value> parameters);

// Puts the results of each turn's calls into the order of the calls when their ids say so, because
// the formats match them by order alone.
void order_tool_results(std::vector<Message>& messages);

inline constexpr int kMaxMessages = 4096;
inline constexpr int kMaxTools = 128;

// Reads {"messages": […], "tools": […]?, "thinking": bool?}; other keys are the caller's. Errors
// begin with `source` and name the field and its value. Content may be a string or a list of text
// parts (joined with nothing between). Arguments may be a string or an object (written as Python
// writes JSON). Tool results are put in order (order_tool_results).
Result<Conversation> parse_conversation(const json::value& value, std::string_view source);

}  // namespace fathom
