// Body of POST /v1/completions.
#pragma once

#include <optional>
#include <string>

#include "server/openai/sampling_fields.h"
#include "server/openai/schema.h"
#include "server/openai/structured_fields.h"

namespace fathom {

inline constexpr size_t kMaxPrompts = 256;  // per request
inline constexpr int64_t kDefaultMaxTokens = 16;

// One or several prompts, either as texts or as token ids; the other list is empty.
struct PromptList {
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> ids;
  bool is_list = false;  // false: a single prompt
  std::string problem;   // why it is neither; empty: valid

  size_t size() const { return texts.size() + ids.size(); }
};
void read_value(const json::value& value, PromptList& out);
Type prompt_type();

struct CompletionRequest {
  PromptList prompt;
  std::optional<int64_t> max_tokens;  // default: kDefaultMaxTokens, or what the context has left
  std::optional<int64_t> logprobs;
  bool echo = false;
  bool add_special_tokens = true;
  std::string suffix;
  std::optional<int64_t> best_of;
  ReplyFields reply;
  SamplingFields sampling;
  StructuredFields structured;

  static const ObjectSchema& schema();
};

}  // namespace fathom
