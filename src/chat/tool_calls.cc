#include "chat/tool_calls.h"

#include <algorithm>

namespace fathom {
namespace {

class ContentOnly : public ToolCallStage {
 protected:
  bool step(TextEnd, StreamDelta& delta) override {
    delta.content += pending_.view();
    pending_.drop(pending_.view().size());
    return false;
  }
  void finish(TextEnd, StreamDelta&) override {}
};

}  // namespace

bool is_tool_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxToolName &&
         std::none_of(name.begin(), name.end(), [](char c) {
           return c == '<' || c == '"' || (c >= 0 && c < 0x20) || c == 0x7F;
         });
}

void ToolCallStage::consume(TextEnd end, StreamDelta& delta) {
  while (step(end, delta)) {
  }
  pending_.compact();
  if (end == TextEnd::kOpen) return;
  finish(end, delta);
  // If the text was cut, the beginning of a call is dropped.
  if (end == TextEnd::kCut) held_.clear();
  release_held(delta);
}

void ToolCallStage::begin_call(std::string_view id, std::string_view name, StreamDelta& delta) {
  held_.clear();
  delta.tool_calls.push_back({calls_++, std::string(id), std::string(name), std::string()});
  wrote_arguments_ = false;
}

void ToolCallStage::add_arguments(std::string_view text, StreamDelta& delta) {
  if (text.empty()) return;
  wrote_arguments_ = true;
  const int index = calls_ - 1;
  if (delta.tool_calls.empty() || delta.tool_calls.back().index != index) {
    delta.tool_calls.push_back({index, std::string(), std::string(), std::string()});
  }
  delta.tool_calls.back().arguments += text;
}

void ToolCallStage::take_stray(std::string_view text, StreamDelta& delta) {
  while (!text.empty()) {
    const size_t space = leading_space(text);
    held_ += text.substr(0, space);
    text.remove_prefix(space);
    size_t words = 0;
    while (words < text.size() && !is_space(text[words])) ++words;
    if (words == 0) return;
    release_held(delta);
    delta.content += text.substr(0, words);
    text.remove_prefix(words);
  }
}

void ToolCallStage::release_held(StreamDelta& delta) {
  delta.content += held_;
  held_.clear();
}

std::unique_ptr<ToolCallStage> make_content_only_stage() { return std::make_unique<ContentOnly>(); }

}  // namespace fathom
