// Shared by tests of the wire formats: a served model without an engine, and completions as the
// events that an engine would send. Test code only.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "server/openai/generation.h"
#include "tokenizer/detokenizer.h"

namespace fathom {

// Returns the bundled model's tokenizer and chat format, with a context of 2,048 tokens.
const ServedModel& tiny_model();

inline constexpr ReplyIdentity kTestIdentity{.nonce = 42, .created = 1'700'000'001};

// One choice's completion, one token per event. Log-probabilities are invented, with `top`
// alternatives.
struct ScriptedAnswer {
  std::string text;
  FinishReason finish = FinishReason::kStop;
  std::string stop = {};  // stop string that ended it; empty: the end-of-sequence token
  int top = -1;           // alternatives; -1: no log-probabilities
  int prompt_top = -1;
  int64_t cached_tokens = 0;
};

inline TokenLogprob made_up_logprob(int32_t id, int top) {
  TokenLogprob token{id, -0.25f, {}};
  for (int i = 0; i < top; ++i) {
    token.top.emplace_back(i == 0 ? id : 100 + i, -0.25f - static_cast<float>(i));
  }
  return token;
}

inline std::vector<Event> events_of(const ScriptedAnswer& answer, const Request& request,
                                    int index) {
  const Tokenizer& tokenizer = *tiny_model().tokenizer;
  std::vector<int32_t> ids = tokenizer.encode(answer.text);
  const bool ends = answer.finish == FinishReason::kStop && answer.stop.empty();
  if (ends) ids.push_back(*tokenizer.eos_id());
  IncrementalDetokenizer detokenizer(tokenizer);
  std::vector<Event> events;
  for (size_t i = 0; i < ids.size(); ++i) {
    Event event;
    event.index = index;
    event.ids = {ids[i]};
    const bool last = i + 1 == ids.size();
    if (!(ends && last)) event.text = detokenizer.push(ids[i]);
    if (answer.top >= 0) event.logprobs.push_back(made_up_logprob(ids[i], answer.top));
    if (i == 0 && index == 0 && answer.prompt_top >= 0) {
      event.prompt_logprobs.emplace_back();
      for (size_t j = 1; j < request.prompt_ids.size(); ++j) {
        event.prompt_logprobs.push_back(made_up_logprob(request.prompt_ids[j], answer.prompt_top));
      }
    }
    if (last) {
      event.text += detokenizer.flush();
      event.finish = answer.finish;
      if (ends) event.matched_stop = ids[i];
      if (!answer.stop.empty()) event.matched_stop = answer.stop;
      event.usage.cached_tokens = answer.cached_tokens;
    }
    events.push_back(std::move(event));
  }
  return events;
}

// Merges two consecutive events of a choice.
inline void append_event(Event& first, const Event& second) {
  first.ids.insert(first.ids.end(), second.ids.begin(), second.ids.end());
  first.text += second.text;
  first.logprobs.insert(first.logprobs.end(), second.logprobs.begin(), second.logprobs.end());
  first.finish = second.finish;
  first.matched_stop = second.matched_stop;
  first.usage = second.usage;
}

inline std::vector<Event> merged_at(const std::vector<Event>& events, size_t cut) {
  std::vector<Event> result;
  for (size_t i = 0; i < events.size(); ++i) {
    if (i == 0 || i == cut) {
      result.push_back(events[i]);
    } else {
      append_event(result.back(), events[i]);
    }
  }
  return result;
}

// Returns the data of each server-sent event.
inline std::vector<std::string> sse_payloads(std::string_view stream) {
  std::vector<std::string> payloads;
  while (!stream.empty()) {
    const size_t end = stream.find("\n\n");
    EXPECT_NE(end, std::string_view::npos) << "an event without its end: " << stream;
    if (end == std::string_view::npos) break;
    std::string_view event = stream.substr(0, end);
    stream.remove_prefix(end + 2);
    if (const size_t line = event.find("\ndata: "); line != std::string_view::npos) {
      event.remove_prefix(line + 1);
    }
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    payloads.emplace_back(event.substr(6));
  }
  return payloads;
}

inline json::value parse_payload(const std::string& payload) {
  const auto value = parse_json(payload, "payload");
  EXPECT_TRUE(value) << value.error().message << "\n" << payload;
  return value.value_or(json::value());
}

}  // namespace fathom
