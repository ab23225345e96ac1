// Prints a streamed completion for a person: content unchanged, reasoning dimmed.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "chat/stream_parser.h"
#include "cli/terminal.h"
#include "engine/request.h"

namespace fathom {

// Writes pieces of one completion to `out` as they arrive. One thread.
class AnswerPrinter {
 public:
  // Splits the text by the chat format; without a format (raw prompts) everything is content. With
  // show_reasoning false reasoning is not printed, but kept in answer().
  AnswerPrinter(std::FILE* out, std::optional<ChatFormat> format, bool opens_reasoning,
                bool show_reasoning);

  void push(const std::string& text);
  void finish();  // the end of the completion; completes the line

  const ParsedAnswer& answer() const { return answer_; }

 private:
  void show(const StreamDelta& delta);
  void write(std::string_view text);

  std::FILE* out_;
  const Style style_;
  const bool show_reasoning_;
  std::optional<StreamParser> parser_;
  ParsedAnswer answer_;
  bool in_reasoning_ = false;
  char last_ = '\n';
};

// TTFT and speed in one line: "12 tokens, first after 8.1 ms, then 1,523 tokens/s; prompt 21
// tokens".
struct Answer;
std::string speed_line(const Answer& answer);

// 1523.4 as "1,523"; numbers below 100 with one decimal.
std::string grouped(double number);

}  // namespace fathom
