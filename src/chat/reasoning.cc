#include "chat/reasoning.h"

#include "chat/think_tags.h"

namespace fathom {

ReasoningSplitter::ReasoningSplitter(const ReasoningRules& rules)
    : rules_(rules),
      state_(rules.may_open && !rules.continues ? State::kOpening
             : rules.starts_inside              ? State::kInside
                                                : State::kOutside),
      started_(rules.continues) {}

void ReasoningSplitter::consume(std::string_view text, TextEnd end, StreamDelta& delta,
                                PendingText& rest) {
  pending_.append(text);
  while (step(end, delta, rest)) {
  }
  pending_.compact();
}

// Makes one decision. Returns false if more text is needed.
bool ReasoningSplitter::step(TextEnd end, StreamDelta& delta, PendingText& rest) {
  const std::string_view view = pending_.view();
  switch (state_) {
    case State::kOpening:
      return step_opening(end, delta, rest);
    case State::kInside: {
      const MarkerScan scan = scan_markers(view, {kThinkClose}, end);
      emit(view.substr(0, scan.before), delta);
      pending_.drop(scan.before + scan.length);
      if (!scan.found()) return false;
      space_.clear();
      state_ = rules_.trims ? State::kAfter : State::kOutside;
      return true;
    }
    case State::kAfter: {
      const size_t space = leading_space(view);
      pending_.drop(space);
      if (space == view.size()) return false;
      state_ = State::kOutside;
      return true;
    }
    case State::kOutside:
      rest.append(view);
      pending_.drop(view.size());
      return false;
  }
  return false;
}

bool ReasoningSplitter::step_opening(TextEnd end, StreamDelta& delta, PendingText& rest) {
  std::string_view view = pending_.view();
  const size_t space = leading_space(view);
  space_ += view.substr(0, space);
  pending_.drop(space);
  view.remove_prefix(space);
  if (view.starts_with(kThinkOpen)) {
    pending_.drop(kThinkOpen.size());
    space_.clear();
    state_ = State::kInside;
    return true;
  }
  if (end == TextEnd::kOpen && kThinkOpen.starts_with(view)) return false;
  if (end == TextEnd::kCut && view.size() > 1 && kThinkOpen.starts_with(view)) {
    pending_.drop(view.size());
    return false;
  }
  if (!rules_.starts_inside) {
    rest.append(space_);
  } else if (!rules_.trims) {
    delta.reasoning += space_;
  }
  space_.clear();
  state_ = rules_.starts_inside ? State::kInside : State::kOutside;
  return true;
}

void ReasoningSplitter::emit(std::string_view text, StreamDelta& delta) {
  if (!rules_.trims) {
    delta.reasoning += text;
    return;
  }
  while (!text.empty()) {
    const size_t space = leading_space(text);
    if (started_) space_ += text.substr(0, space);
    text.remove_prefix(space);
    size_t words = 0;
    while (words < text.size() && !is_space(text[words])) ++words;
    if (words == 0) return;
    started_ = true;
    delta.reasoning += space_;
    delta.reasoning += text.substr(0, words);
    space_.clear();
    text.remove_prefix(words);
  }
}

}  // namespace fathom
