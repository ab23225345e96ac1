// Tool calls of GLM-4.7 and GLM-5:
//
//   <tool_call>f<arg_key>a</arg_key><arg_value>raw text</arg_value>
//   <arg_key>n</arg_key><arg_value>3</arg_value></tool_call>
//
// White space between tags is dropped, and one newline before a call belongs to it. The format does
// not say which values are strings: a value that the tool's schema declares as a string is one, and
// of others those that are not JSON.
#include <algorithm>
#include <utility>

#include "chat/python_json.h"
#include "chat/tool_calls.h"

namespace fathom {
namespace {

constexpr std::string_view kBegin = "<tool_call>";
constexpr std::string_view kBeginAfterLine = "\n<tool_call>";
constexpr std::string_view kEnd = "</tool_call>";
constexpr std::string_view kKeyOpen = "<arg_key>";
constexpr std::string_view kKeyClose = "</arg_key>";
constexpr std::string_view kValueOpen = "<arg_value>";
constexpr std::string_view kValueClose = "</arg_value>";

// Names of a function's parameters that are strings and nothing else.
std::vector<std::string> string_parameters(const Tool& tool) {
  std::vector<std::string> names;
  const json::value parameters = tool.parameters();
  if (!parameters.is_object()) return names;
  const json::value* properties = parameters.get_object().if_contains("properties");
  if (properties == nullptr || !properties->is_object()) return names;
  for (const auto& [name, schema] : properties->get_object()) {
    const json::value* type =
        schema.is_object() ? schema.get_object().if_contains("type") : nullptr;
    if (type != nullptr && type->is_string() && type->get_string() == "string") {
      names.emplace_back(name);
    }
  }
  return names;
}

class GlmCalls : public ToolCallStage {
 public:
  explicit GlmCalls(std::span<const Tool> tools) {
    for (const Tool& tool : tools) strings_.emplace_back(tool.name, string_parameters(tool));
  }

 protected:
  bool step(TextEnd end, StreamDelta& delta) override {
    switch (state_) {
      case State::kContent:
        return step_content(end, delta);
      case State::kName:
        return step_name(end, delta);
      case State::kCall:
        return step_call(end, delta);
      case State::kKey:
        return step_key(end, delta);
      case State::kBetween:
        return step_between(end, delta);
      case State::kValue:
        return step_value(end, delta);
    }
    return false;
  }

  // A call that the end has cut keeps what it has; its last value is as far as it came.
  void finish(TextEnd, StreamDelta& delta) override {
    if (state_ == State::kValue) add_arguments(encoded_value(), delta);
    if (saw_calls() && trim_space(held_).empty()) held_.clear();
  }

 private:
  enum class State { kContent, kName, kCall, kKey, kBetween, kValue };

  bool step_content(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = scan_markers(view, {kBeginAfterLine, kBegin}, end);
    if (saw_calls()) {  // white space between two calls
      take_stray(view.substr(0, scan.before), delta);
    } else {
      delta.content += view.substr(0, scan.before);
    }
    if (scan.found()) {
      held_ += view.substr(scan.before, scan.length);
      state_ = State::kName;
    }
    pending_.drop(scan.before + scan.length);
    return scan.found();
  }

  bool step_name(TextEnd end, StreamDelta& delta) {
    const std::string_view window = pending_.view().substr(0, kMaxToolName + kEnd.size());
    const MarkerScan scan = scan_markers(window, {kKeyOpen, kEnd, kBegin}, end, MarkerPlace::kCall);
    const bool unfinished = !scan.found() && window.size() == pending_.view().size();
    if (unfinished && end == TextEnd::kOpen) return false;
    if (unfinished && end == TextEnd::kCut) {
      pending_.drop(window.size());
      return false;
    }
    const std::string_view name = trim_space(window.substr(0, scan.before));
    if (scan.marker < 0 || scan.marker > 1 || !is_tool_name(name)) {
      release_held(delta);
      state_ = State::kContent;
      return true;
    }
    tool_ = name;
    begin_call(std::string_view(), name, delta);
    pending_.drop(scan.before);  // step_call() reads the tag
    state_ = State::kCall;
    return true;
  }

  // Parses between arguments.
  bool step_call(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = scan_markers(view, {kKeyOpen, kEnd, kBegin}, end, MarkerPlace::kCall);
    take_stray(view.substr(0, scan.before), delta);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    if (scan.marker == 0) {
      state_ = State::kKey;
      held_ += kKeyOpen;
      return true;
    }
    add_arguments(wrote_arguments() ? "}" : "{}", delta);
    held_ = scan.marker == 2 ? kBegin : std::string_view();
    state_ = scan.marker == 2 ? State::kName : State::kContent;
    return true;
  }

  bool step_key(TextEnd end, StreamDelta& delta) {
    const std::string_view window = pending_.view().substr(0, kMaxToolName + kKeyClose.size());
    const MarkerScan scan = scan_markers(window, {kKeyClose, kEnd}, end, MarkerPlace::kCall);
    const bool unfinished = !scan.found() && window.size() == pending_.view().size();
    if (unfinished && end == TextEnd::kOpen) return false;
    if (unfinished && end == TextEnd::kCut) {
      pending_.drop(window.size());
      return false;
    }
    if (scan.marker != 0) {
      release_held(delta);
      state_ = State::kCall;
      return true;
    }
    key_ = trim_space(window.substr(0, scan.before));
    held_ += window.substr(0, scan.before + scan.length);
    pending_.drop(scan.before + scan.length);
    state_ = State::kBetween;
    return true;
  }

  // Between a key and its value.
  bool step_between(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const size_t space = leading_space(view);
    const std::string_view rest = view.substr(space);
    if (rest.starts_with(kValueOpen)) {
      pending_.drop(space + kValueOpen.size());
      held_.clear();
      value_.clear();
      state_ = State::kValue;
      return true;
    }
    if (end == TextEnd::kOpen && kValueOpen.starts_with(rest)) return false;
    if (end == TextEnd::kCut && kValueOpen.starts_with(rest)) {
      pending_.drop(view.size());
      return false;
    }
    release_held(delta);
    state_ = State::kCall;
    return true;
  }

  bool step_value(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = scan_markers(view, {kValueClose}, end, MarkerPlace::kCall);
    value_ += view.substr(0, scan.before);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    add_arguments(encoded_value(), delta);
    state_ = State::kCall;
    return true;
  }

  // The argument with its key, as a part of an object.
  std::string encoded_value() const {
    std::string text = wrote_arguments() ? ", \"" : "{\"";
    append_json_escaped(text, key_);
    text += "\": ";
    if (!is_string_parameter() && parse_json(value_, "argument")) return text += trim_space(value_);
    text += '"';
    append_json_escaped(text, value_);
    return text += '"';
  }

  bool is_string_parameter() const {
    for (const auto& [tool, names] : strings_) {
      if (tool == tool_) return std::find(names.begin(), names.end(), key_) != names.end();
    }
    return false;
  }

  std::vector<std::pair<std::string, std::vector<std::string>>> strings_;  // [tools]
  State state_ = State::kContent;
  std::string tool_, key_;
  std::string value_;  // complete at its end tag
};

}  // namespace

std::unique_ptr<ToolCallStage> make_glm_stage(std::span<const Tool> tools) {
  return std::make_unique<GlmCalls>(tools);
}

}  // namespace fathom
