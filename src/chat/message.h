// A conversation as all chat formats accept it, and its parser for OpenAI-style JSON.
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

// A tool call that the assistant made. `arguments` is JSON text exactly as written, because most
// formats copy it into the prompt.
struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;
};

// A function that the assistant may call. `declaration` is the complete {"type": "function",
// "function": {…}} with its keys in the original order, because formats print it.
struct Tool {
  std::string name;
  std::string description;
  json::object declaration;

  const json::object& function() const { return declaration.at("function").get_object(); }
  // The JSON schema of the parameters; an empty object's if none was declared.
  json::value parameters() const;
};

struct Message {
  Role role = Role::kUser;
  std::optional<std::string> content;  // none: null, for an assistant turn with tool calls only
  std::string reasoning;               // of an assistant message, if the client sends it back
  std::vector<ToolCall> tool_calls;    // of an assistant message
  std::string tool_call_id;            // of a tool message
  std::string name;
  bool prefix = false;  // of an assistant message: its text is to be continued
  // V3.2 writes these into the system or developer message that carries them.
  std::vector<Tool> tools;
  std::optional<json::value> response_schema;

  std::string_view text() const { return content ? std::string_view(*content) : ""; }
};

struct Conversation {
  std::vector<Message> messages;
  std::vector<Tool> tools;
  bool thinking = false;
  bool add_generation_prompt = true;
  // The last message is the beginning of the completion (chat/prefill.h). Excludes a generation
  // prompt.
  bool continue_final_message = false;
  std::optional<json::value> response_schema;  // only V3.2 can express it in the prompt
};

Tool make_tool(std::string name, std::string description, std::optional<json::value> parameters);

// Reorders the results of each turn's calls to match the calls, if their ids allow it, because
// formats match them by order alone.
void order_tool_results(std::vector<Message>& messages);

inline constexpr int kMaxMessages = 4096;
inline constexpr int kMaxTools = 128;

// Parses {"messages": […], "tools": […]?, "thinking": bool?}; the caller handles other keys. Errors
// begin with `source` and name the field and its value. Content may be a string or a list of text
// parts (concatenated). Arguments may be a string or an object (serialized as Python does). Tool
// results are reordered (order_tool_results).
Result<Conversation> parse_conversation(const json::value& value, std::string_view source);

}  // namespace fathom
