// Requests whose course is known, and how they end. Test code only.
#pragma once

#include <utility>

#include "engine/event_queue.h"

namespace fathom {

// Greedy, of exactly max_tokens tokens; the prompt's ids count up from `first`, modulo 250.
inline Request plain_request(int64_t prompt, int64_t max_tokens = 4, int64_t first = 0) {
  Request request;
  for (int64_t i = 0; i < prompt; ++i) {
    request.prompt_ids.push_back(static_cast<int32_t>((first + i) % 250));
  }
  request.sampling.max_tokens = max_tokens;
  request.sampling.seed = 5;
  request.sampling.temperature = 0;
  request.sampling.ignore_eos = true;
  return request;
}

// Takes a request's events until it has ended. Returns the last one.
inline Event last_event(EventQueue& queue) {
  Event last;
  while (auto event = queue.next()) last = std::move(*event);
  return last;
}

}  // namespace fathom
