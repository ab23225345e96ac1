// Tool calls between special tokens: V3, R1, V3.1, Kimi K2.
#include <algorithm>

#include "chat/tool_calls.h"

namespace fathom {
namespace {

constexpr std::string_view kFence = "```";

class MarkedCalls : public ToolCallStage {
 public:
  explicit MarkedCalls(const CallMarkers& markers)
      : markers_(markers),
        fence_and_call_end_(std::string(kFence) + std::string(markers.call_end)),
        fence_and_block_end_(std::string(kFence) + std::string(markers.block_end)) {}

 protected:
  bool step(TextEnd end, StreamDelta& delta) override {
    switch (state_) {
      case State::kContent:
        return step_content(end, delta);
      case State::kBlock:
        return step_block(end, delta);
      case State::kHeader:
        return step_header(end, delta);
      case State::kName:
        return step_name(end, delta);
      case State::kOpeningFence:
        return step_opening_fence(end);
      case State::kArguments:
        return step_arguments(end, delta);
    }
    return false;
  }

  void finish(TextEnd, StreamDelta&) override {
    // After a call only white space can be held.
    if (block_has_call_) held_.clear();
  }

 private:
  enum class State { kContent, kBlock, kHeader, kName, kOpeningFence, kArguments };

  bool step_content(TextEnd end, StreamDelta& delta) {
    const MarkerScan scan = scan_markers(pending_.view(), {markers_.block_begin}, end);
    delta.content += pending_.view().substr(0, scan.before);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    held_ = markers_.block_begin;
    block_has_call_ = call_end_due_ = false;
    state_ = State::kBlock;
    return true;
  }

  // Parses between calls.
  bool step_block(TextEnd end, StreamDelta& delta) {
    const MarkerScan scan =
        scan_markers(pending_.view(), {markers_.call_begin, markers_.call_end, markers_.block_end},
                     end, MarkerPlace::kCall);
    const std::string_view view = pending_.view();
    if (scan.before > 0) take_stray(view.substr(0, scan.before), delta);
    const std::string_view marker = view.substr(scan.before, scan.length);
    pending_.drop(scan.before + scan.length);
    if (!scan.found()) return false;
    if (marker == markers_.call_begin) {
      held_ += marker;
      state_ = State::kHeader;
    } else if (marker == markers_.call_end) {
      if (call_end_due_) {
        held_.clear();
      } else {
        take_stray(marker, delta);
      }
    } else {
      if (block_has_call_) {
        held_.clear();
      } else {
        take_stray(marker, delta);
      }
      state_ = State::kContent;
    }
    call_end_due_ = false;
    return true;
  }

  // Turns the held text into content; pending text is parsed again as stray text of the block.
  bool reject(StreamDelta& delta) {
    release_held(delta);
    state_ = State::kBlock;
    return true;
  }

  // The part of the pending text that a header may occupy.
  std::string_view header_window() const {
    const size_t longest_marker = std::max({markers_.separator.size(), markers_.call_end.size(),
                                            markers_.block_end.size(), markers_.call_begin.size()});
    return pending_.view().substr(0, kMaxToolName + longest_marker);
  }

  bool is_cut_header(const MarkerScan& scan, TextEnd end) const {
    return end == TextEnd::kCut && !scan.found() &&
           header_window().size() == pending_.view().size();
  }
  bool drop_cut_header() {
    pending_.drop(pending_.view().size());
    return false;
  }

  bool header_may_grow(TextEnd end) const {
    return end == TextEnd::kOpen && header_window().size() == pending_.view().size();
  }

  bool step_header(TextEnd end, StreamDelta& delta) {
    const std::string_view window = header_window();
    const MarkerScan scan = scan_markers(
        window, {markers_.separator, markers_.call_begin, markers_.call_end, markers_.block_end},
        end, MarkerPlace::kCall);
    if (!scan.found() && header_may_grow(end)) return false;
    if (is_cut_header(scan, end)) return drop_cut_header();
    const std::string_view header = trim_space(window.substr(0, scan.before));
    if (scan.marker != 0 || scan.before > kMaxToolName) return reject(delta);
    if (markers_.header == CallMarkers::Header::kTypeThenFence) {
      held_ += window.substr(0, scan.before + scan.length);
      pending_.drop(scan.before + scan.length);
      state_ = State::kName;
      return true;
    }
    const bool is_id = markers_.header == CallMarkers::Header::kKimiId;
    const std::string_view name = is_id ? name_in_id(header) : header;
    if (!is_tool_name(name)) return reject(delta);
    begin(is_id ? header : std::string_view(), name, delta);
    pending_.drop(scan.before + scan.length);
    state_ = State::kArguments;
    return true;
  }

  // Extracts NAME from functions.NAME:INDEX; prefix and suffix may be missing.
  static std::string_view name_in_id(std::string_view id) {
    constexpr std::string_view kPrefix = "functions.";
    if (id.starts_with(kPrefix)) id.remove_prefix(kPrefix.size());
    const size_t colon = id.rfind(':');
    if (colon == std::string_view::npos) return id;
    const std::string_view index = id.substr(colon + 1);
    const bool is_index =
        std::all_of(index.begin(), index.end(), [](char c) { return c >= '0' && c <= '9'; });
    return is_index ? id.substr(0, colon) : id;
  }

  // V3: the name ends at a newline, or at the arguments if the model omitted the newline.
  bool step_name(TextEnd end, StreamDelta& delta) {
    const std::string_view window = header_window();
    const MarkerScan scan = scan_markers(
        window, {"\n", kFence, "{", markers_.call_begin, markers_.call_end, markers_.block_end},
        end, MarkerPlace::kCall);
    if (!scan.found() && header_may_grow(end)) return false;
    if (is_cut_header(scan, end)) return drop_cut_header();
    const std::string_view name = trim_space(window.substr(0, scan.before));
    const bool cut_off = !scan.found() || scan.marker == 3;
    if (cut_off || scan.before > kMaxToolName || !is_tool_name(name)) return reject(delta);
    begin(std::string_view(), name, delta);
    pending_.drop(scan.before);
    state_ = State::kOpeningFence;
    return true;
  }

  bool step_opening_fence(TextEnd end) {
    pending_.drop(leading_space(pending_.view()));
    const std::string_view view = pending_.view();
    constexpr std::string_view kJsonFence = "```json";
    if (view.empty()) return false;
    if (end == TextEnd::kOpen && view.size() < kJsonFence.size() && kJsonFence.starts_with(view))
      return false;
    if (end == TextEnd::kCut && kJsonFence.starts_with(view)) {
      pending_.drop(view.size());
      return false;
    }
    is_fenced_ = view.starts_with(kFence);
    if (view.starts_with(kJsonFence)) {
      pending_.drop(kJsonFence.size());
    } else if (is_fenced_) {
      pending_.drop(kFence.size());
    }
    state_ = State::kArguments;
    return true;
  }

  bool step_arguments(TextEnd end, StreamDelta& delta) {
    const std::string_view view = pending_.view();
    // A line that begins with a fence ends fenced arguments: JSON strings contain no raw newline.
    const MarkerScan scan =
        is_fenced_
            ? scan_markers(view,
                           {markers_.call_end, markers_.block_end, "\n```", fence_and_call_end_,
                            fence_and_block_end_},
                           end, MarkerPlace::kCall)
            : scan_markers(view, {markers_.call_end, markers_.block_end}, end, MarkerPlace::kCall);
    std::string_view arguments = view.substr(0, scan.before);
    const bool trims = markers_.header == CallMarkers::Header::kTypeThenFence;
    if (trims && !wrote_arguments()) arguments.remove_prefix(leading_space(arguments));
    add_arguments(arguments, delta);
    pending_.drop(scan.before);
    if (!scan.found()) return false;
    if (!wrote_arguments()) add_arguments("{}", delta);
    switch (scan.marker) {
      case 0:
        pending_.drop(scan.length);
        break;
      case 1:
        break;  // step_block handles the end of the block
      default:
        pending_.drop(scan.marker == 2 ? scan.length : kFence.size());
        call_end_due_ = true;
    }
    state_ = State::kBlock;
    return true;
  }

  void begin(std::string_view id, std::string_view name, StreamDelta& delta) {
    begin_call(id, name, delta);
    block_has_call_ = true;
    is_fenced_ = false;
  }

  const CallMarkers markers_;
  const std::string fence_and_call_end_;
  const std::string fence_and_block_end_;
  State state_ = State::kContent;
  bool block_has_call_ = false;
  bool is_fenced_ = false;
  bool call_end_due_ = false;  // the fence is closed, <call end> is to follow
};

}  // namespace

std::unique_ptr<ToolCallStage> make_marked_call_stage(const CallMarkers& markers) {
  return std::make_unique<MarkedCalls>(markers);
}

}  // namespace fathom
