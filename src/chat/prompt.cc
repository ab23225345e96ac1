#include "chat/prompt.h"

#include <utility>

namespace fathom {
namespace {

constexpr std::string_view kBar = "｜";  // U+FF5C, not the ASCII bar

// Special tokens without bars: of reasoning, GLM's, and GigaChat's first.
constexpr std::string_view kTags[] = {
    "<s>",          "<think>",         "</think>",        "[gMASK]",    "<sop>",
    "<tool_call>",  "</tool_call>",    "<arg_key>",       "</arg_key>", "<arg_value>",
    "</arg_value>", "<tool_response>", "</tool_response>"};

// The length of the special token at the start of `text`, or 0: one of kTags, <|…|> and <｜…｜>
// without a bar inside. "<｜DSML｜invoke" is not one, because V3.2's tokenizer is not known to have
// it as a token.
size_t special_length(std::string_view text) {
  for (const std::string_view tag : kTags) {
    if (text.starts_with(tag)) return tag.size();
  }
  for (const std::string_view bar : {kBar, std::string_view("|")}) {
    if (!text.substr(1).starts_with(bar)) continue;
    const size_t inner = 1 + bar.size();
    const size_t end = text.find(bar, inner);
    if (end == std::string_view::npos || end == inner) return 0;
    return text.substr(end + bar.size()).starts_with('>') ? end + bar.size() + 1 : 0;
  }
  return 0;
}

}  // namespace

std::string Prompt::text() const {
  std::string all;
  for (const PromptSegment& segment : segments) all += segment.text;
  return all;
}

void PromptWriter::append(std::string_view words, bool is_markup) {
  if (words.empty()) return;
  if (segments_.empty() || segments_.back().is_markup != is_markup) {
    segments_.push_back({std::string(), is_markup});
  }
  segments_.back().text += words;
}

void PromptWriter::fixed(std::string_view words) {
  while (!words.empty()) {
    const size_t start = words.find_first_of("<[");
    append(words.substr(0, start), false);
    if (start == std::string_view::npos) return;
    words.remove_prefix(start);
    const size_t length = special_length(words);
    append(words.substr(0, length == 0 ? 1 : length), length != 0);
    words.remove_prefix(length == 0 ? 1 : length);
  }
}

void PromptWriter::text(std::string_view words) { append(words, false); }

Prompt PromptWriter::finish() && {
  Prompt prompt;
  prompt.segments = std::move(segments_);
  size_t last = prompt.segments.size();
  // R1's prompt ends with <think> and a newline.
  if (last > 1 && prompt.segments[last - 1] == PromptSegment{"\n", false}) --last;
  prompt.opens_reasoning = last > 0 && prompt.segments[last - 1].is_markup &&
                           prompt.segments[last - 1].text.ends_with("<think>");
  return prompt;
}

}  // namespace fathom
