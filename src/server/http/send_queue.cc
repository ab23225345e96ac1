#include "server/http/send_queue.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fathom::http {
namespace {

// Small writes are joined up to this many bytes, so that one write takes many tokens. Above it a
// copy costs more than another part of a gathered write.
constexpr size_t kJoined = 16 << 10;

}  // namespace

void SendQueue::append(std::string_view bytes) {
  if (bytes.empty()) return;
  if (first_ == parts_.size() || parts_.back().size() + bytes.size() > kJoined) {
    parts_.emplace_back();
  }
  parts_.back().append(bytes);
  size_ += std::ssize(bytes);
}

void SendQueue::append(std::string&& bytes) {
  if (bytes.size() < kJoined) {
    append(std::string_view(bytes));
    return;
  }
  size_ += std::ssize(bytes);
  parts_.push_back(std::move(bytes));
}

size_t SendQueue::front(std::span<std::string_view> parts) const {
  const size_t count = std::min(parts.size(), parts_.size() - first_);
  for (size_t i = 0; i < count; ++i) parts[i] = parts_[first_ + i];
  if (count > 0) parts[0].remove_prefix(sent_);
  return count;
}

void SendQueue::remove(size_t bytes) {
  FATHOM_CHECK(static_cast<int64_t>(bytes) <= size_, "{} of {} bytes", bytes, size_);
  size_ -= static_cast<int64_t>(bytes);
  sent_ += bytes;
  while (first_ < parts_.size() && sent_ >= parts_[first_].size()) {
    sent_ -= parts_[first_].size();
    std::string().swap(parts_[first_++]);
  }
  if (first_ * 2 >= parts_.size()) {
    parts_.erase(parts_.begin(), parts_.begin() + static_cast<ptrdiff_t>(first_));
    first_ = 0;
  }
}

}  // namespace fathom::http
