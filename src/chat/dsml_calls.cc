// Tool calls of V3.2: an XML-like form whose tags contain the mark ｜DSML｜.
//
//   <｜DSML｜function_calls>
//   <｜DSML｜invoke name="f">
//   <｜DSML｜parameter name="a" string="true">raw text</｜DSML｜parameter>
//   <｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>
//   </｜DSML｜invoke>
//   </｜DSML｜function_calls>
//
// Two newlines before the block belong to it. More lenient than the published parser: end tags of
// calls may be missing, text may follow, and a value that is not JSON becomes a string.
#include "chat/python_json.h"
#include "chat/tool_calls.h"

namespace fathom {
namespace {

constexpr std::string_view kBegin = "<｜DSML｜function_calls>";
constexpr std::string_view kBeginAfterLine = "\n<｜DSML｜function_calls>";
constexpr std::string_view kBeginAfterTwo = "\n\n<｜DSML｜function_calls>";
constexpr std::string_view kCallsEnd = "</｜DSML｜function_calls>";
constexpr std::string_view kInvoke = "<｜DSML｜invoke name=\"";
constexpr std::string_view kInvokeEnd = "</｜DSML｜invoke>";
constexpr std::string_view kParameter = "<｜DSML｜parameter name=\"";
constexpr std::string_view kParameterEnd = "</｜DSML｜parameter>";
constexpr std::string_view kTagEnd = "\">";

class DsmlCalls : public ToolCallStage {
 protected:
  bool step(TextEnd end, StreamDelta& delta) override {
    switch (state_) {
      case State::kContent:
        return step_content(end, delta);
      case State::kBlock:
        return step_block(end, delta);
      case State::kInvokeTag:
        return step_name(end, delta);
      case State::kCall:
        return step_call(end, delta);
      case State::kParameterTag:
        return step_parameter(end, delta);
      case State::kString:
      case State::kJson:
        return step_value(end, delta);
    }
    return false;
  }

  void finish(TextEnd, StreamDelta& delta) override {
    if (state_ == State::kJson) add_arguments(value_, delta);
    if (block_has_call_ && trim_space(held_).empty()) held_.clear();
  }

 private:
  enum class State { kContent, kBlock, kInvokeTag, kCall, kParameterTag, kString, kJson };

  bool step_content(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = scan_markers(view, {kBeginAfterTwo, kBeginAfterLine, kBegin}, end);
    delta.content += view.substr(0, scan.before);
    held_ = view.substr(scan.before, scan.length);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    block_has_call_ = false;
    state_ = State::kBlock;
    return true;
  }

  bool step_block(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = scan_markers(view, {kInvoke, kCallsEnd}, end, MarkerPlace::kCall);
    take_stray(view.substr(0, scan.before), delta);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    if (scan.marker == 0) {
      held_ += kInvoke;
      state_ = State::kInvokeTag;
      return true;
    }
    end_block(delta);
    return true;
  }

  void end_block(StreamDelta& delta) {
    if (block_has_call_) {
      held_.clear();
    } else {
      take_stray(kCallsEnd, delta);
    }
    state_ = State::kContent;
  }

  // A tag's attributes up to "\">", at most kMaxToolName bytes. `wait`: more text is needed.
  struct Attributes {
    bool wait = false;
    bool cut = false;
    bool complete = false;
    std::string_view text;
  };
  Attributes read_attributes(TextEnd end) const {
    const std::string_view window = pending_.view().substr(0, kMaxToolName + kTagEnd.size());
    const MarkerScan scan = scan_markers(window, {kTagEnd, "\n"}, end, MarkerPlace::kCall);
    const bool unfinished = !scan.found() && window.size() == pending_.view().size();
    return {.wait = unfinished && end == TextEnd::kOpen,
            .cut = unfinished && end == TextEnd::kCut,
            .complete = scan.marker == 0,
            .text = window.substr(0, scan.before)};
  }
  bool drop_cut_tag() {
    pending_.drop(pending_.view().size());
    return false;
  }

  bool step_name(TextEnd end, StreamDelta& delta) {
    const Attributes attributes = read_attributes(end);
    if (attributes.wait) return false;
    if (attributes.cut) return drop_cut_tag();
    if (!attributes.complete || !is_tool_name(attributes.text)) {
      release_held(delta);
      state_ = State::kBlock;
      return true;
    }
    begin_call(std::string_view(), attributes.text, delta);
    block_has_call_ = true;
    pending_.drop(attributes.text.size() + kTagEnd.size());
    state_ = State::kCall;
    return true;
  }

  // Parses between parameters.
  bool step_call(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan =
        scan_markers(view, {kParameter, kInvokeEnd, kInvoke, kCallsEnd}, end, MarkerPlace::kCall);
    take_stray(view.substr(0, scan.before), delta);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    if (scan.marker == 0) {
      held_ += kParameter;
      state_ = State::kParameterTag;
      return true;
    }
    add_arguments(wrote_arguments() ? "}" : "{}", delta);
    held_.clear();
    if (scan.marker == 1) {
      state_ = State::kBlock;
    } else if (scan.marker == 2) {
      held_ = kInvoke;
      state_ = State::kInvokeTag;
    } else {
      end_block(delta);
    }
    return true;
  }

  bool step_parameter(TextEnd end, StreamDelta& delta) {
    const Attributes attributes = read_attributes(end);
    if (attributes.wait) return false;
    if (attributes.cut) return drop_cut_tag();
    if (!attributes.complete) {
      release_held(delta);
      state_ = State::kCall;
      return true;
    }
    constexpr std::string_view kStringAttribute = "\" string=\"";
    const size_t split = attributes.text.find(kStringAttribute);
    const std::string_view name = attributes.text.substr(0, split);
    const bool is_string = split != std::string_view::npos &&
                           attributes.text.substr(split + kStringAttribute.size()) == "true";
    std::string text = wrote_arguments() ? ", " : "{";
    text += '"';
    append_json_escaped(text, name);
    text += is_string ? "\": \"" : "\": ";
    add_arguments(text, delta);
    pending_.drop(attributes.text.size() + kTagEnd.size());
    held_.clear();
    value_.clear();
    state_ = is_string ? State::kString : State::kJson;
    return true;
  }

  bool step_value(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    const MarkerScan scan = scan_markers(view, {kParameterEnd}, end, MarkerPlace::kCall);
    const std::string_view part = view.substr(0, scan.before);
    std::string encoded;
    if (state_ == State::kString) {
      append_json_escaped(encoded, part);
    } else {
      value_ += part;
    }
    pending_.drop(scan.before + scan.length);
    if (scan.found()) {
      encoded += state_ == State::kString ? "\"" : json_value();
      state_ = State::kCall;
    }
    add_arguments(encoded, delta);
    return scan.found();
  }

  std::string json_value() const {
    if (parse_json(value_, "parameter")) return value_;
    std::string quoted = "\"";
    append_json_escaped(quoted, value_);
    return quoted + '"';
  }

  State state_ = State::kContent;
  bool block_has_call_ = false;
  std::string value_;  // of a parameter that is not a string; complete at its end tag
};

}  // namespace

std::unique_ptr<ToolCallStage> make_dsml_stage() { return std::make_unique<DsmlCalls>(); }

}  // namespace fathom
