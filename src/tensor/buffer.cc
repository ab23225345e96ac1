#include "tensor/buffer.h"

#include <sys/mman.h>

#include <cstdlib>

#include "base/math.h"

namespace fathom {

Result<Buffer> Buffer::allocate(int64_t bytes, std::string_view purpose) {
  FATHOM_CHECK(bytes >= 0, "{} bytes for {}", bytes, purpose);
  constexpr int64_t kLine = 64;
  constexpr int64_t kHugePage = 2 << 20;
  const int64_t alignment = bytes >= kHugePage ? kHugePage : kLine;
  const int64_t rounded = round_up(bytes > 0 ? bytes : 1, alignment);
  void* memory = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded));
  if (memory == nullptr) {
    return error(Code::kResourceExhausted, "not enough memory for {}: {} bytes", purpose, bytes);
  }
  if (alignment == kHugePage) madvise(memory, static_cast<size_t>(rounded), MADV_HUGEPAGE);
  Buffer buffer;
  buffer.data_.reset(static_cast<std::byte*>(memory));
  buffer.size_ = bytes;
  return buffer;
}

void Buffer::Free::operator()(std::byte* memory) const { std::free(memory); }

TensorView Buffer::view(DType dtype, std::initializer_list<int64_t> shape) const {
  TensorView whole(data_.get(), dtype, shape);
  FATHOM_CHECK(whole.num_elements() * size_of(dtype) <= size_, "{} of {} in {} bytes",
               whole.shape_string(), name_of(dtype), size_);
  return whole;
}

}  // namespace fathom
