// Responses of /v1/messages in Anthropic's form, streamed and complete.
#pragma once

#include <string>
#include <vector>

#include "server/openai/chat_choice.h"
#include "server/openai/reply_writer.h"

namespace fathom {

// Events: message_start, then the blocks in order (content_block_start, _delta, _stop),
// message_delta with the stop reason, message_stop. An "error" event ends the stream.
class MessagesStream : public ReplyWriter {
 public:
  explicit MessagesStream(ReplySpec spec);
  ErrorShape error_shape() const override { return ErrorShape::kAnthropic; }
  std::string_view keep_alive() const override {
    return "event: ping\ndata: {\"type\":\"ping\"}\n\n";
  }

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError& error, std::string& out) override;

 private:
  enum class Block { kNone, kThinking, kText, kToolUse };
  void start(std::string& out);
  void open(Block block, const ToolCallDelta* call, std::string& out);
  void close(std::string& out);
  void write_delta(std::string_view type, std::string_view key, std::string_view text,
                   std::string& out) const;

  ChatChoice answer_;
  Block block_ = Block::kNone;
  int num_blocks_ = 0;  // opened so far
  bool started_ = false;
};

// One "message" object.
class MessagesCollector : public ReplyWriter {
 public:
  explicit MessagesCollector(ReplySpec spec);
  ErrorShape error_shape() const override { return ErrorShape::kAnthropic; }

 protected:
  void write_event(size_t choice, const Event& event, std::string& out) override;
  void write_end(std::string& out) override;
  void write_failure(const ApiError&, std::string&) override {}

 private:
  ChatChoice answer_;
  ParsedAnswer parsed_;
  Event end_;
};

}  // namespace fathom
