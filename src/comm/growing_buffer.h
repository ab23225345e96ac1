// Memory that is used again from meeting to meeting and grows when it must. Aligned to 64 bytes;
// its contents do not survive growing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace fathom {

class GrowingBuffer {
 public:
  // The first `bytes` bytes; what earlier calls returned is invalid if it had to grow.
  std::span<std::byte> take(size_t bytes) {
    if (bytes > capacity_) {
      // By half more than before, so that arrays that grow do not allocate each time.
      const size_t capacity = std::max(bytes, capacity_ + capacity_ / 2);
      bytes_.reset();
      capacity_ = 0;
      bytes_.reset(
          static_cast<std::byte*>(::operator new[](capacity, std::align_val_t(kAlignment))));
      capacity_ = capacity;
    }
    return {bytes_.get(), bytes};
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(std::byte* bytes) const {
      ::operator delete[](bytes, std::align_val_t(kAlignment));
    }
  };
  std::unique_ptr<std::byte[], Free> bytes_;
  size_t capacity_ = 0;
};

}  // namespace fathom
