// The reference for a request's output, computed serially: no batch, no pages, no chunks, the whole
// text decoded again after each token. Test code only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/fake_runner.h"
#include "engine/request.h"

namespace fathom {

// All events of one choice, concatenated.
struct Answer {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<TokenLogprob> logprobs;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  std::optional<FinishReason> finish;
  std::variant<std::monostate, int32_t, std::string> matched_stop;
  std::string error;  // of kError
};

// Precondition: the request has a seed and max_tokens.
Answer serial_answer(const FakeModel& model, const Tokenizer& tokenizer, const Request& request,
                     int index);

// Collects the events of all choices. Fails the test on a wrong order.
class AnswerCollector {
 public:
  explicit AnswerCollector(int n) : answers(static_cast<size_t>(n)) {}
  void add(const Event& event);

  std::vector<Answer> answers;
  std::vector<Usage> usages;
  int64_t accepted_drafts = 0;  // an event has one step's tokens: all but the first were drafts
  int num_finals = 0;
  bool last = false;
};

void expect_equal(const Answer& actual, const Answer& expected, const std::string& what);

}  // namespace fathom
