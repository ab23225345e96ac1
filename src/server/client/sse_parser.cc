#include "server/client/sse_parser.h"

namespace fathom::client {

void SseParser::feed(std::string_view bytes,
                     const std::function<void(std::string_view data)>& on_data) {
  while (!bytes.empty()) {
    if (ended_with_return_) {
      ended_with_return_ = false;
      if (bytes.front() == '\n') {
        bytes.remove_prefix(1);
        continue;
      }
    }
    const size_t end = bytes.find_first_of("\r\n");
    if (end == std::string_view::npos) {
      line_ += bytes;
      return;
    }
    ended_with_return_ = bytes[end] == '\r';
    const std::string_view rest = bytes.substr(0, end);
    if (line_.empty()) {
      take_line(rest, on_data);
    } else {
      line_ += rest;
      take_line(line_, on_data);
      line_.clear();
    }
    bytes.remove_prefix(end + 1);
  }
}

void SseParser::take_line(std::string_view line,
                          const std::function<void(std::string_view)>& on_data) {
  if (line.empty()) {
    if (has_data_) on_data(data_);
    has_data_ = false;
    data_.clear();
    return;
  }
  const size_t colon = line.find(':');
  if (line.substr(0, colon) != "data") return;
  std::string_view value = colon == std::string_view::npos ? "" : line.substr(colon + 1);
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (has_data_) data_ += '\n';
  has_data_ = true;
  data_ += value;
}

}  // namespace fathom::client
