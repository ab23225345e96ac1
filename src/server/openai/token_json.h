// Serializes tokens and their log-probabilities in the APIs' forms. All functions append to `out`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

// Appends the token's text in quotes; bytes that are not UTF-8 by themselves become U+FFFD.
void append_token_text(std::string& out, const Tokenizer& tokenizer, int32_t id);

// Appends chat's {"token":…,"logprob":…,"bytes":[…],"top_logprobs":[…]}, separated by commas. The
// first is preceded by a comma unless `out` ends in '['.
void append_chat_logprobs(std::string& out, const Tokenizer& tokenizer,
                          const std::vector<TokenLogprob>& tokens);

// Appends vLLM's prompt_logprobs: [null,{"42":{"logprob":…,"rank":…,"decoded_token":…},…},…]
void append_prompt_logprobs(std::string& out, const Tokenizer& tokenizer,
                            const std::vector<std::optional<TokenLogprob>>& tokens);

void append_ids(std::string& out, const std::vector<int32_t>& ids);  // [1,2,3]

// Appends "matched_stop":…,"stop_reason":…, each null, an id or a string. The first is SGLang's.
// The second is vLLM's, which is null if the completion ended by itself.
void append_matched_stop(std::string& out, const Tokenizer& tokenizer,
                         const std::variant<std::monostate, int32_t, std::string>& matched);
// Appends null, an id or a string.
void append_stop(std::string& out,
                 const std::variant<std::monostate, int32_t, std::string>& matched);

// Log-probabilities of /v1/completions: four lists of equal length, built over several events.
class CompletionLogprobs {
 public:
  explicit CompletionLogprobs(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void add(const TokenLogprob& token);
  // Adds a token without a log-probability, such as the first of a prompt.
  void add_without(int32_t id);

  // Appends {"tokens":…,"token_logprobs":…,"top_logprobs":…,"text_offset":…} of the tokens added
  // since the last call. Offsets are in characters and continue across calls.
  void take(std::string& out);

 private:
  void add_token(int32_t id);

  const Tokenizer& tokenizer_;
  std::string tokens_ = "[", logprobs_ = "[", top_ = "[", offsets_ = "[";
  int64_t offset_ = 0;
};

}  // namespace fathom
