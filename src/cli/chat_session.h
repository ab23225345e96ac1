// A conversation with a running engine: what was said, and how the next answer is made.
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
  bool show_reasoning = true;  // print it, dimmed; the history has it either way
};

// One thread. The engine must outlive it.
class ChatSession {
 public:
  ChatSession(Engine& engine, const Tokenizer& tokenizer, ChatFormat format, ChatOptions options);

  // Says `text`, streams the answer to `out` and remembers both. Ctrl-C stops the answer; what had
  // been said by then stays. After an error the conversation is as it was before.
  Result<> say(const std::string& text, std::FILE* out);

  void reset() { messages_.clear(); }  // forgets what was said; the system message stays
  void set_system(const std::string& text) { options_.system = text; }
  void set_thinking(bool thinking) { options_.thinking = thinking; }

  // {"messages": […]} as the HTTP interfaces take it; reasoning as "reasoning_content".
  Result<> save(const std::string& path) const;

  std::string stats() const;

  // Nothing but user and assistant messages, in turn.
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
