// Pinned host memory for asynchronous copies. Owned; movable; not initialised.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "device/cuda/error.h"

namespace fathom::cuda {

template <typename T>
class PinnedArray {
 public:
  PinnedArray() = default;
  explicit PinnedArray(int64_t size) : size_(size) {
    check(cudaMallocHost(reinterpret_cast<void**>(&data_), static_cast<size_t>(size) * sizeof(T)),
          "allocating pinned memory");
  }
  ~PinnedArray() { cudaFreeHost(data_); }
  PinnedArray(PinnedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return data_[i]; }
  std::span<T> span() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fathom::cuda
