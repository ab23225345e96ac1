// From the engine's events to what a client reads. One class an endpoint and form (streamed,
// whole); this is what they share: counting, errors and the end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/openai/api_error.h"
#include "server/openai/served_model.h"

namespace fathom {

// A prompt as it went to the engine.
struct EncodedPrompt {
  std::vector<int32_t> ids;
  std::string text;               // only for echo
  bool opens_reasoning = false;   // the answer begins inside reasoning
  bool continues_answer = false;  // it begins behind text that the client gave
};

// What a writer must know of the request that it answers.
struct ReplySpec {
  const ServedModel* served = nullptr;
  ReplyIdentity identity;
  std::string model;  // as the request named it
  std::vector<EncodedPrompt> prompts;
  int n = 1;  // choices a prompt
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool return_token_ids = false;
  bool logprobs = false;
  bool prompt_logprobs = false;
  bool expect_tools = false;   // tool calls are parsed out of the text
  bool parallel_calls = true;  // false: calls after the first are dropped
  bool echo = false;           // the text begins with the prompt's
  bool drop_output = false;    // max_tokens was 0: the one token that the engine made is not shown

  int num_choices() const { return static_cast<int>(prompts.size()) * n; }
};

// Tokens of a whole reply.
struct ReplyUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reasoning_tokens = 0;

  // {"prompt_tokens":…,"completion_tokens":…,"total_tokens":…,…}
  std::string to_json() const;
};

// One object a request; used by one thread at a time. Writes to strings and nothing else.
class ReplyWriter {
 public:
  virtual ~ReplyWriter() = default;

  // Takes an event of the request made from prompts[prompt] and appends to `out` what can be sent
  // now: server-sent events of a stream; of a whole reply nothing until the last event, then the
  // body. After the end nothing is written.
  void push(size_t prompt, const Event& event, std::string& out);

  // Ends the reply with an error that is not the engine's (a deadline, a shutdown). A stream's
  // error event is appended to `out`; a whole reply has none, failure() is its answer.
  void fail(ApiError error, std::string& out);

  // Nothing more will be written: the reply is complete or has failed.
  bool ended() const { return ended_; }
  // Why a reply failed. The engine's requests that still run should be aborted.
  const std::optional<ApiError>& failure() const { return failure_; }

  bool streams() const { return spec_.stream; }
  virtual ErrorShape error_shape() const { return ErrorShape::kOpenAi; }
  // What a stream may be sent while it waits.
  virtual std::string_view keep_alive() const { return ": keep-alive\n\n"; }

  const ReplySpec& spec() const { return spec_; }
  const std::string& id() const { return id_; }  // as the reply has it

 protected:
  explicit ReplyWriter(ReplySpec spec);

  virtual void write_event(size_t choice, const Event& event, std::string& out) = 0;
  virtual void write_end(std::string& out) = 0;
  virtual void write_failure(const ApiError& error, std::string& out) = 0;

  // Complete when all choices have ended, so far before.
  ReplyUsage usage() const;
  // The number of the current event's first tokens that are reasoning, </think> included.
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

// The error of an event that ended with kError or kAbort.
ApiError error_of(const Event& event);

}  // namespace fathom
