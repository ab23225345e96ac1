// Responses of /v1/responses, streamed and complete.
#pragma once

#include <string>
#include <vector>

#include "server/openai/chat_choice.h"
#include "server/openai/reply_writer.h"

namespace fathom {

// Streamed: response.created, response.in_progress, then the output items in order (reasoning,
// message, function_call), each with its added, delta and done events, then response.completed,
// .incomplete or .failed. Complete: the response object alone. Both assemble the items with the
// same code.
class ResponsesReply : public ReplyWriter {
 public:
  // `echo`: the response's fields that repeat the request, as `"key":value,…`.
  ResponsesReply(ReplySpec spec, std::string echo);

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError& error, std::string& out) override;

 private:
  enum class Item { kNone, kReasoning, kMessage, kCall };
  enum class State { kInProgress, kCompleted, kIncomplete, kFailed };

  void start(std::string& out);
  void open(Item item, const ToolCallDelta* call, std::string& out);
  void close(bool incomplete, std::string& out);
  void add_text(std::string_view text, std::string& out);
  void take_logprobs();

  // Appends one event: type, sequence number, and `fields` as `"key":value,…`.
  void emit(std::string_view type, const std::string& fields, std::string& out);
  std::string place() const;  // "item_id":…,"output_index":…
  // Returns the current item's content part, as far as it is complete.
  std::string part() const;
  std::string item(std::string_view status) const;
  std::string response(State state, const ApiError* error) const;

  const std::string echo_;
  ChatChoice answer_;
  bool started_ = false;
  bool cut_ = false;  // max_output_tokens was reached
  int64_t sequence_ = 0;

  Item current_ = Item::kNone;
  std::string item_id_, text_, logprobs_, pending_logprobs_;
  std::string call_id_, call_name_;
  int num_items_ = 0;   // opened so far
  std::string output_;  // completed items
};

}  // namespace fathom
