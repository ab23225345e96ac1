// Owned host memory, aligned to 64 bytes (a cache line, an AVX-512 register). Large buffers are
// aligned to 2 MiB and use transparent huge pages, which avoids TLB misses in streaming reads. Not
// initialized. Movable, not copyable.
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

  // Allocates. Fails with kResourceExhausted, naming `purpose` and the size, if memory is short.
  static Result<Buffer> allocate(int64_t bytes, std::string_view purpose);

  // Another owner of the same memory.
  Buffer share() const;

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

  TensorView view(DType dtype, std::initializer_list<int64_t> shape) const;

 private:
  std::shared_ptr<void> owner_;  // this buffer's memory, or the slab it is a part of
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fathom
