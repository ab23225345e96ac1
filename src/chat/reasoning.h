// The first stage of a stream parser: separates reasoning from the rest.
#pragma once

#include "chat/marker_scan.h"
#include "chat/stream_parser.h"

namespace fathom {

struct ReasoningRules {
  bool starts_inside = false;  // the prompt ended in <think>
  bool may_open = false;       // the model may write <think> itself
  bool trims = false;          // drops white space after <think> and around </think>
  bool continues = false;      // continues earlier text: no opening tag, no trimming at the start
};

class ReasoningSplitter {
 public:
  explicit ReasoningSplitter(const ReasoningRules& rules);

  // Consumes the next piece. Text that is not reasoning is appended to `rest`.
  void consume(std::string_view text, TextEnd end, StreamDelta& delta, PendingText& rest);

 private:
  enum class State { kOpening, kInside, kAfter, kOutside };

  bool step(TextEnd end, StreamDelta& delta, PendingText& rest);
  bool step_opening(TextEnd end, StreamDelta& delta, PendingText& rest);
  void emit(std::string_view text, StreamDelta& delta);

  const ReasoningRules rules_;
  State state_;
  PendingText pending_;
  std::string space_;     // white space, dropped if a marker or the end follows
  bool started_ = false;  // reasoning other than white space has been seen
};

}  // namespace fathom
