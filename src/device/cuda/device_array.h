// Owned device memory: `size` elements of one type, not initialised. Movable.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "device/cuda/error.h"

namespace fathom::cuda {

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(int64_t size) : size_(size) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), "allocating device memory");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::ssize(values)) {
    copy_from(values);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  size_t bytes() const { return static_cast<size_t>(size_) * sizeof(T); }

  // Both wait for the copy and for earlier work of the legacy default stream.
  void copy_from(const std::vector<T>& values) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "copying to the device");
  }
  std::vector<T> to_host() const {
    std::vector<T> values(static_cast<size_t>(size_));
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost),
          "copying from the device");
    return values;
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fathom::cuda
