// Tokens and their log-probabilities in the forms of the interfaces. All append to `out`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

// The token's text with its quotes; bytes that are no character by themselves are U+FFFD.
void append_token_text(std::string& out, const Tokenizer& tokenizer, int32_t id);

// Chat's: {"token":…,"logprob":…,"bytes":[…],"top_logprobs":[…]} and a comma after each but the
// last; a comma before the first if `out` does not end in '['.
void append_chat_logprobs(std::string& out, const Tokenizer& tokenizer,
                          const std::vector<TokenLogprob>& tokens);

// vLLM's prompt_logprobs: [null,{"42":{"logprob":…,"rank":…,"decoded_token":…},…},…]
void append_prompt_logprobs(std::string& out, const Tokenizer& tokenizer,
                            const std::vector<std::optional<TokenLogprob>>& tokens);

void append_ids(std::string& out, const std::vector<int32_t>& ids);  // [1,2,3]

// "matched_stop":…,"stop_reason":…: null, an id or a string. The first is SGLang's; the second is
// vLLM's, where an answer that ended by itself has none.
void append_matched_stop(std::string& out, const Tokenizer& tokenizer,
                         const std::variant<std::monostate, int32_t, std::string>& matched);
// null, an id or a string.
void append_stop(std::string& out,
                 const std::variant<std::monostate, int32_t, std::string>& matched);

// Completions' log-probabilities: four lists of one length, put together over several events.
class CompletionLogprobs {
 public:
  explicit CompletionLogprobs(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void add(const TokenLogprob& token);
  // Tokens without a number, as the first of a prompt.
  void add_without(int32_t id);

  // {"tokens":…,"token_logprobs":…,"top_logprobs":…,"text_offset":…} of what was added since the
  // last call; offsets go on, in characters.
  void take(std::string& out);

 private:
  void add_token(int32_t id);

  const Tokenizer& tokenizer_;
  std::string tokens_ = "[", logprobs_ = "[", top_ = "[", offsets_ = "[";
  int64_t offset_ = 0;
};

}  // namespace fathom
