// From what a request says to the ids that the model reads, within the model's context.
#pragma once

#include <string>
#include <string_view>

#include "chat/message.h"
#include "engine/sampling_params.h"
#include "server/openai/chat_request.h"
#include "server/openai/reply_writer.h"
#include "server/openai/served_model.h"

namespace fathom {

// Reads an OpenAI conversation that has been checked; tools are left out when with_tools is false.
ApiResult<Conversation> read_conversation(const ConversationFields& fields, bool with_tools);

// The conversation as the model's chat format writes it, and its ids. `param` is the field to
// blame. A prompt of more than eight bytes for each token of the context is refused before it is
// tokenized.
ApiResult<Prompt> render_conversation(const ServedModel& served, const Conversation& conversation,
                                      const std::string& param);
ApiResult<EncodedPrompt> encode_conversation(const ServedModel& served,
                                             const Conversation& conversation,
                                             const std::string& param);

// A text as it is; special tokens in it are special.
ApiResult<EncodedPrompt> encode_text(const ServedModel& served, std::string_view text, bool add_bos,
                                     const std::string& param);

// A text with a gap, as models that were trained to fill it in read it: the answer goes between
// `prefix` and `suffix`. Refused where the vocabulary has no markers for it.
ApiResult<EncodedPrompt> encode_infill(const ServedModel& served, std::string_view prefix,
                                       std::string_view suffix, bool add_bos,
                                       const std::string& param);

// Ids as they came; they must be in the vocabulary.
ApiResult<EncodedPrompt> take_ids(const ServedModel& served, std::vector<int32_t> ids,
                                  const std::string& param);

// That the prompt and max_tokens, or without it min_tokens, fit into the context:
// "context_length_exceeded" names all three. `param` is the field that holds the prompt.
ApiResult<> check_length(const ServedModel& served, int64_t prompt_tokens,
                         const SamplingParams& params, const std::string& param);

// All limits of the parameters; the error's param is the field at fault.
ApiResult<> check_sampling(const ServedModel& served, const SamplingParams& params);

// No text of more bytes fits into the context, whatever its tokens.
size_t max_prompt_bytes(const ServedModel& served);

// Text parsers need the markers of their format, which a tokenizer may call special.
void keep_markers(const ServedModel& served, SamplingParams& params);

// A status whose sentence begins with a field's name or path, as an error of that field.
ApiError blame_field(const Status& status);

}  // namespace fathom
