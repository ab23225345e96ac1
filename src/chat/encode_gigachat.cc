// GigaChat 3 and 3.1. Each message is the role's name, a separator, its text and an end token; the
// first one, fixed, explains the roles to the model. Tools are types in TypeScript.
//
// A message holds one call. In GigaChat 3 it is a message of its own behind the assistant's, in 3.1
// it stands behind the assistant's text. The templates write the first of several calls and lose
// the others, so several are refused here.
#include "chat/encoders.h"
#include "chat/prefill.h"
#include "chat/python_json.h"
#include "chat/schema_fields.h"

namespace fathom {
namespace {

constexpr std::string_view kStart = "<s>";
constexpr std::string_view kRoleEnd = "<|role_sep|>\n";
constexpr std::string_view kMessageEnd = "<|message_sep|>\n\n";

// The text of the templates' own message.
constexpr std::string_view kRoles =
    "<role_description>\n"
    "Description of the roles available in the dialog.\n"
    "\n"
    "`developer system`\n"
    "A message added by Sber before the main dialog. It has the highest priority and sets "
    "global, non-overridable conditions (for example, conversation rules, the safety policy, the "
    "assistant's overall response style, etc.).\n"
    "\n"
    "`system`\n"
    "A system instruction added by developers or by the user, but with a lower priority than "
    "`developer system`. It usually describes the assistant's instructions, a specific response "
    "style, and other conditions for this particular dialog.\n"
    "\n"
    "`user`\n"
    "A message or request from the user. The assistant follows it if it does not conflict with "
    "higher-priority instructions (see <instruction_priority>).\n"
    "\n"
    "`user memory`\n"
    "A sequence of the most up-to-date long-term facts about the user at the time of their "
    "request, presented as a JSON list of strings. Facts are listed in chronological order, "
    "meaning newer facts are appended to the end of the sequence. When facts are changed or "
    "deleted, records of previous facts remain in the sequence. The assistant saves facts using "
    "a function and uses them in accordance with the <memory_guidelines> block below.\n"
    "\n"
    "`added files`\n"
    "Metadata about files available for use in the dialog, presented in JSON format. It contains "
    "the following keys: id (a unique file identifier), name (file name), type (file type).\n"
    "\n"
    "`assistant`\n"
    "The assistant's reply to the user's request. If the system instruction or the user does not "
    "set additional rules for `assistant`, this reply must comply with the instructions in the "
    "<assistant_guidelines> block below. The list of functions available to call is contained in "
    "`function descriptions`. The name of the required function and its arguments will be "
    "generated next by the `function call` role. In its replies, the assistant follows the "
    "instructions in accordance with <instruction_priority>.\n"
    "\n"
    "`function descriptions`\n"
    "Function descriptions in TypeScript format. A function is a special tool (or a set of "
    "instructions) that the assistant can call to perform specific actions, computations, or "
    "obtain data needed to solve the user's task. Each function description contains blocks with "
    "the name, description, and arguments. Sometimes the description contains separate blocks "
    "with return parameters and usage examples that illustrate the correct call and arguments.\n"
    "\n"
    "`function call`\n"
    "The function that `assistant` calls based on the dialog context, and its arguments. The "
    "function is invoked in strict accordance with the instructions in the <function_usage> "
    "block.\n"
    "\n"
    "`function result`\n"
    "The result of the last function call.\n"
    "</role_description>\n"
    "\n"
    "<available_modalities>\n"
    "The assistant can work with the following modalities: text, available functions.\n"
    "</available_modalities>\n"
    "\n"
    "<instruction_priority>\n"
    "If instructions from different roles conflict within the dialog context, observe the "
    "following priorities:  \n"
    "`developer system` > `system` > `user` > `function descriptions` > `function result` > "
    "`user memory`\n"
    "</instruction_priority>\n"
    "\n"
    "<function_usage>\n"
    "Basic instructions for working with functions.\n"
    "\n"
    "Only call those functions that are described in `function descriptions`.\n"
    "\n"
    "Call available functions when, according to their description, such a call will help "
    "provide a more complete and/or accurate answer to the user's request. Fill in function "
    "arguments using information from the dialog context. If a function could help answer the "
    "request but a required argument is missing from the context, ask the user for the missing "
    "data before calling the function. If a necessary function is unavailable or an error "
    "occurs, briefly inform the user and, if possible, suggest an alternative.\n"
    "</function_usage>\n"
    "\n"
    "<memory_guidelines>\n"
    "Rules for using facts in long-term memory:\n"
    "\n"
    "If there is no message under the `user memory` role in the dialog, this is equivalent to "
    "the absence of long-term facts about the user in memory. In that case, information about "
    "the user is limited to the current dialog, and no new facts should be saved.\n"
    "</memory_guidelines>\n"
    "\n"
    "<assistant_guidelines>\n"
    "You are a helpful assistant.\n"
    "\n"
    "# Instructions\n"
    "- Strictly follow the instruction priority.\n"
    "- Maintain a logical chain of reasoning when answering the user's question.\n"
    "- For complex questions (for example, STEM), try to answer in detail unless the system "
    "message or dialog context limits the response length.\n"
    "- Be helpful, truthful, and avoid unsafe or prohibited content in your responses.\n"
    "- Try to reply in the language in which the user asked their question.\n"
    "</assistant_guidelines>\n"
    "\n"
    "A dialog will follow below.\n"
    "The dialog may include various roles described in the <role_description> block.\n"
    "Each turn begins with the role name and a special token that marks the end of the role's "
    "full name, and ends with a special end-of-turn token.\n"
    "Your task is to continue the dialog from the last specified role in accordance with the "
    "dialog context.";

constexpr std::string_view kMemberIndent = "  ";

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\n\r\f\v") == std::string_view::npos;
}

// The lines of a text that have something on them, as comments.
std::string comment(const json::value* text, std::string_view indent) {
  std::string out;
  if (text == nullptr || !text->is_string()) return out;
  std::string_view rest = text->get_string();
  for (;;) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    if (!is_blank(line)) out += fmt::format("{}// {}\n", indent, line);
    if (end == std::string_view::npos) return out;
    rest.remove_prefix(end + 1);
  }
}

std::string joined(const json::value& values, std::string_view quote) {
  std::string out;
  for (const json::value& value : values.get_array()) {
    out += fmt::format("{}{}{}{}", out.empty() ? "" : " | ", quote, python_str(value), quote);
  }
  return out;
}

bool has_values(const json::value* values) {
  return values != nullptr && values->is_array() && !values->get_array().empty();
}

std::string type_of(const json::value& schema, const std::string& indent);

// Constraints of a property, a line each, in their order.
std::string constraints_of(const json::value& property, const std::string& indent) {
  std::string out;
  const json::object* members = property.if_object();
  if (members == nullptr) return out;
  for (const auto& [key, value] : *members) {
    for (const std::string_view known :
         {"format", "maxItems", "maximum", "minItems", "minimum", "pattern"}) {
      if (key != known) continue;
      const std::string_view quote = value.is_string() ? "\"" : "";
      out += fmt::format("{}// {}: {}{}{}\n", indent, known, quote, python_str(value), quote);
    }
  }
  return out;
}

std::string object_type(const json::value& schema, const std::string& indent) {
  const std::string inner = indent + std::string(kMemberIndent);
  std::string out = "{\n";
  const json::value* properties = find_member(schema, "properties");
  const json::object none;
  const bool listed = properties != nullptr && properties->is_object();
  for (const auto& [name, property] : listed ? properties->get_object() : none) {
    out += comment(find_member(property, "description"), indent) + constraints_of(property, indent);
    out += fmt::format("{}{}{}: {},", indent, std::string_view(name),
                       requires_property(schema, name) ? "" : "?", type_of(property, inner));
    const json::value* preset = find_member(property, "default");
    // The templates spell it so.
    if (preset == nullptr) preset = find_member(property, "defalut_value");
    if (preset != nullptr) {
      const std::string_view quote = preset->is_string() ? "\"" : "";
      out += fmt::format(" // default: {}{}{}", quote, python_str(*preset), quote);
    }
    out += "\n";
  }
  const json::value* others = find_member(schema, "additionalProperties");
  if (others != nullptr && (others->is_object() || *others == true)) {
    out += fmt::format("{}[key: string]: {}\n", indent,
                       others->is_object() ? type_of(*others, inner) : "any");
  }
  return out + indent.substr(0, indent.size() - kMemberIndent.size()) + "}";
}

// `indent` is that of an object's members.
std::string type_of(const json::value& schema, const std::string& indent) {
  const json::value* type = find_member(schema, "type");
  if (type == nullptr || !type->is_string()) return "any";
  const json::value* values = find_member(schema, "enum");
  if (*type == "object") return object_type(schema, indent);
  if (*type == "string") {
    if (has_values(values)) return joined(*values, "\"");
    const json::value* form = find_member(schema, "format");
    const bool is_date = form != nullptr && (*form == "date-time" || *form == "date");
    return is_date ? "Date" : "string";
  }
  if (*type == "number" || *type == "integer") {
    return has_values(values) ? joined(*values, "") : "number";
  }
  if (*type == "boolean") return "boolean";
  if (*type != "array") return "any";
  const json::value* items = find_member(schema, "items");
  return items == nullptr ? "Array<any>" : type_of(*items, indent) + "[]";
}

bool has_properties(const json::value* schema) {
  const json::value* properties = schema == nullptr ? nullptr : find_member(*schema, "properties");
  return properties != nullptr && properties->is_object() && !properties->get_object().empty();
}

std::string declaration(const Tool& tool) {
  const json::value function = tool.function();
  const std::string indent(kMemberIndent);
  std::string out = comment(find_member(function, "description"), "");
  const json::value* parameters = find_member(function, "parameters");
  const json::value* result = find_member(function, "return_parameters");
  out += fmt::format("type {} = ({}) => {};\n", tool.name,
                     has_properties(parameters) ? "_: " + type_of(*parameters, indent) : "",
                     has_properties(result) ? type_of(*result, indent) : "any");
  return out;
}

void write_head(PromptWriter& writer, std::string_view role) {
  writer.fixed(role);
  writer.fixed(kRoleEnd);
}

void write_call(PromptWriter& writer, const ToolCall& call) {
  writer.fixed("{\"name\": \"");
  writer.text(call.name);
  writer.fixed("\", \"arguments\": ");
  writer.text(call.arguments);
  writer.fixed("}");
}

void write_message(PromptWriter& writer, const Message& message, bool calls_inside) {
  write_head(writer, message.role == Role::kTool ? "function result" : role_name(message.role));
  writer.text(message.text());
  if (message.tool_calls.empty()) return writer.fixed(kMessageEnd);
  if (calls_inside) {
    writer.fixed("<|function_call|>");
  } else {
    writer.fixed(kMessageEnd);
    write_head(writer, "function call");
  }
  write_call(writer, message.tool_calls.front());
  writer.fixed(kMessageEnd);
}

}  // namespace

Result<Prompt> encode_gigachat(const Conversation& conversation, bool calls_inside) {
  PromptWriter writer;
  writer.fixed(kStart);
  write_head(writer, "developer system");
  writer.fixed(kRoles);
  writer.fixed(kMessageEnd);
  const std::vector<Message>& messages = conversation.messages;
  const size_t first = !messages.empty() && messages.front().role == Role::kSystem ? 1 : 0;
  if (first == 1) write_message(writer, messages.front(), calls_inside);
  if (!conversation.tools.empty()) {
    write_head(writer, "function descriptions");
    writer.fixed("namespace functions {\n");
    for (const Tool& tool : conversation.tools) writer.text(declaration(tool) + "\n");
    writer.fixed("} // namespace functions\n\n");
    writer.fixed(kMessageEnd);
  }
  for (size_t i = first; i < messages.size(); ++i) {
    if (messages[i].tool_calls.size() > 1) {
      return invalid(
          "messages[{}].tool_calls has {} calls: the gigachat chat formats have one a message", i,
          messages[i].tool_calls.size());
    }
    if (conversation.continue_final_message && i + 1 == messages.size()) {
      write_head(writer, "assistant");
      write_prefill(writer, read_prefill(messages[i], false), {});
      return std::move(writer).finish();
    }
    write_message(writer, messages[i], calls_inside);
  }
  // The templates write no generation prompt behind a system message alone.
  if (conversation.add_generation_prompt && messages.size() > first &&
      messages.back().role != Role::kAssistant) {
    write_head(writer, "assistant");
  }
  return std::move(writer).finish();
}

}  // namespace fathom
