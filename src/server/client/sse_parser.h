// Parses server-sent events from a byte stream in pieces of any size (HTML standard, section
// "Server-sent events"). Ignores "id" and "retry", which only reconnecting clients need.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace fathom::client {

// Parser of one stream; not thread-safe. Buffers at most one incomplete line and one event.
class SseParser {
 public:
  // Calls on_data for each event that ends within `bytes`, with its "data" fields joined by line
  // feeds. Skips comments and events without data. `data` is valid during the call only.
  void feed(std::string_view bytes, const std::function<void(std::string_view data)>& on_data);

 private:
  void take_line(std::string_view line, const std::function<void(std::string_view)>& on_data);

  std::string line_;  // incomplete line from earlier pieces
  std::string data_;
  bool has_data_ = false;
  bool ended_with_return_ = false;  // the last byte was CR, so a LF that follows is skipped
};

}  // namespace fathom::client
