// Converts prompts and conversations to token ids and checks them against the context length.
#pragma once

#include <string>
#include <string_view>

#include "chat/message.h"
#include "engine/sampling_params.h"
#include "server/openai/chat_request.h"
#include "server/openai/reply_writer.h"
#include "server/openai/served_model.h"

namespace fathom {

// Converts an OpenAI conversation that was checked. Tools are left out if with_tools is false.
ApiResult<Conversation> read_conversation(const ConversationFields& fields, bool with_tools);

// Renders a conversation in the model's chat format, and encodes it. `param` is the field for
// errors. A prompt of more than eight bytes per token of context is refused before it is tokenized.
ApiResult<Prompt> render_conversation(const ServedModel& served, const Conversation& conversation,
                                      const std::string& param);
ApiResult<EncodedPrompt> encode_conversation(const ServedModel& served,
                                             const Conversation& conversation,
                                             const std::string& param);

// Encodes text as it is; special tokens in it are recognized.
ApiResult<EncodedPrompt> encode_text(const ServedModel& served, std::string_view text, bool add_bos,
                                     const std::string& param);

// Encodes a fill-in-the-middle prompt: the completion goes between `prefix` and `suffix`. Refused
// if the vocabulary has no markers for it.
ApiResult<EncodedPrompt> encode_infill(const ServedModel& served, std::string_view prefix,
                                       std::string_view suffix, bool add_bos,
                                       const std::string& param);

// Accepts token ids; they must be in the vocabulary.
ApiResult<EncodedPrompt> take_ids(const ServedModel& served, std::vector<int32_t> ids,
                                  const std::string& param);

// Checks that the prompt and max_tokens (or min_tokens if there is no max_tokens) fit into the
// context. The error "context_length_exceeded" names all three. `param` is the prompt's field.
ApiResult<> check_length(const ServedModel& served, int64_t prompt_tokens,
                         const SamplingParams& params, const std::string& param);

// Checks all limits of the parameters; the error's param is the wrong field.
ApiResult<> check_sampling(const ServedModel& served, const SamplingParams& params);

// Returns the number of bytes above which no text fits into the context.
size_t max_prompt_bytes(const ServedModel& served);

// Keeps the markers that the stream parsers need, which a tokenizer may call special.
void keep_markers(const ServedModel& served, SamplingParams& params);

// Converts a status whose message begins with a field's path to an error of that field.
ApiError blame_field(const Status& status);

}  // namespace fathom
