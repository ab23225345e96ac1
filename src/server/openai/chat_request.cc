#include "server/openai/chat_request.h"

#include "chat/message.h"

namespace fathom {
namespace {

// Tables of objects that chat/message.h reads.

constexpr size_t kMaxToolNameBytes = 128;

const ObjectSchema& text_part() {
  static const ObjectSchema kSchema = SchemaOf<Unread>("TextPart")
                                          .required_checked("type", string(), "text")
                                          .required_checked("text", string(), "What is said")
                                          .build();
  return kSchema;
}

const ObjectSchema& called_function() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("CalledFunction")
          .required_checked("name", name_string(kMaxToolNameBytes), "Its name")
          .required_checked("arguments", one_of({string(), any_object()}), "JSON text")
          .build();
  return kSchema;
}

const ObjectSchema& tool_call() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("ToolCall")
          .checked("id", string(0, 256), "The id that the tool's result refers to")
          .checked("type", one_word_of({"function"}), "function")
          .checked("index", integer(0, kMaxTools), "Accepted, the order counts")
          .required_checked("function", object_of(called_function()), "What was called")
          .build();
  return kSchema;
}

const ObjectSchema& declared_function() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("FunctionDeclaration")
          .required_checked("name", name_string(kMaxToolNameBytes), "Its name")
          .checked("description", string(), "What it does")
          .checked("parameters", any_object(), "The JSON schema of its arguments")
          .checked("strict", boolean(), "Arguments must follow the schema")
          .build();
  return kSchema;
}

const ObjectSchema& function_tool() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("FunctionTool")
          .checked("type", string(), "function")
          .required_checked("function", object_of(declared_function()), "The function")
          .build();
  return kSchema;
}

Type tools_type() {
  return array_of(variant("type", {{"function", &function_tool()}}, "function"), 0, kMaxTools);
}

const ObjectSchema& message() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("Message")
          .required_checked("role",
                            one_word_of({"system", "developer", "user", "assistant", "tool"}),
                            "Who says it")
          .checked("content",
                   one_of({string(), array_of(variant("type", {{"text", &text_part()}}))}),
                   "The content; null in an assistant's message that only calls tools")
          .checked("name", string(0, 256), "The author's name")
          .checked("tool_calls", array_of(object_of(tool_call()), 0, kMaxTools),
                   "An assistant's calls")
          .checked("tool_call_id", string(0, 256), "The call that a tool's message answers")
          .checked("reasoning_content", string(), "An assistant's reasoning")
          .checked("reasoning", string(), "Alias of reasoning_content")
          .checked("prefix", boolean(),
                   "True in the last message, an assistant's: the answer continues it")
          .checked("tools", tools_type(), "In a system message (V3.2)")
          .checked("response_format", any_object(), "In a system message (V3.2)")
          .checked("refusal", any_type(), "Accepted, has no effect")
          .checked("annotations", any_type(), "Accepted, has no effect")
          .checked("audio", any_type(), "Accepted, has no effect")
          .build();
  return kSchema;
}

const ObjectSchema& choice_function() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("ToolChoiceFunction")
          .required_checked("name", name_string(kMaxToolNameBytes), "The function to call")
          .build();
  return kSchema;
}

const ObjectSchema& named_choice() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("NamedToolChoice")
          .required_checked("type", string(), "function")
          .required_checked("function", object_of(choice_function()), "The function to call")
          .build();
  return kSchema;
}

const ObjectSchema& thinking_object() {
  static const ObjectSchema kSchema =
      SchemaOf<Unread>("Thinking")
          .required_checked("type", one_word_of({"enabled", "disabled", "adaptive"}),
                            "Whether the model reasons before it answers")
          .checked("budget_tokens", integer(0, kMaxInt32), "Accepted, has no effect")
          .checked("display", string(), "Accepted, has no effect")
          .build();
  return kSchema;
}

}  // namespace

void read_value(const json::value& value, ToolChoice& out) {
  if (value.is_string()) {
    const std::string_view word = value.get_string();
    out.mode = word == "none"       ? ToolChoice::Mode::kNone
               : word == "required" ? ToolChoice::Mode::kRequired
                                    : ToolChoice::Mode::kAuto;
    return;
  }
  out.mode = ToolChoice::Mode::kNamed;
  const json::object& object = value.get_object();
  const json::value* function = object.if_contains("function");
  out.name = (function == nullptr ? object : function->get_object()).at("name").get_string();
}

void read_value(const json::value& value, Thinking& out) {
  out.enabled = value.is_bool() ? value.get_bool() : value.get_object().at("type") != "disabled";
}

Type thinking_type() { return one_of({boolean(), object_of(thinking_object())}); }

Type reasoning_effort_type() {
  return one_word_of({"none", "minimal", "low", "medium", "high", "xhigh", "max"});
}

bool effort_thinks(const std::string& effort) { return effort != "none" && effort != "minimal"; }

const ObjectSchema& TemplateArguments::schema() {
  using F = TemplateArguments;
  static const ObjectSchema kSchema =
      SchemaOf<F>("TemplateArguments")
          .field("thinking", &F::thinking, boolean(), "The model reasons before it answers")
          .field("enable_thinking", &F::enable_thinking, boolean(), "The same")
          .build();
  return kSchema;
}

Type messages_type() { return array_of(object_of(message()), 1, kMaxMessages); }

const ObjectSchema& ConversationFields::schema() {
  using F = ConversationFields;
  static const ObjectSchema kSchema =
      SchemaOf<F>("Conversation")
          .field("messages", &F::messages, messages_type(), "The conversation so far")
          .field("tools", &F::tools, tools_type(), "Functions that the model may call")
          .field("chat_template_kwargs", &F::chat_template_kwargs,
                 object_of(TemplateArguments::schema()), "Switches of the chat format")
          .field("add_generation_prompt", &F::add_generation_prompt, boolean(),
                 "End the prompt where the answer begins; true by default")
          .field("continue_final_message", &F::continue_final_message, boolean(),
                 "The answer continues the last message, an assistant's")
          .build();
  return kSchema;
}

const ObjectSchema& ChatRequest::schema() {
  using F = ChatRequest;
  static const ObjectSchema kSchema = [] {
    ObjectSchema schema =
        SchemaOf<F>("ChatRequest")
            .include(&F::conversation)
            .field("tool_choice", &F::tool_choice,
                   one_of({one_word_of({"none", "auto", "required"}),
                           variant("type", {{"function", &named_choice()}})}),
                   "Whether tools are called")
            .field("parallel_tool_calls", &F::parallel_tool_calls, boolean(),
                   "false: at most one call")
            .field("max_tokens", &F::max_tokens, integer(1, kMaxInt32),
                   "Longest answer in tokens; to the end of the context without it")
            .field("max_completion_tokens", &F::max_completion_tokens, integer(1, kMaxInt32),
                   "Alias of max_tokens, which it overrides")
            .field("logprobs", &F::logprobs, boolean(), "Report log-probabilities")
            .field("top_logprobs", &F::top_logprobs, integer(0, kMaxTopLogprobs),
                   "Alternatives for each token; needs logprobs")
            .field("thinking", &F::thinking, thinking_type(), "The model reasons before it answers")
            .field("reasoning_effort", &F::reasoning_effort, reasoning_effort_type(),
                   "none and minimal: the model does not reason")
            .field("functions", &F::functions, any_type(), "Not supported: use tools")
            .field("function_call", &F::function_call, any_type(), "Not supported: use tool_choice")
            .field("audio", &F::audio, any_type(), "Not supported: answers are text")
            .field("modalities", &F::modalities, any_type(), "Only [\"text\"]")
            .checked("verbosity", string(), "Accepted, has no effect")
            .include(&F::reply)
            .include(&F::sampling)
            .include(&F::structured)
            .build();
    schema.fields.front().required = true;  // messages
    return schema;
  }();
  return kSchema;
}

}  // namespace fathom
