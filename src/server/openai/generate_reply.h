// Responses of /generate in SGLang's form, streamed and complete.
#pragma once

#include <string>
#include <vector>

#include "server/openai/reply_writer.h"

namespace fathom {

// Options of GenerateReply in addition to ReplySpec.
struct GenerateOptions {
  bool is_list = false;        // several prompts: the response is a list
  int64_t logprob_start = -1;  // first prompt token with log-probabilities; -1: none
  int64_t top_logprobs = 0;    // alternatives per token
  std::string rid = {};        // the client's request id; empty: none
};

// {"text","output_ids","meta_info":{…}} of each choice. In a stream each event repeats the choice
// so far, as SGLang does, and [DONE] ends the stream.
class GenerateReply : public ReplyWriter {
 public:
  GenerateReply(ReplySpec spec, GenerateOptions options);

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError& error, std::string& out) override;

 private:
  struct Choice {
    std::string text = {};
    std::vector<int32_t> ids = {};
    std::string logprobs = "[", top_logprobs = "[";
    std::string prompt_logprobs = "[", prompt_top_logprobs = "[";
    std::optional<Event> end = {};  // the last event
  };
  void add_logprobs(const std::vector<TokenLogprob>& tokens, std::string& list,
                    std::string& top) const;
  void write_choice(size_t index, std::string& out) const;

  const GenerateOptions options_;
  std::vector<Choice> choices_;
};

}  // namespace fathom
