#include "cli/answer_printer.h"

#include <fmt/format.h>

#include <cmath>

#include "cli/answer.h"

namespace fathom {

AnswerPrinter::AnswerPrinter(std::FILE* out, std::optional<ChatFormat> format, bool opens_reasoning,
                             bool show_reasoning)
    : out_(out), style_(has_color(out)), show_reasoning_(show_reasoning) {
  // No tools are offered, so tool markers are content.
  if (format) parser_.emplace(*format, opens_reasoning, false);
}

void AnswerPrinter::push(const std::string& text) {
  if (text.empty()) return;
  if (parser_) {
    show(parser_->push(text));
  } else {
    answer_.content += text;
    write(text);
  }
  std::fflush(out_);
}

void AnswerPrinter::finish() {
  if (parser_) show(parser_->finish());
  if (in_reasoning_) write(style_.reset);
  in_reasoning_ = false;
  if (last_ != '\n') write("\n");
  std::fflush(out_);
}

void AnswerPrinter::show(const StreamDelta& delta) {
  answer_.add(delta);
  if (show_reasoning_ && !delta.reasoning.empty()) {
    if (!in_reasoning_) write(style_.dim);
    in_reasoning_ = true;
    write(delta.reasoning);
  }
  if (delta.content.empty()) return;
  if (in_reasoning_) {
    const bool line_ended = last_ == '\n';
    write(style_.reset);
    write(line_ended ? "\n" : "\n\n");
    in_reasoning_ = false;
  }
  write(delta.content);
}

void AnswerPrinter::write(std::string_view text) {
  if (text.empty()) return;
  std::fwrite(text.data(), 1, text.size(), out_);
  if (text.front() != '\033') last_ = text.back();
}

std::string grouped(double number) {
  if (number < 100) return fmt::format("{:.1f}", number);
  std::string digits = fmt::format("{:.0f}", number);
  for (int64_t place = static_cast<int64_t>(digits.size()) - 3; place > 0; place -= 3) {
    digits.insert(static_cast<size_t>(place), 1, ',');
  }
  return digits;
}

std::string speed_line(const Answer& answer) {
  std::string line = fmt::format("{} tokens, first after {:.1f} ms", answer.ids.size(),
                                 answer.timings.ttft_seconds() * 1e3);
  if (const double rate = answer.decode_tokens_per_second(); rate > 0) {
    line += fmt::format(", then {} tokens/s", grouped(rate));
  }
  if (const Usage& usage = answer.usage; usage.draft_tokens > 0) {
    const auto tokens = static_cast<double>(usage.completion_tokens);
    line += fmt::format(", {:.2f} tokens a step with {} of {} drafts accepted",
                        tokens / (tokens - static_cast<double>(usage.accepted_tokens)),
                        usage.accepted_tokens, usage.draft_tokens);
  }
  line += fmt::format(" (prompt of {} tokens)", answer.usage.prompt_tokens);
  if (answer.finish == FinishReason::kLength) line += "; cut off at the length limit";
  if (answer.finish == FinishReason::kAbort) line += "; stopped";
  return line;
}

}  // namespace fathom
