// POST /v1/completions: what may be in its body.
#pragma once

#include <optional>
#include <string>

#include "server/openai/sampling_fields.h"
#include "server/openai/schema.h"
#include "server/openai/structured_fields.h"

namespace fathom {

inline constexpr size_t kMaxPrompts = 256;  // in one request
inline constexpr int64_t kDefaultMaxTokens = 16;

// Texts or token ids, one or several.
struct PromptList {
  std::vector<std::string> texts;         // either these
  std::vector<std::vector<int32_t>> ids;  // or these
  bool is_list = false;                   // it was not a single prompt
  std::string problem;                    // why it is neither

  size_t size() const { return texts.size() + ids.size(); }
};
void read_value(const json::value& value, PromptList& out);
Type prompt_type();

struct CompletionRequest {
  PromptList prompt;
  std::optional<int64_t> max_tokens;  // kDefaultMaxTokens, where the context has room for them
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
