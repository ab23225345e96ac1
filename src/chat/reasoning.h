// The first stage of a stream parser: reasoning goes out, the rest goes on.
#pragma once

#include "chat/marker_scan.h"
#include "chat/stream_parser.h"

namespace fathom {

struct ReasoningRules {
  bool starts_inside = false;  // the prompt ended in <think>
  bool may_open = false;       // the model may write <think> itself
  bool trims = false;          // white space after <think> and around </think>
  bool continues = false;      // text of this kind came before: nothing opens, nothing is trimmed
                               // at the beginning
};

class ReasoningSplitter {
 public:
  explicit ReasoningSplitter(const ReasoningRules& rules);

  // Takes in all that has arrived; what is not reasoning is appended to `rest`.
  void consume(std::string_view text, TextEnd end, StreamDelta& delta, PendingText& rest);

 private:
  enum class State { kOpening, kInside, kAfter, kOutside };

  bool step(TextEnd end, StreamDelta& delta, PendingText& rest);
  bool step_opening(TextEnd end, StreamDelta& delta, PendingText& rest);
  void emit(std::string_view text, StreamDelta& delta);

  const ReasoningRules rules_;
  State state_;
  PendingText pending_;
  std::string space_;     // white space that is dropped if a marker or the end follows
  bool started_ = false;  // reasoning other than white space was seen
};

}  // namespace fathom
