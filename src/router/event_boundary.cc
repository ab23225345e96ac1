#include "router/event_boundary.h"

#include <algorithm>
#include <utility>

namespace fathom::router {
namespace {

// Returns the end of the last empty line in `text`; 0: there is none. Lines end with LF or CRLF.
size_t last_boundary(std::string_view text) {
  for (size_t end = text.size(); end > 1; --end) {
    if (text[end - 1] != '\n') continue;
    if (text[end - 2] == '\n') return end;
    if (end > 2 && text[end - 2] == '\r' && text[end - 3] == '\n') return end;
  }
  return 0;
}

}  // namespace

void EventBoundary::feed(std::string_view bytes, std::string& out) {
  held_.append(bytes);
  // A boundary may have begun up to two bytes before the new ones.
  const size_t from = searched_ - std::min<size_t>(searched_, 2);
  size_t end = last_boundary(std::string_view(held_).substr(from));
  if (end > 0) {
    end += from;
    between_ = true;
  } else if (held_.size() > kMostHeld) {
    end = held_.size();
    between_ = false;
  }
  out.append(held_, 0, end);
  held_.erase(0, end);
  searched_ = held_.size();
}

std::string EventBoundary::take_rest() {
  searched_ = 0;
  return std::exchange(held_, {});
}

}  // namespace fathom::router
