// Where a stream of server-sent events may be cut: after an empty line. The router passes whole
// events on, so that an error event after a broken stream never lands inside another event. Bytes
// are not changed. Not thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace fathom::router {

class EventBoundary {
 public:
  // Appends to `out` what can be passed on: all up to the last empty line, and everything once more
  // than kMostHeld bytes would be held back.
  void feed(std::string_view bytes, std::string& out);
  // Returns what is held back, at the regular end of the stream.
  std::string take_rest();
  // Returns whether the bytes passed on so far end between two events.
  bool is_between_events() const { return between_; }

  static constexpr size_t kMostHeld = 1 << 20;

 private:
  std::string held_;
  size_t searched_ = 0;  // bytes of held_ without an empty line
  bool between_ = true;
};

}  // namespace fathom::router
