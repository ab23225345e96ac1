#include "server/openai/responses_request.h"

#include <algorithm>

namespace fathom {
namespace {

constexpr size_t kMaxItems = kMaxMessages;

ObjectSchema item(std::string_view name, std::vector<std::pair<std::string_view, Type>> fields,
                  std::vector<std::pair<std::string_view, Type>> optional = {}) {
  SchemaOf<Unread> schema(name);
  schema.checked("type", string(), "Which kind of item");
  for (auto& [field, type] : fields) schema.required_checked(field, std::move(type), "");
  for (auto& [field, type] : optional) schema.checked(field, std::move(type), "");
  return schema.build();
}

Type parts_type() {
  static const ObjectSchema kText = item("ResponsesText", {{"text", string()}},
                                         {{"annotations", any_type()}, {"logprobs", any_type()}});
  return array_of(
      variant("type", {{"input_text", &kText}, {"output_text", &kText}, {"text", &kText}}));
}

Type input_type() {
  static const Type kContent = one_of({string(), parts_type()});
  static const ObjectSchema kMessage = item(
      "ResponsesMessage",
      {{"role", one_word_of({"system", "developer", "user", "assistant"})}, {"content", kContent}},
      {{"id", string(0, 256)}, {"status", string()}, {"phase", string()}});
  static const ObjectSchema kCall =
      item("ResponsesFunctionCall",
           {{"call_id", string(0, 256)}, {"name", name_string(128)}, {"arguments", string()}},
           {{"id", string(0, 256)}, {"status", string()}});
  static const ObjectSchema kOutput =
      item("ResponsesFunctionCallOutput", {{"call_id", string(0, 256)}, {"output", kContent}},
           {{"id", string(0, 256)}, {"status", string()}});
  static const ObjectSchema kReasoningText = item("ResponsesReasoningText", {{"text", string()}});
  static const ObjectSchema kReasoning = item("ResponsesReasoning", {},
                                              {{"id", string(0, 256)},
                                               {"summary", array_of(object_of(kReasoningText))},
                                               {"content", array_of(object_of(kReasoningText))},
                                               {"encrypted_content", string()},
                                               {"status", string()}});
  return one_of({string(), array_of(variant("type",
                                            {{"message", &kMessage},
                                             {"function_call", &kCall},
                                             {"function_call_output", &kOutput},
                                             {"reasoning", &kReasoning}},
                                            "message"),
                                    1, kMaxItems)});
}

const ObjectSchema& function_tool() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("ResponsesFunctionTool")
          .required_checked("type", string(), "function")
          .required_checked("name", name_string(128), "Its name")
          .checked("description", string(), "What it does")
          .checked("parameters", any_object(), "The JSON schema of its arguments")
          .checked("strict", boolean(), "Arguments must follow the schema")
          .build();
  return kSchema;
}

const ObjectSchema& named_choice() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("ResponsesNamedToolChoice")
          .required_checked("type", string(), "function")
          .required_checked("name", name_string(128), "The function to call")
          .build();
  return kSchema;
}

std::string joined_texts(const json::value& value) {
  if (value.is_string()) return std::string(value.get_string());
  std::string joined;
  for (const json::value& part : value.get_array()) joined += part.at("text").get_string();
  return joined;
}

std::string text_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value == nullptr || !value->is_string() ? "" : std::string(value->get_string());
}

Role role_of(const std::string& word) {
  return word == "system"      ? Role::kSystem
         : word == "developer" ? Role::kDeveloper
         : word == "assistant" ? Role::kAssistant
                               : Role::kUser;
}

// Adds an input item. Consecutive reasoning, text and calls of an assistant form one message of the
// conversation.
void add_item(const json::object& object, std::vector<Message>& messages) {
  const std::string type = text_of(object, "type");
  const auto turn = [&]() -> Message& {
    if (messages.empty() || messages.back().role != Role::kAssistant) {
      messages.emplace_back().role = Role::kAssistant;
    }
    return messages.back();
  };
  if (type == "function_call") {
    turn().tool_calls.push_back(
        {text_of(object, "call_id"), text_of(object, "name"), text_of(object, "arguments")});
  } else if (type == "reasoning") {
    for (const char* key : {"summary", "content"}) {
      const json::value* texts = object.if_contains(key);
      if (texts == nullptr || texts->is_null()) continue;
      // The content is the complete text; the summary replaces it if there is no content.
      std::string text = joined_texts(*texts);
      if (!text.empty()) turn().reasoning = std::move(text);
    }
  } else if (type == "function_call_output") {
    Message& result = messages.emplace_back();
    result.role = Role::kTool;
    result.tool_call_id = text_of(object, "call_id");
    result.content = joined_texts(object.at("output"));
  } else {
    const Role role = role_of(text_of(object, "role"));
    const bool joins = role == Role::kAssistant && !messages.empty() &&
                       messages.back().role == role && !messages.back().content &&
                       messages.back().tool_calls.empty();
    Message& message = joins ? messages.back() : messages.emplace_back();
    message.role = role;
    message.content = joined_texts(object.at("content"));
  }
}

}  // namespace

const ObjectSchema& ReasoningOptions::schema() {
  using F = ReasoningOptions;
  static const ObjectSchema kSchema =
      SchemaOf<F>("ReasoningOptions")
          .field("effort", &F::effort, reasoning_effort_type(),
                 "none and minimal: the model does not reason")
          .checked("summary", string(), "Accepted, reasoning is sent as it is")
          .checked("generate_summary", string(), "Accepted, reasoning is sent as it is")
          .build();
  return kSchema;
}

const ObjectSchema& TextOptions::schema() {
  using F = TextOptions;
  static const ObjectSchema kSchema = [] {
    ObjectSchema schema =
        SchemaOf<F>("TextOptions")
            .field("format", &F::format, flat_response_format_type(), "The form of the answer")
            .checked("verbosity", string(), "Accepted, has no effect")
            .build();
    schema.fields.front().store = [](void* object, const json::value& value) {
      read_value(value, static_cast<F*>(object)->format);
      static_cast<F*>(object)->echoed = value;
    };
    return schema;
  }();
  return kSchema;
}

const ObjectSchema& ResponsesRequest::schema() {
  using F = ResponsesRequest;
  static const ObjectSchema kSchema =
      SchemaOf<F>("ResponsesRequest")
          .field("model", &F::model, name_string(), "Any name is served by the one model")
          .required("input", &F::input, input_type(), "A text, or the conversation so far")
          .field("instructions", &F::instructions, string(), "The system message")
          .field("max_output_tokens", &F::max_output_tokens, integer(1, kMaxInt32),
                 "Longest answer in tokens")
          .field("tools", &F::tools,
                 array_of(variant("type", {{"function", &function_tool()}}), 0, kMaxTools),
                 "Functions that the model may call")
          .field("tool_choice", &F::tool_choice,
                 one_of({one_word_of({"none", "auto", "required"}),
                         variant("type", {{"function", &named_choice()}})}),
                 "Whether tools are called")
          .field("parallel_tool_calls", &F::parallel_tool_calls, boolean(),
                 "false: at most one call")
          .field("reasoning", &F::reasoning, object_of(ReasoningOptions::schema()),
                 "Whether the model reasons before it answers")
          .field("text", &F::text, object_of(TextOptions::schema()), "The form of the answer")
          .field("top_logprobs", &F::top_logprobs, integer(0, kMaxTopLogprobs),
                 "Report log-probabilities, with this many alternatives")
          .field("include", &F::include, array_of(string(0, 256), 0, 64),
                 "message.output_text.logprobs: report log-probabilities")
          .field("previous_response_id", &F::previous_response_id, string(),
                 "Not supported: nothing is stored")
          .field("background", &F::background, boolean(), "Not supported")
          .field("stream", &F::stream, boolean(), "Answer with server-sent events")
          .field("metadata", &F::metadata, any_object(), "Returned with the reply")
          .checked("stream_options", any_object(), "Accepted, has no effect")
          .checked("store", boolean(), "Accepted, nothing is stored")
          .checked("truncation", one_word_of({"auto", "disabled"}), "Accepted, nothing is cut")
          .checked("user", string(), "Accepted, has no effect")
          .checked("service_tier", string(), "Accepted, has no effect")
          .checked("prompt_cache_key", string(), "Accepted, has no effect")
          .checked("safety_identifier", string(), "Accepted, has no effect")
          .checked("max_tool_calls", integer(1, kMaxInt32), "Accepted, has no effect")
          .include(&F::sampling)
          .build();
  return kSchema;
}

bool ResponsesRequest::wants_logprobs() const {
  return top_logprobs ||
         std::find(include.begin(), include.end(), "message.output_text.logprobs") != include.end();
}

ApiResult<Conversation> ResponsesRequest::conversation() const {
  if (!previous_response_id.empty()) {
    return tl::unexpected(ApiError(
        400, "previous_response_id is not supported: nothing is stored, send the whole input",
        "previous_response_id", "unsupported_parameter"));
  }
  if (background) {
    return tl::unexpected(ApiError(400, "background is true, which is not supported", "background",
                                   "unsupported_parameter"));
  }
  Conversation result;
  const auto add_text = [&](Role role, std::string said) {
    Message& message = result.messages.emplace_back();
    message.role = role;
    message.content = std::move(said);
  };
  if (instructions) add_text(Role::kSystem, *instructions);
  if (input.is_string()) {
    add_text(Role::kUser, std::string(input.get_string()));
  } else {
    for (const json::value& value : input.get_array())
      add_item(value.get_object(), result.messages);
  }
  order_tool_results(result.messages);
  const bool no_tools = tool_choice && tool_choice->mode == ToolChoice::Mode::kNone;
  if (!tools.is_null() && !no_tools) {
    for (const json::value& value : tools.get_array()) {
      const json::object& tool = value.get_object();
      const json::value* parameters = tool.if_contains("parameters");
      const bool has_parameters = parameters != nullptr && !parameters->is_null();
      result.tools.push_back(make_tool(text_of(tool, "name"), text_of(tool, "description"),
                                       has_parameters ? std::optional(*parameters) : std::nullopt));
    }
  }
  result.thinking = reasoning && !reasoning->effort.empty() && effort_thinks(reasoning->effort);
  if (text.format.type == "json_schema") result.response_schema = text.format.schema;
  return result;
}

}  // namespace fathom
