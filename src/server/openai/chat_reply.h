// Responses of /v1/chat/completions, streamed and complete.
#pragma once

#include <string>
#include <vector>

#include "server/openai/chat_choice.h"
#include "server/openai/reply_writer.h"

namespace fathom {

// "chat.completion.chunk" events. A choice's first chunk has the role, its last the finish_reason.
// An optional usage chunk and [DONE] follow. An error ends the stream without [DONE].
class ChatStream : public ReplyWriter {
 public:
  explicit ChatStream(ReplySpec spec);

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError& error, std::string& out) override;

 private:
  struct Choice {
    ChatChoice answer;
    bool started = false;
  };
  void write_first(size_t choice, std::string& out) const;
  void close_chunk(size_t choice, std::string& out) const;

  std::string head_;  // start of every chunk, up to the choice's index
  std::string base_;  // start of every chunk, up to the list of choices
  std::vector<Choice> choices_;
};

// One "chat.completion" object.
class ChatCollector : public ReplyWriter {
 public:
  explicit ChatCollector(ReplySpec spec);

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError&, std::string&) override {}

 private:
  struct Choice {
    ChatChoice answer;
    ParsedAnswer parsed = {};
    std::string logprobs = "[";
    std::vector<int32_t> ids = {};
    FinishReason finish = FinishReason::kStop;
    std::variant<std::monostate, int32_t, std::string> matched_stop = {};
  };
  void write_choice(size_t index, std::string& out) const;

  std::vector<Choice> choices_;
  std::string prompt_logprobs_ = "null";
};

}  // namespace fathom
