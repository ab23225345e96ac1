// Converts engine events to response bytes. One class per endpoint and form (streamed, complete);
// the base class does counting, errors and the end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chat/message.h"
#include "engine/request.h"
#include "server/openai/api_error.h"
#include "server/openai/served_model.h"

namespace fathom {

// A prompt as sent to the engine.
struct EncodedPrompt {
  std::vector<int32_t> ids;
  std::string text;               // filled for echo
  bool opens_reasoning = false;   // the completion begins inside reasoning
  bool continues_answer = false;  // the completion continues text of the client
};

// The request's properties that a writer needs.
struct ReplySpec {
  const ServedModel* served = nullptr;
  ReplyIdentity identity;
  std::string model;  // as the request names it
  std::vector<EncodedPrompt> prompts;
  int n = 1;  // choices per prompt
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool return_token_ids = false;
  bool logprobs = false;
  bool prompt_logprobs = false;
  bool expect_tools = false;       // parse tool calls from the text
  std::vector<Tool> tools;         // that the text may call
  bool parallel_calls = true;      // false: drop calls after the first
  bool echo = false;               // the text begins with the prompt's text
  std::string kv_transfer_params;  // of a complete reply, as JSON; empty: it has none
  // max_tokens is 0: the one token that the engine generates is dropped.
  bool drop_output = false;

  int num_choices() const { return static_cast<int>(prompts.size()) * n; }
};

// Token counts of a whole response.
struct ReplyUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reasoning_tokens = 0;
  int64_t draft_tokens = 0, accepted_tokens = 0;

  // {"prompt_tokens":…,"completion_tokens":…,"total_tokens":…,…}; accepted_tokens only with drafts
  std::string to_json() const;
  // ,"accepted_tokens":… for the end of an object; empty without drafts
  std::string accepted_field() const;
};

// One object per request, used by one thread at a time. Writes to strings only.
class ReplyWriter {
 public:
  virtual ~ReplyWriter() = default;

  // Consumes an event of prompts[prompt] and appends to `out` what can be sent now: the events of a
  // stream, or the body of a complete response after its last event. Appends nothing after the end.
  void push(size_t prompt, const Event& event, std::string& out);

  // Ends the response with an error from outside the engine (deadline, shutdown). A stream's error
  // event is appended to `out`. For a complete response nothing is appended: the caller sends
  // failure().
  void fail(ApiError error, std::string& out);

  // Returns whether the response is complete or failed; nothing more will be written.
  bool ended() const { return ended_; }
  // Returns why the response failed. The caller should abort the engine requests still running.
  const std::optional<ApiError>& failure() const { return failure_; }

  bool streams() const { return spec_.stream; }
  virtual ErrorShape error_shape() const { return ErrorShape::kOpenAi; }
  // Returns the bytes to send while a stream is idle.
  virtual std::string_view keep_alive() const { return ": keep-alive\n\n"; }

  const ReplySpec& spec() const { return spec_; }
  const std::string& id() const { return id_; }  // as in the response

 protected:
  explicit ReplyWriter(ReplySpec spec);

  virtual void write_event(size_t choice, const Event& event, std::string& out) = 0;
  virtual void write_end(std::string& out) = 0;
  virtual void write_failure(const ApiError& error, std::string& out) = 0;

  // Returns the counts so far; complete after all choices have ended.
  ReplyUsage usage() const;
  // Returns how many of the event's first tokens are reasoning, </think> included.
  size_t reasoning_ids() const { return reasoning_ids_; }
  int64_t completion_tokens(size_t choice) const { return tallies_[choice].completion_tokens; }
  const EncodedPrompt& prompt_of(size_t choice) const {
    return spec_.prompts[choice / static_cast<size_t>(spec_.n)];
  }
  void set_id(std::string id) { id_ = std::move(id); }

  const ReplySpec spec_;

 private:
  struct Tally {
    int64_t completion_tokens = 0, reasoning_tokens = 0, cached_tokens = 0;
    int64_t draft_tokens = 0, accepted_tokens = 0;
    bool in_reasoning = false;
    bool ended = false;
  };
  void count(Tally& tally, const Event& event);

  std::string id_;
  std::vector<Tally> tallies_;
  std::optional<int32_t> think_end_;
  size_t reasoning_ids_ = 0;
  size_t unfinished_;
  bool ended_ = false;
  std::optional<ApiError> failure_;
};

// Returns the error of an event that ended with kError or kAbort.
ApiError error_of(const Event& event);

}  // namespace fathom
