// Host memory that owns itself: aligned to 64 bytes (one cache line, one AVX-512 register), large
// ones to 2 MiB and offered to the kernel as huge pages, which spares a streaming read its TLB
// misses. Not initialised. Movable, not copyable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "tensor/tensor_view.h"

namespace fathom {

class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;

  // Fails with kResourceExhausted, naming `purpose` and the size, when there is not enough memory.
  static Result<Buffer> allocate(int64_t bytes, std::string_view purpose);

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

  TensorView view(DType dtype, std::initializer_list<int64_t> shape) const;

 private:
  std::shared_ptr<void> owner_;  // this buffer's memory, or the slab that it is part of
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fathom
