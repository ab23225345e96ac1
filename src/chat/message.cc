#include "chat/message.h"

#include <algorithm>

#include "chat/python_json.h"

namespace fathom {
namespace {

constexpr std::string_view kRoleNames[] = {"system", "developer", "user", "assistant", "tool"};

Result<Role> parse_role(const JsonFields& fields, const std::string& where) {
  FATHOM_TRY(const auto name, fields.string("role"));
  const auto* found = std::find(std::begin(kRoleNames), std::end(kRoleNames), name);
  if (found == std::end(kRoleNames)) {
    return invalid("{}role is {}, expected system, developer, user, assistant or tool", where,
                   brief(json::value(name)));
  }
  return static_cast<Role>(found - kRoleNames);
}

// The array at `key`; empty if the key is missing or null.
Result<const json::array*> optional_array(const JsonFields& fields, const std::string& where,
                                          std::string_view key, int limit) {
  static const json::array kEmpty;
  const json::value* value = fields.find(key);
  if (value == nullptr) return &kEmpty;
  if (!value->is_array()) {
    return invalid("{}{} is {}, expected an array", where, key, brief(*value));
  }
  if (value->get_array().size() > static_cast<size_t>(limit)) {
    return invalid("{}{} has {} elements, the limit is {}", where, key, value->get_array().size(),
                   limit);
  }
  return &value->get_array();
}

Result<const json::object*> as_object(const json::value& value, const std::string& where) {
  if (!value.is_object()) return invalid("{} is {}, expected an object", where, brief(value));
  return &value.get_object();
}

Result<Tool> parse_tool(const json::value& value, const std::string& where) {
  FATHOM_TRY(const auto* declaration, as_object(value, where));
  const JsonFields outer(*declaration, where + ".");
  FATHOM_TRY(const auto type, outer.optional_string("type"));
  if (type.value_or("function") != "function") {
    return invalid("{}.type is {}, expected \"function\"", where, brief(json::value(*type)));
  }
  const json::value* function_value = outer.find("function");
  if (function_value == nullptr) return invalid("{}.function is missing", where);
  const std::string inner_where = where + ".function";
  FATHOM_TRY(const auto* function, as_object(*function_value, inner_where));
  const JsonFields fields(*function, inner_where + ".");
  Tool tool;
  FATHOM_TRY(tool.name, fields.string("name"));
  if (tool.name.empty()) return invalid("{}.name is empty", inner_where);
  FATHOM_TRY(auto description, fields.optional_string("description"));
  tool.description = std::move(description).value_or("");
  if (const json::value* parameters = fields.find("parameters")) {
    FATHOM_RETURN_IF_ERROR(as_object(*parameters, inner_where + ".parameters"));
  }
  tool.declaration = *declaration;
  return tool;
}

Result<std::vector<Tool>> parse_tools(const JsonFields& fields, const std::string& where) {
  FATHOM_TRY(const auto* array, optional_array(fields, where, "tools", kMaxTools));
  std::vector<Tool> tools;
  for (size_t i = 0; i < array->size(); ++i) {
    FATHOM_TRY(auto tool, parse_tool((*array)[i], fmt::format("{}tools[{}]", where, i)));
    tools.push_back(std::move(tool));
  }
  return tools;
}

Result<ToolCall> parse_tool_call(const json::value& value, const std::string& where) {
  FATHOM_TRY(const auto* object, as_object(value, where));
  const JsonFields outer(*object, where + ".");
  ToolCall call;
  FATHOM_TRY(auto id, outer.optional_string("id"));
  call.id = std::move(id).value_or("");
  FATHOM_TRY(const auto type, outer.optional_string("type"));
  if (type.value_or("function") != "function") {
    return invalid("{}.type is {}, expected \"function\"", where, brief(json::value(*type)));
  }
  const json::value* function_value = outer.find("function");
  if (function_value == nullptr) return invalid("{}.function is missing", where);
  const std::string inner_where = where + ".function";
  FATHOM_TRY(const auto* function, as_object(*function_value, inner_where));
  const JsonFields fields(*function, inner_where + ".");
  FATHOM_TRY(call.name, fields.string("name"));
  const json::value* arguments = fields.find("arguments");
  if (arguments != nullptr && arguments->is_object()) {
    call.arguments = to_python_json(*arguments);
  } else {
    FATHOM_TRY(call.arguments, fields.string("arguments"));
  }
  return call;
}

Result<std::optional<std::string>> parse_content(const JsonFields& fields,
                                                 const std::string& where) {
  const json::value* value = fields.find("content");
  if (value == nullptr || !value->is_array()) return fields.optional_string("content");
  std::string joined;
  const json::array& parts = value->get_array();
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_where = fmt::format("{}content[{}]", where, i);
    FATHOM_TRY(const auto* part, as_object(parts[i], part_where));
    const JsonFields part_fields(*part, part_where + ".");
    FATHOM_TRY(const auto type, part_fields.string("type"));
    if (type != "text") {
      return invalid("{}.type is {}, expected \"text\"", part_where, brief(json::value(type)));
    }
    FATHOM_TRY(const auto text, part_fields.string("text"));
    joined += text;
  }
  return std::optional<std::string>(std::move(joined));
}

Result<Message> parse_message(const json::value& value, const std::string& name) {
  FATHOM_TRY(const auto* object, as_object(value, name));
  const std::string where = name + ".";
  const JsonFields fields(*object, where);
  Message message;
  FATHOM_TRY(message.role, parse_role(fields, where));
  FATHOM_TRY(message.content, parse_content(fields, where));
  FATHOM_TRY(auto reasoning, fields.optional_string("reasoning_content"));
  if (!reasoning) {
    FATHOM_TRY(reasoning, fields.optional_string("reasoning"));
  }
  message.reasoning = std::move(reasoning).value_or("");
  FATHOM_TRY(const auto* calls, optional_array(fields, where, "tool_calls", kMaxTools));
  if (!calls->empty() && message.role != Role::kAssistant) {
    return invalid("{}tool_calls in a message of role {}: only an assistant calls tools", where,
                   role_name(message.role));
  }
  for (size_t i = 0; i < calls->size(); ++i) {
    FATHOM_TRY(auto call, parse_tool_call((*calls)[i], fmt::format("{}tool_calls[{}]", where, i)));
    message.tool_calls.push_back(std::move(call));
  }
  const bool may_be_null = message.role == Role::kAssistant &&
                           (!message.tool_calls.empty() || !message.reasoning.empty());
  if (!message.content && !may_be_null) return invalid("{}content is missing", where);
  FATHOM_TRY(auto id, fields.optional_string("tool_call_id"));
  message.tool_call_id = std::move(id).value_or("");
  FATHOM_TRY(auto author, fields.optional_string("name"));
  message.name = std::move(author).value_or("");
  FATHOM_TRY(const auto prefix, fields.optional_boolean("prefix"));
  message.prefix = prefix.value_or(false);
  FATHOM_TRY(message.tools, parse_tools(fields, where));
  if (const json::value* schema = fields.find("response_format")) {
    message.response_schema = *schema;
  }
  return message;
}

// Reorders messages [begin, end), the results of `calls`, to match the calls. Does nothing unless
// the ids match one to one: a client may send none.
void order_results(const std::vector<ToolCall>& calls, std::vector<Message>& messages, size_t begin,
                   size_t end) {
  if (end - begin != calls.size()) return;
  std::vector<size_t> order;
  for (const ToolCall& call : calls) {
    size_t match = end;
    for (size_t i = begin; i < end; ++i) {
      if (messages[i].tool_call_id != call.id) continue;
      if (match != end) return;  // two results with the same id
      match = i;
    }
    if (match == end || call.id.empty()) return;
    if (std::find(order.begin(), order.end(), match) != order.end()) return;
    order.push_back(match);
  }
  std::vector<Message> ordered;
  for (const size_t i : order) ordered.push_back(std::move(messages[i]));
  std::move(ordered.begin(), ordered.end(), messages.begin() + static_cast<ptrdiff_t>(begin));
}

}  // namespace

std::string_view role_name(Role role) { return kRoleNames[static_cast<size_t>(role)]; }

json::value Tool::parameters() const {
  const json::value* found = function().if_contains("parameters");
  if (found != nullptr && found->is_object()) return *found;
  return json::object{{"type", "object"}, {"properties", json::object()}};
}

Tool make_tool(std::string name, std::string description, std::optional<json::value> parameters) {
  json::object function{{"name", name}};
  if (!description.empty()) function["description"] = description;
  if (parameters) function["parameters"] = std::move(*parameters);
  Tool tool{std::move(name), std::move(description), {}};
  tool.declaration = {{"type", "function"}, {"function", std::move(function)}};
  return tool;
}

void order_tool_results(std::vector<Message>& messages) {
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].tool_calls.empty()) continue;
    size_t end = i + 1;
    while (end < messages.size() && messages[end].role == Role::kTool) ++end;
    order_results(messages[i].tool_calls, messages, i + 1, end);
  }
}

Result<Conversation> parse_conversation(const json::value& value, std::string_view source) {
  FATHOM_TRY(const auto* object, as_object(value, fmt::format("{}: the conversation", source)));
  const std::string where = fmt::format("{}: ", source);
  const JsonFields fields(*object, where);
  Conversation conversation;
  FATHOM_TRY(const auto* messages, optional_array(fields, where, "messages", kMaxMessages));
  if (messages->empty()) return invalid("{}messages is missing or empty", where);
  for (size_t i = 0; i < messages->size(); ++i) {
    FATHOM_TRY(auto message,
               parse_message((*messages)[i], fmt::format("{}messages[{}]", where, i)));
    conversation.messages.push_back(std::move(message));
  }
  order_tool_results(conversation.messages);
  FATHOM_TRY(conversation.tools, parse_tools(fields, where));
  FATHOM_TRY(const auto thinking, fields.optional_boolean("thinking"));
  conversation.thinking = thinking.value_or(false);
  return conversation;
}

}  // namespace fathom
