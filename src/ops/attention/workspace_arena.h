// Sub-allocates a workspace, aligned to cache lines. Owns nothing. Without memory it only measures:
// sizes come from the same code as the layout, so the two cannot disagree.
#pragma once

#include <cstddef>
#include <span>

#include "base/check.h"
#include "base/math.h"

namespace fathom::cpu {

class WorkspaceArena {
 public:
  WorkspaceArena() = default;  // measures
  explicit WorkspaceArena(std::span<std::byte> memory)
      : memory_(memory.data()),
        // The caller's memory need not be aligned.
        used_(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(memory.data()) % kAlignment)),
        size_(static_cast<int64_t>(memory.size())) {}

  template <typename T>
  T* take(int64_t count) {
    const int64_t begin = used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    if (memory_ == nullptr) return nullptr;
    FATHOM_CHECK(used_ <= size_, "a workspace of {} bytes, {} wanted", size_, used_);
    return reinterpret_cast<T*>(memory_ + begin);
  }

  // Bytes that memory of any alignment must have for what was taken.
  int64_t bytes() const { return used_ + kAlignment; }

 private:
  static constexpr int64_t kAlignment = 64;
  std::byte* memory_ = nullptr;
  int64_t used_ = 0;
  int64_t size_ = 0;
};

}  // namespace fathom::cpu
