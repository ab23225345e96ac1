#include "server/openai/prompt_encoding.h"

#include "chat/prompt_ids.h"

namespace fathom {
namespace {

// Upper bound of the average bytes per token, for any tokenizer.
constexpr size_t kBytesPerToken = 8;
constexpr std::string_view kSource = "request: ";
constexpr std::string_view kMarkers[] = {"<think>",
                                         "</think>",
                                         "<｜tool▁calls▁begin｜>",
                                         "<｜tool▁call▁begin｜>",
                                         "<｜tool▁sep｜>",
                                         "<｜tool▁call▁end｜>",
                                         "<|tool_calls_section_begin|>",
                                         "<|tool_call_begin|>"};

ApiError too_long(std::string message, const std::string& param) {
  return ApiError(400, std::move(message), param, "context_length_exceeded");
}

ApiResult<> check_bytes(const ServedModel& served, size_t bytes, const std::string& param) {
  const size_t limit = max_prompt_bytes(served);
  if (bytes <= limit) return {};
  return tl::unexpected(too_long(
      fmt::format("the prompt has {} bytes, more than the context of {} tokens can hold ({} bytes)",
                  bytes, served.max_model_len, limit),
      param));
}

}  // namespace

size_t max_prompt_bytes(const ServedModel& served) {
  return static_cast<size_t>(served.max_model_len) * kBytesPerToken;
}

ApiError blame_field(const Status& status) {
  ApiError error(status);
  std::string_view text = error.message;
  if (text.starts_with(kSource)) {
    error.message.erase(0, kSource.size());
    text = error.message;
  }
  const std::string_view word = text.substr(0, text.find(' '));
  const std::string_view field = word.substr(0, word.find_first_of(".["));
  const bool known = ChatRequest::schema().find(field) != nullptr || field == "max_new_tokens";
  if (known) error.param = std::string(word);
  return error;
}

ApiResult<Conversation> read_conversation(const ConversationFields& fields, bool with_tools) {
  json::object object{{"messages", fields.messages}};
  if (with_tools && !fields.tools.is_null()) object["tools"] = fields.tools;
  auto conversation = parse_conversation(object, kSource.substr(0, kSource.size() - 2));
  if (!conversation) return tl::unexpected(blame_field(conversation.error()));
  const Message& last = conversation->messages.back();
  conversation->continue_final_message =
      fields.continue_final_message || (last.prefix && last.role == Role::kAssistant);
  if (fields.continue_final_message && fields.add_generation_prompt.value_or(false)) {
    return bad_field("continue_final_message",
                     "continue_final_message and add_generation_prompt are both true, only one may "
                     "be");
  }
  conversation->add_generation_prompt = fields.add_generation_prompt.value_or(true);
  return std::move(*conversation);
}

ApiResult<Prompt> render_conversation(const ServedModel& served, const Conversation& conversation,
                                      const std::string& param) {
  if (!served.chat_format) {
    return tl::unexpected(ApiError(
        400, "the model's chat format is not known: " + served.chat_format.error().message, param));
  }
  auto rendered = render(*served.chat_format, conversation);
  if (!rendered) {
    ApiError error = blame_field(rendered.error());
    if (!error.param) error.param = param;
    return tl::unexpected(std::move(error));
  }
  // Markup is not counted: its tokens have names of any length.
  size_t bytes = 0;
  for (const PromptSegment& segment : rendered->segments) {
    if (!segment.is_markup) bytes += segment.text.size();
  }
  FATHOM_RETURN_IF_ERROR(check_bytes(served, bytes, param));
  return std::move(*rendered);
}

ApiResult<EncodedPrompt> encode_conversation(const ServedModel& served,
                                             const Conversation& conversation,
                                             const std::string& param) {
  FATHOM_TRY(const Prompt prompt, render_conversation(served, conversation, param));
  return EncodedPrompt{encode_prompt(*served.tokenizer, prompt), "", prompt.opens_reasoning,
                       prompt.continues_answer};
}

ApiResult<EncodedPrompt> encode_text(const ServedModel& served, std::string_view text, bool add_bos,
                                     const std::string& param) {
  FATHOM_RETURN_IF_ERROR(check_bytes(served, text.size(), param));
  const bool bos = add_bos && served.tokenizer->add_bos_by_default();
  EncodedPrompt prompt{served.tokenizer->encode(text, bos), std::string(text)};
  if (prompt.ids.empty()) return bad_field(param, "{} has no tokens", param);
  return prompt;
}

ApiResult<EncodedPrompt> encode_infill(const ServedModel& served, std::string_view prefix,
                                       std::string_view suffix, bool add_bos,
                                       const std::string& param) {
  const Tokenizer& tokenizer = *served.tokenizer;
  const auto begin = tokenizer.token_id("<｜fim▁begin｜>");
  const auto hole = tokenizer.token_id("<｜fim▁hole｜>");
  const auto end = tokenizer.token_id("<｜fim▁end｜>");
  if (!begin || !hole || !end) {
    return tl::unexpected(ApiError(400,
                                   "suffix is not supported: the model's vocabulary has no markers "
                                   "for a gap (<｜fim▁begin｜>, <｜fim▁hole｜>, <｜fim▁end｜>)",
                                   "suffix", "unsupported_parameter"));
  }
  FATHOM_RETURN_IF_ERROR(check_bytes(served, prefix.size(), param));
  FATHOM_RETURN_IF_ERROR(check_bytes(served, suffix.size(), "suffix"));
  EncodedPrompt prompt;
  prompt.text = prefix;
  if (add_bos && tokenizer.add_bos_by_default() && tokenizer.bos_id()) {
    prompt.ids.push_back(*tokenizer.bos_id());
  }
  const auto append = [&](int32_t marker, std::string_view text) {
    prompt.ids.push_back(marker);
    const std::vector<int32_t> ids = tokenizer.encode_ordinary(text);
    prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
  };
  append(*begin, prefix);
  append(*hole, suffix);
  append(*end, "");
  return prompt;
}

ApiResult<EncodedPrompt> take_ids(const ServedModel& served, std::vector<int32_t> ids,
                                  const std::string& param) {
  if (ids.empty()) return bad_field(param, "{} has no tokens", param);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= served.vocab_size) {
      return bad_field(fmt::format("{}[{}]", param, i),
                       "{}[{}] is {}, outside the vocabulary of {}", param, i, ids[i],
                       served.vocab_size);
    }
  }
  return EncodedPrompt{std::move(ids), ""};
}

ApiResult<> check_length(const ServedModel& served, int64_t prompt_tokens,
                         const SamplingParams& params, const std::string& param) {
  const int64_t limit = served.max_model_len;
  if (prompt_tokens >= limit) {
    return tl::unexpected(too_long(
        fmt::format("the prompt has {} tokens, which leaves no room to answer: the context has {}",
                    prompt_tokens, limit),
        param));
  }
  if (!params.max_tokens && params.min_tokens > limit - prompt_tokens) {
    return tl::unexpected(too_long(
        fmt::format(
            "min_tokens is {}, but after the prompt's {} tokens only {} fit into the context",
            params.min_tokens, prompt_tokens, limit - prompt_tokens),
        "min_tokens"));
  }
  if (params.max_tokens && *params.max_tokens > limit - prompt_tokens) {
    return tl::unexpected(too_long(
        fmt::format("the prompt has {} tokens and {} more are asked for, together more than the "
                    "context of {} tokens",
                    prompt_tokens, *params.max_tokens, limit),
        param));
  }
  return {};
}

ApiResult<> check_sampling(const ServedModel& served, const SamplingParams& params) {
  const auto valid = params.validate(served.vocab_size);
  if (!valid) return tl::unexpected(blame_field(valid.error()));
  return {};
}

void keep_markers(const ServedModel& served, SamplingParams& params) {
  for (const std::string_view marker : kMarkers) {
    const auto id = served.tokenizer->token_id(marker);
    if (id && served.tokenizer->is_special(*id)) params.skip_special_tokens = false;
  }
}

}  // namespace fathom
