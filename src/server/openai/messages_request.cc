#include "server/openai/messages_request.h"

#include "chat/python_json.h"

namespace fathom {
namespace {

// Table of a content block. Every block accepts cache_control, which is ignored.
ObjectSchema block(std::string_view name, std::vector<std::pair<std::string_view, Type>> fields,
                   std::vector<std::pair<std::string_view, Type>> optional = {}) {
  SchemaOf<Unread> schema(name);
  schema.required_checked("type", string(), "Which kind of block");
  for (auto& [field, type] : fields) schema.required_checked(field, std::move(type), "");
  for (auto& [field, type] : optional) schema.checked(field, std::move(type), "");
  schema.checked("cache_control", any_object(), "Accepted, prefixes are cached automatically");
  return schema.build();
}

const ObjectSchema& text_block() {
  static const ObjectSchema kSchema =
      block("TextBlock", {{"text", string()}}, {{"citations", any_type()}});
  return kSchema;
}

Type texts_type() {
  return one_of({string(), array_of(variant("type", {{"text", &text_block()}}))});
}

Type content_type() {
  static const ObjectSchema kUse =
      block("ToolUseBlock",
            {{"id", string(0, 256)}, {"name", name_string(128)}, {"input", any_object()}});
  static const ObjectSchema kResult = block("ToolResultBlock", {{"tool_use_id", string(0, 256)}},
                                            {{"content", texts_type()}, {"is_error", boolean()}});
  static const ObjectSchema kThinking =
      block("ThinkingBlock", {{"thinking", string()}}, {{"signature", string()}});
  static const ObjectSchema kRedacted = block("RedactedThinkingBlock", {{"data", string()}});
  return one_of({string(), array_of(variant("type", {{"text", &text_block()},
                                                     {"tool_use", &kUse},
                                                     {"tool_result", &kResult},
                                                     {"thinking", &kThinking},
                                                     {"redacted_thinking", &kRedacted}}))});
}

const ObjectSchema& message() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("MessagesMessage")
          .required_checked("role", one_word_of({"user", "assistant", "system"}), "Who says it")
          .required_checked("content", content_type(), "What is said")
          .build();
  return kSchema;
}

const ObjectSchema& custom_tool() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("MessagesTool")
          .checked("type", string(), "custom")
          .required_checked("name", name_string(128), "Its name")
          .checked("description", string(), "What it does")
          .required_checked("input_schema", any_object(), "The JSON schema of its input")
          .checked("strict", boolean(), "Inputs must follow the schema")
          .checked("cache_control", any_object(), "Accepted, prefixes are cached automatically")
          .build();
  return kSchema;
}

const ObjectSchema& open_choice() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("MessagesToolChoice")
          .required_checked("type", string(), "Whether tools are called")
          .checked("disable_parallel_tool_use", boolean(), "At most one call")
          .build();
  return kSchema;
}

const ObjectSchema& named_choice() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("MessagesNamedToolChoice")
          .required_checked("type", string(), "tool")
          .required_checked("name", name_string(128), "The tool to call")
          .checked("disable_parallel_tool_use", boolean(), "At most one call")
          .build();
  return kSchema;
}

SchemaOf<MessagesRequest> prompt_fields(std::string_view name) {
  using F = MessagesRequest;
  SchemaOf<F> schema(name);
  schema.field("model", &F::model, name_string(), "Any name is served by the one model")
      .required("messages", &F::messages, array_of(object_of(message()), 1, kMaxMessages),
                "The conversation so far")
      .field("system", &F::system, texts_type(), "The system message")
      .field("tools", &F::tools,
             array_of(variant("type", {{"custom", &custom_tool()}}, "custom"), 0, kMaxTools),
             "Tools that the model may use")
      .field("tool_choice", &F::tool_choice,
             variant("type", {{"auto", &open_choice()},
                              {"any", &open_choice()},
                              {"none", &open_choice()},
                              {"tool", &named_choice()}}),
             "Whether tools are used")
      .field("thinking", &F::thinking, thinking_type(), "The model reasons before it answers");
  return schema;
}

std::string joined_texts(const json::value& value) {
  if (value.is_string()) return std::string(value.get_string());
  std::string joined;
  if (value.is_null()) return joined;
  for (const json::value& part : value.get_array()) joined += part.at("text").get_string();
  return joined;
}

std::string text_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value == nullptr || !value->is_string() ? "" : std::string(value->get_string());
}

// Converts one message's blocks to messages of the conversation. Tool results become messages of
// their own, before the user's text.
class MessageReader {
 public:
  MessageReader(Role role, std::string where, std::vector<Message>& out)
      : role_(role), where_(std::move(where)), out_(out) {}

  ApiResult<> read(const json::value& content) {
    if (content.is_string()) {
      add_text(content.get_string());
    } else {
      const json::array& blocks = content.get_array();
      for (size_t i = 0; i < blocks.size(); ++i) {
        FATHOM_RETURN_IF_ERROR(
            read_block(blocks[i].get_object(), fmt::format("{}.content[{}]", where_, i)));
      }
    }
    const bool says_nothing = !message_.content && message_.tool_calls.empty();
    if (says_nothing && has_results_) return {};
    if (says_nothing) message_.content = "";
    message_.role = role_;
    out_.push_back(std::move(message_));
    return {};
  }

 private:
  void add_text(std::string_view text) {
    if (!message_.content) message_.content.emplace();
    *message_.content += text;
  }

  ApiResult<> read_block(const json::object& block, const std::string& where) {
    const std::string type = text_of(block, "type");
    if (type == "text") {
      add_text(block.at("text").get_string());
    } else if (type == "tool_result") {
      if (role_ != Role::kUser) return misplaced(where, type, "user");
      Message result;
      result.role = Role::kTool;
      result.tool_call_id = text_of(block, "tool_use_id");
      const json::value* content = block.if_contains("content");
      result.content = content == nullptr ? "" : joined_texts(*content);
      has_results_ = true;
      out_.push_back(std::move(result));
    } else {
      if (role_ != Role::kAssistant) return misplaced(where, type, "assistant");
      if (type == "tool_use") {
        message_.tool_calls.push_back(
            {text_of(block, "id"), text_of(block, "name"), to_python_json(block.at("input"))});
      } else if (type == "thinking") {
        message_.reasoning += text_of(block, "thinking");
      }
    }
    return {};
  }

  static ApiResult<> misplaced(const std::string& where, const std::string& type,
                               const char* role) {
    return bad_field(where, "{} is of type {}, which only the role {} may have", where, type, role);
  }

  const Role role_;
  const std::string where_;
  std::vector<Message>& out_;
  Message message_;
  bool has_results_ = false;
};

}  // namespace

void read_value(const json::value& value, MessagesToolChoice& out) {
  const json::object& object = value.get_object();
  const std::string type = text_of(object, "type");
  out.choice.mode = type == "any"    ? ToolChoice::Mode::kRequired
                    : type == "none" ? ToolChoice::Mode::kNone
                    : type == "tool" ? ToolChoice::Mode::kNamed
                                     : ToolChoice::Mode::kAuto;
  out.choice.name = text_of(object, "name");
  const json::value* disable = object.if_contains("disable_parallel_tool_use");
  out.parallel = disable == nullptr || !disable->is_bool() || !disable->get_bool();
}

const ObjectSchema& MessagesRequest::schema() {
  using F = MessagesRequest;
  static const ObjectSchema kSchema =
      prompt_fields("MessagesRequest")
          .required("max_tokens", &F::max_tokens, integer(1, kMaxInt32), "Longest answer in tokens")
          .field("stop_sequences", &F::stop_sequences,
                 array_of(string(1, kMaxStopBytes), 0, kMaxStopStrings),
                 "The answer ends before any of these")
          .field("stream", &F::stream, boolean(), "Answer with server-sent events")
          .checked("metadata", any_object(), "Accepted, has no effect")
          .checked("service_tier", string(), "Accepted, has no effect")
          .include(&F::sampling)
          .build();
  return kSchema;
}

const ObjectSchema& MessagesRequest::count_schema() {
  static const ObjectSchema kSchema = prompt_fields("CountTokensRequest").build();
  return kSchema;
}

ApiResult<Conversation> MessagesRequest::conversation() const {
  Conversation result;
  if (const std::string text = joined_texts(system); !text.empty()) {
    Message message;
    message.role = Role::kSystem;
    message.content = text;
    result.messages.push_back(std::move(message));
  }
  const json::array& list = messages.get_array();
  for (size_t i = 0; i < list.size(); ++i) {
    const json::object& object = list[i].get_object();
    const std::string role = text_of(object, "role");
    MessageReader reader(role == "user"        ? Role::kUser
                         : role == "assistant" ? Role::kAssistant
                                               : Role::kSystem,
                         fmt::format("messages[{}]", i), result.messages);
    FATHOM_RETURN_IF_ERROR(reader.read(object.at("content")));
  }
  // An assistant's message at the end is continued (answer prefill).
  const Message& last = result.messages.back();
  result.continue_final_message = last.role == Role::kAssistant && last.tool_calls.empty();
  order_tool_results(result.messages);
  if (!tools.is_null() && tool_choice.choice.mode != ToolChoice::Mode::kNone) {
    for (const json::value& value : tools.get_array()) {
      const json::object& tool = value.get_object();
      result.tools.push_back(
          make_tool(text_of(tool, "name"), text_of(tool, "description"), tool.at("input_schema")));
    }
  }
  result.thinking = thinking && thinking->enabled;
  return result;
}

}  // namespace fathom
