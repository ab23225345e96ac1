// Responses of /v1/completions, streamed and complete.
#pragma once

#include <string>
#include <vector>

#include "server/openai/reply_writer.h"
#include "server/openai/token_json.h"

namespace fathom {

// "text_completion" chunks, then [DONE]. Choice i of prompt p has index p * n + i.
class CompletionStream : public ReplyWriter {
 public:
  explicit CompletionStream(ReplySpec spec);

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError& error, std::string& out) override;

 private:
  struct Choice {
    CompletionLogprobs logprobs;
    bool started = false;
  };

  std::string base_;  // start of every chunk, up to the list of choices
  std::vector<Choice> choices_;
};

// One "text_completion" object.
class CompletionCollector : public ReplyWriter {
 public:
  explicit CompletionCollector(ReplySpec spec);

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError&, std::string&) override {}

 private:
  struct Choice {
    std::string text = {};
    std::vector<TokenLogprob> logprobs = {};
    std::vector<int32_t> ids = {};
    FinishReason finish = FinishReason::kStop;
    std::variant<std::monostate, int32_t, std::string> matched_stop = {};
  };
  void write_choice(size_t index, std::string& out) const;
  void write_logprobs(size_t index, std::string& out) const;

  std::vector<Choice> choices_;
  // [prompts]: log-probabilities of each prompt, from its first choice.
  std::vector<std::vector<std::optional<TokenLogprob>>> prompt_logprobs_;
};

}  // namespace fathom
