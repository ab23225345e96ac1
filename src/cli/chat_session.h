// A conversation with a running engine: its history, and how the next turn is generated.
#pragma once

#include <cstdio>
#include <string>

#include "chat/message.h"
#include "cli/answer.h"
#include "cli/loaded_engine.h"

namespace fathom {

struct ChatOptions {
  SamplingParams sampling;
  std::string system;
  bool thinking = false;
  bool show_reasoning = true;  // print it, dimmed; the history contains it either way
};

// Used by one thread. The engine must outlive it.
class ChatSession {
 public:
  ChatSession(Engine& engine, const Tokenizer& tokenizer, ChatFormat format, ChatOptions options);

  // Adds the user message `text`, streams the completion to `out` and adds it to the history.
  // Ctrl-C stops the completion and keeps what was generated. After an error the history is
  // unchanged.
  Result<> say(const std::string& text, std::FILE* out);

  void reset() { messages_.clear(); }  // keeps the system message
  void set_system(const std::string& text) { options_.system = text; }
  void set_thinking(bool thinking) { options_.thinking = thinking; }

  // Writes {"messages": […]} in the form of the HTTP API, reasoning as "reasoning_content".
  Result<> save(const std::string& path) const;

  std::string stats() const;

  // User and assistant messages only, alternating.
  const std::vector<Message>& messages() const { return messages_; }

 private:
  Conversation conversation() const;

  Engine& engine_;
  const Tokenizer& tokenizer_;
  const ChatFormat format_;
  ChatOptions options_;
  std::vector<Message> messages_;
  std::optional<Answer> last_;
};

}  // namespace fathom
