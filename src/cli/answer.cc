#include "cli/answer.h"

#include <cmath>
#include <cstdlib>

#include "cli/terminal.h"
#include "engine/event_queue.h"

namespace fathom {
namespace {

// The double with the fewest digits that rounds to this float: -0.1, not -0.10000000149011612. JSON
// has no infinities; a token with probability 0 gets null.
json::value json_number(float value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{}", value).c_str(), nullptr);
}

double milliseconds(double seconds) { return std::round(seconds * 1e6) / 1e3; }

json::object logprob_json(const TokenLogprob& token) {
  json::array top;
  for (const auto& [id, logprob] : token.top) {
    top.push_back({{"id", id}, {"logprob", json_number(logprob)}});
  }
  return {{"id", token.id}, {"logprob", json_number(token.logprob)}, {"top", std::move(top)}};
}

json::object choice_json(const Answer& answer, bool with_logprobs) {
  json::object object;
  object["ids"] = json::value_from(answer.ids);
  object["text"] = answer.text;
  json::value& logprobs = object["logprobs"];
  if (with_logprobs) {
    json::array& list = logprobs.emplace_array();
    for (const TokenLogprob& token : answer.logprobs) list.push_back(logprob_json(token));
  }
  return object;
}

json::value finish_json(const Answer& answer) {
  return answer.finish ? json::value(name_of(*answer.finish)) : json::value();
}

json::object usage_json(const std::vector<Answer>& answers) {
  int64_t completion = 0, preemptions = 0, drafts = 0, accepted = 0;
  for (const Answer& answer : answers) {
    completion += answer.usage.completion_tokens;
    preemptions += answer.usage.preemptions;
    drafts += answer.usage.draft_tokens;
    accepted += answer.usage.accepted_tokens;
  }
  const int64_t prompt = answers.front().usage.prompt_tokens;
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"cached_tokens", answers.front().usage.cached_tokens},
          {"preemptions", preemptions},
          {"draft_tokens", drafts},
          {"accepted_tokens", accepted}};
}

json::object timings_json(const Answer& answer) {
  const RequestTimings& timings = answer.timings;
  return {{"queue_ms", milliseconds(timings.queue_seconds())},
          {"ttft_ms", milliseconds(timings.ttft_seconds())},
          {"decode_ms", milliseconds(timings.decode_seconds())},
          {"total_ms", milliseconds(timings.total_seconds())},
          {"decode_tokens_per_second", std::round(answer.decode_tokens_per_second() * 10) / 10}};
}

}  // namespace

void Answer::add(const Event& event) {
  ids.insert(ids.end(), event.ids.begin(), event.ids.end());
  text += event.text;
  logprobs.insert(logprobs.end(), event.logprobs.begin(), event.logprobs.end());
  prompt_logprobs.insert(prompt_logprobs.end(), event.prompt_logprobs.begin(),
                         event.prompt_logprobs.end());
  if (!event.finish) return;
  finish = event.finish;
  error = event.error;
  usage = event.usage;
  timings = event.timings;
}

double Answer::decode_tokens_per_second() const {
  const double seconds = timings.decode_seconds();
  return ids.size() < 2 || seconds <= 0 ? 0 : static_cast<double>(ids.size() - 1) / seconds;
}

Result<std::vector<Answer>> generate(Engine& engine, Request request,
                                     const std::function<void(const Event&)>& on_event) {
  std::vector<Answer> answers(static_cast<size_t>(request.sampling.n));
  EventQueue events;
  FATHOM_TRY(const RequestId id, engine.submit(std::move(request), events.sink()));
  bool aborted = false;
  while (!events.ended()) {
    // Events wake this thread at once; the timeout is for polling Ctrl-C.
    const auto event = events.next_for(std::chrono::milliseconds(50));
    if (event) {
      answers[static_cast<size_t>(event->index)].add(*event);
      on_event(*event);
    }
    if (!aborted && InterruptWatch::interrupted()) {
      engine.abort(id);
      aborted = true;
    }
  }
  for (const Answer& answer : answers) {
    if (answer.finish == FinishReason::kError) return tl::unexpected<Status>(answer.error);
  }
  return answers;
}

json::object answers_json(const std::vector<int32_t>& prompt_ids,
                          const std::vector<Answer>& answers, const SamplingParams& sampling) {
  const Answer& first = answers.front();
  const bool with_logprobs = sampling.logprobs >= 0;
  json::object object{{"prompt_ids", json::value_from(prompt_ids)}};
  for (auto& [key, value] : choice_json(first, with_logprobs)) object[key] = std::move(value);
  json::value prompt_logprobs;
  if (sampling.prompt_logprobs >= 0) {
    json::array& list = prompt_logprobs.emplace_array();
    for (const auto& token : first.prompt_logprobs) {
      list.push_back(token ? json::value(logprob_json(*token)) : json::value());
    }
  }
  object["prompt_logprobs"] = std::move(prompt_logprobs);
  object["finish_reason"] = finish_json(first);
  object["usage"] = usage_json(answers);
  object["timings"] = timings_json(first);
  if (answers.size() > 1) {
    json::array& choices = object["choices"].emplace_array();
    for (size_t i = 0; i < answers.size(); ++i) {
      json::object choice{{"index", i}};
      for (auto& [key, value] : choice_json(answers[i], with_logprobs)) {
        choice[key] = std::move(value);
      }
      choice["finish_reason"] = finish_json(answers[i]);
      choice["timings"] = timings_json(answers[i]);
      choices.push_back(std::move(choice));
    }
  }
  return object;
}

}  // namespace fathom
