#include "cli/chat_session.h"

#include <fstream>

#include "chat/prompt_ids.h"
#include "chat/python_json.h"
#include "cli/answer_printer.h"
#include "cli/speculation_report.h"

namespace fathom {

ChatSession::ChatSession(Engine& engine, const Tokenizer& tokenizer, ChatFormat format,
                         ChatOptions options)
    : engine_(engine), tokenizer_(tokenizer), format_(format), options_(std::move(options)) {}

Conversation ChatSession::conversation() const {
  Conversation conversation;
  conversation.thinking = options_.thinking;
  if (!options_.system.empty()) {
    conversation.messages.push_back(plain_message(Role::kSystem, options_.system));
  }
  conversation.messages.insert(conversation.messages.end(), messages_.begin(), messages_.end());
  return conversation;
}

Result<> ChatSession::say(const std::string& text, std::FILE* out) {
  messages_.push_back(plain_message(Role::kUser, text));
  const auto answered = [&]() -> Result<Message> {
    FATHOM_TRY(const Prompt prompt, render(format_, conversation()));
    Request request;
    request.prompt_ids = encode_prompt(tokenizer_, prompt);
    request.sampling = options_.sampling;
    AnswerPrinter printer(out, format_, prompt.opens_reasoning, options_.show_reasoning);
    const auto answers = generate(engine_, std::move(request),
                                  [&](const Event& event) { printer.push(event.text); });
    printer.finish();
    if (!answers) return tl::unexpected<Status>(answers.error());
    last_ = answers->front();
    Message message = plain_message(Role::kAssistant, printer.answer().content);
    message.reasoning = printer.answer().reasoning;
    return message;
  }();
  if (!answered) {
    messages_.pop_back();
    return tl::unexpected<Status>(answered.error());
  }
  messages_.push_back(*answered);
  return {};
}

Result<> ChatSession::save(const std::string& path) const {
  json::array list;
  for (const Message& message : conversation().messages) {
    json::object object{{"role", role_name(message.role)}, {"content", message.text()}};
    if (!message.reasoning.empty()) object["reasoning_content"] = message.reasoning;
    list.push_back(std::move(object));
  }
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream << to_python_json(json::object{{"messages", std::move(list)}}) << '\n';
  stream.close();
  if (!stream) return invalid("{}: cannot be written", path);
  return {};
}

std::string ChatSession::stats() const {
  const EngineStats engine = engine_.stats();
  std::string text = fmt::format(
      "{} messages; {} prompt tokens read, {} of them from the cache, and {} generated in all; "
      "cache: {} of {} pages",
      messages_.size(), engine.prompt_tokens, engine.cached_tokens, engine.generated_tokens,
      engine.pages_used + engine.pages_cached, engine.pages_total);
  if (const std::string drafts = speculation_line(engine.speculation); !drafts.empty()) {
    text += "\n" + drafts.substr(0, drafts.size() - 1);
  }
  if (last_) text += "\nlast answer: " + speed_line(*last_);
  return text;
}

}  // namespace fathom
