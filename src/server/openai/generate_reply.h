// Answers of /generate, in SGLang's form, streamed and whole.
#pragma once

#include <string>
#include <vector>

#include "server/openai/reply_writer.h"

namespace fathom {

// What GenerateReply adds to the request's ReplySpec.
struct GenerateOptions {
  bool is_list = false;        // several prompts were asked: a list is the answer
  int64_t logprob_start = -1;  // from this token of the prompt on; -1: none of it
  int64_t top_logprobs = 0;    // alternatives that were asked for
  std::string rid = {};        // the request's own name for itself, if it has one
};

// {"text","output_ids","meta_info":{…}} of each choice; as SSE each event repeats all of the choice
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
