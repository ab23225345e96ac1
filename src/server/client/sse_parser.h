// Server-sent events out of a stream's bytes, in pieces of any size (the HTML standard's section
// "Server-sent events", without "id" and "retry", which only reconnecting clients need).
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace fathom::client {

// One stream's; not thread-safe. Keeps at most one unfinished line and one unfinished event.
class SseParser {
 public:
  // Calls on_data for each event that ends within `bytes`, with its "data" fields joined by line
  // ends. Events without data and comments are nobody's. The text is valid during the call only.
  void feed(std::string_view bytes, const std::function<void(std::string_view data)>& on_data);

 private:
  void take_line(std::string_view line, const std::function<void(std::string_view)>& on_data);

  std::string line_;  // begun in an earlier piece
  std::string data_;
  bool has_data_ = false;
  bool ended_with_return_ = false;  // a line feed that follows belongs to that line's end
};

}  // namespace fathom::client
