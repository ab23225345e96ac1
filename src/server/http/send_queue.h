// What one connection still has to send: bytes in order, taken off as the kernel takes them. Not
// thread-safe.
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
  void append(std::string&& bytes);  // a large one is kept as it is instead of being copied

  bool empty() const { return size_ == 0; }
  int64_t size() const { return size_; }

  // The first parts, as many as there are and fit; returns how many.
  size_t front(std::span<std::string_view> parts) const;
  void remove(size_t bytes);

 private:
  std::vector<std::string> parts_;
  size_t first_ = 0;  // parts_[first_] is the first with something left,
  size_t sent_ = 0;   // of which so many bytes are gone
  int64_t size_ = 0;
};

}  // namespace fathom::http
