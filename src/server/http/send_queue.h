// Unsent bytes of one connection, in order. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fathom::http {

class SendQueue {
 public:
  void append(std::string_view bytes);
  // Large strings are moved, not copied.
  void append(std::string&& bytes);

  bool empty() const { return size_ == 0; }
  int64_t size() const { return size_; }

  // Fills `parts` with the first unsent parts and returns their number.
  size_t front(std::span<std::string_view> parts) const;
  void remove(size_t bytes);

 private:
  std::vector<std::string> parts_;
  size_t first_ = 0;  // the first part with unsent bytes
  size_t sent_ = 0;   // bytes of it that are sent
  int64_t size_ = 0;
};

}  // namespace fathom::http
