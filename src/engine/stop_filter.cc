#include "engine/stop_filter.h"

#include <algorithm>

namespace fathom {

std::optional<size_t> StopFilter::push(std::string_view piece, std::string& out) {
  if (stop_->empty()) {
    out += piece;
    return std::nullopt;
  }
  held_ += piece;
  std::optional<size_t> matched;
  size_t begin = 0, end = std::string::npos;
  for (size_t i = 0; i < stop_->size(); ++i) {
    const size_t found = held_.find((*stop_)[i]);
    if (found == std::string::npos) continue;
    const size_t found_end = found + (*stop_)[i].size();
    if (found_end > end || (found_end == end && found >= begin)) continue;
    matched = i;
    begin = found;
    end = found_end;
  }
  if (matched) {
    out.append(held_, 0, include_stop_ ? end : begin);
    held_.clear();
    return matched;
  }
  const size_t safe = held_.size() - longest_open_prefix();
  out.append(held_, 0, safe);
  held_.erase(0, safe);
  return std::nullopt;
}

void StopFilter::pass(std::string_view piece, std::string& out) {
  flush(out);
  out += piece;
}

void StopFilter::flush(std::string& out) {
  out += held_;
  held_.clear();
}

// The length of the longest suffix of held_ that is a proper prefix of some stop string.
size_t StopFilter::longest_open_prefix() const {
  size_t longest = 0;
  for (const std::string& stop : *stop_) {
    for (size_t length = std::min(stop.size() - 1, held_.size()); length > longest; --length) {
      if (held_.compare(held_.size() - length, length, stop, 0, length) == 0) longest = length;
    }
  }
  return longest;
}

}  // namespace fathom
