#include "server/openai/completion_request.h"

#include <algorithm>

namespace fathom {

Type prompt_type() {
  const Type id = integer(0, kMaxInt32);
  return one_of({string(), array_of(one_of({string(), id, array_of(id, 1)}), 1)});
}

void read_value(const json::value& value, PromptList& out) {
  if (value.is_string()) {
    read_value(value, out.texts.emplace_back());
    return;
  }
  const json::array& list = value.get_array();
  const auto all = [&](auto&& is_one) { return std::all_of(list.begin(), list.end(), is_one); };
  if (all([](const json::value& item) { return item.is_number(); })) {
    read_value(value, out.ids.emplace_back());
    return;
  }
  out.is_list = true;
  if (all([](const json::value& item) { return item.is_string(); })) {
    read_value(value, out.texts);
  } else if (all([](const json::value& item) { return item.is_array(); })) {
    read_value(value, out.ids);
  } else {
    out.problem = "mixes texts, token ids and lists of them, expected only one of these";
  }
  if (out.size() > kMaxPrompts) {
    out.problem = fmt::format("has {} prompts, at most {} are allowed", out.size(), kMaxPrompts);
  }
}

const ObjectSchema& CompletionRequest::schema() {
  using F = CompletionRequest;
  static const ObjectSchema kSchema =
      SchemaOf<F>("CompletionRequest")
          .required("prompt", &F::prompt, prompt_type(), "A text, token ids, or a list of either")
          .field("max_tokens", &F::max_tokens, integer(0, kMaxInt32),
                 "Longest answer in tokens; 16 without it, or what the context has room for")
          .field("logprobs", &F::logprobs, integer(0, kMaxTopLogprobs),
                 "Report log-probabilities, with this many alternatives")
          .field("echo", &F::echo, boolean(), "The text begins with the prompt")
          .field("add_special_tokens", &F::add_special_tokens, boolean(),
                 "Begin a text with the beginning-of-sequence token, if the model expects one")
          .field("suffix", &F::suffix, string(),
                 "Fill in the middle: the answer goes between the prompt and this text")
          .field("best_of", &F::best_of, integer_up_to(1, &RequestLimits::max_choices),
                 "Must equal n")
          .include(&F::reply)
          .include(&F::sampling)
          .include(&F::structured)
          .build();
  return kSchema;
}

}  // namespace fathom
