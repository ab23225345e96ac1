// Tool calls of GigaChat 3.1 and 3, one a message:
//
//   text<|function_call|>{"name": "f", "arguments": {"a": 1}}<|message_sep|>
//   text<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}
//
// The text ends at <|message_sep|>; of what follows only a call counts.
#include <algorithm>

#include "chat/tool_calls.h"

namespace fathom {
namespace {

constexpr std::string_view kCallMark = "<|function_call|>";
constexpr std::string_view kMessageMark = "<|message_sep|>";
constexpr std::string_view kCallRoleMark = "function call<|role_sep|>\n";
// Marks and white space around a name; a longer head is none.
constexpr size_t kMaxHead = kMaxToolName + 64;

// A call's text up to its arguments: {"name": "f", "arguments":
class CallHead {
 public:
  explicit CallHead(std::string_view text) : rest_(text) {
    parse();
    length_ = text.size() - rest_.size();
  }
  bool is_whole() const { return whole_; }
  bool is_begun() const { return begun_; }  // more text may make it whole
  std::string_view name() const { return name_; }
  size_t length() const { return length_; }

 private:
  void parse() {
    for (const std::string_view mark : {"{", "\"name\"", ":", "\""}) {
      if (!take(mark)) return;
    }
    const size_t end = rest_.find('"');
    if (end == std::string_view::npos) {
      begun_ = true;
      return;
    }
    name_ = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    for (const std::string_view mark : {",", "\"arguments\"", ":"}) {
      if (!take(mark)) return;
    }
    whole_ = true;
  }

  bool take(std::string_view mark) {
    rest_.remove_prefix(leading_space(rest_));
    if (rest_.starts_with(mark)) {
      rest_.remove_prefix(mark.size());
      return true;
    }
    begun_ = mark.starts_with(rest_);
    return false;
  }

  std::string_view rest_, name_;
  size_t length_ = 0;
  bool whole_ = false, begun_ = false;
};

// Finds the end of one JSON value in text that arrives in pieces.
class JsonValueEnd {
 public:
  // How many bytes of `text` belong to the value; is_found() then tells whether it has ended.
  size_t scan(std::string_view text) {
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (in_string_) {
        if (escaped_) {
          escaped_ = false;
        } else if (c == '\\') {
          escaped_ = true;
        } else if (c == '"') {
          in_string_ = false;
          found_ = depth_ == 0;
        }
        if (found_) return i + 1;
        continue;
      }
      if (c == '"') {
        in_string_ = true;
      } else if (c == '{' || c == '[') {
        ++depth_;
      } else if (c == '}' || c == ']') {
        if (depth_ == 0) {  // a number or a word ends with the call
          found_ = true;
          return i;
        }
        if (--depth_ == 0) {
          found_ = true;
          return i + 1;
        }
      }
    }
    return text.size();
  }
  bool is_found() const { return found_; }

 private:
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false, found_ = false;
};

class GigachatCalls : public ToolCallStage {
 public:
  explicit GigachatCalls(bool expect_tools) : expect_tools_(expect_tools) {}

 protected:
  bool step(TextEnd end, StreamDelta& delta) override {
    switch (state_) {
      case State::kContent:
        return step_content(end, delta);
      case State::kEnded:
        return step_ended(end);
      case State::kHead:
        return step_head(end, delta);
      case State::kArguments:
        return step_arguments(delta);
      case State::kDone:
        pending_.drop(pending_.view().size());
        return false;
    }
    return false;
  }
  void finish(TextEnd, StreamDelta& delta) override {
    if (state_ == State::kDone && saw_calls() && !wrote_arguments()) add_arguments("{}", delta);
  }

 private:
  enum class State { kContent, kEnded, kHead, kArguments, kDone };

  bool step_content(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = expect_tools_
                                ? scan_markers(view, {kMessageMark, kCallMark, kCallRoleMark}, end)
                                : scan_markers(view, {kMessageMark}, end);
    delta.content += view.substr(0, scan.before);
    const bool is_call = scan.found() && scan.marker > 0;
    if (is_call) held_ = view.substr(scan.before, scan.length);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    state_ = is_call ? State::kHead : expect_tools_ ? State::kEnded : State::kDone;
    return true;
  }

  // Behind the message's end.
  bool step_ended(TextEnd end) {
    pending_.drop(leading_space(pending_.view()));
    const std::string_view view = pending_.view();
    if (view.starts_with(kCallRoleMark)) {
      held_ = kCallRoleMark;
      pending_.drop(kCallRoleMark.size());
      state_ = State::kHead;
      return true;
    }
    if (end == TextEnd::kOpen && kCallRoleMark.starts_with(view)) return false;
    state_ = State::kDone;
    return true;
  }

  bool step_head(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const CallHead head(view.substr(0, kMaxHead));
    if (head.is_whole() && is_tool_name(head.name())) {
      begin_call(std::string_view(), head.name(), delta);
      pending_.drop(head.length());
      state_ = State::kArguments;
      return true;
    }
    const bool may_grow = head.is_begun() && view.size() < kMaxHead;
    if (may_grow && end == TextEnd::kOpen) return false;
    if (may_grow && end == TextEnd::kCut) {
      pending_.drop(view.size());
      return false;
    }
    release_held(delta);
    state_ = State::kContent;
    return true;
  }

  bool step_arguments(StreamDelta& delta) {
    if (!wrote_arguments()) pending_.drop(leading_space(pending_.view()));
    const std::string_view view = pending_.view();
    const size_t length = value_.scan(view);
    std::string_view arguments = view.substr(0, length);
    add_arguments(arguments, delta);
    pending_.drop(length);
    if (!value_.is_found()) return false;
    state_ = State::kDone;
    return true;
  }

  bool expect_tools_;
  State state_ = State::kContent;
  JsonValueEnd value_;
};

}  // namespace

std::unique_ptr<ToolCallStage> make_gigachat_stage(bool expect_tools) {
  return std::make_unique<GigachatCalls>(expect_tools);
}

}  // namespace fathom
