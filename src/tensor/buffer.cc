#include "tensor/buffer.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>

#include "base/math.h"

namespace fathom {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kHugePage = 2 << 20;
// Untouched parts of a slab use address space only.
constexpr int64_t kSlabBytes = 16 * kHugePage;
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSlabs = false;  // AddressSanitizer checks the bounds of allocations
#else
constexpr bool kSlabs = true;
#endif

std::shared_ptr<void> allocate_aligned(int64_t bytes, int64_t alignment) {
  void* memory = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(bytes));
  if (memory == nullptr) return nullptr;
  if (alignment == kHugePage) madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return std::shared_ptr<void>(memory, std::free);
}

// The slab from which small buffers are cut. Used by any thread.
struct Slab {
  std::mutex mutex;
  std::shared_ptr<void> memory;
  int64_t used = kSlabBytes;
};

Slab& slab() {
  static Slab instance;
  return instance;
}

}  // namespace

Result<Buffer> Buffer::allocate(int64_t bytes, std::string_view purpose) {
  FATHOM_CHECK(bytes >= 0, "{} bytes for {}", bytes, purpose);
  Buffer buffer;
  buffer.size_ = bytes;
  if (kSlabs && bytes < kHugePage) {
    const int64_t rounded = round_up(bytes > 0 ? bytes : 1, kLine);
    const std::lock_guard lock(slab().mutex);
    if (slab().used + rounded > kSlabBytes) {
      slab().memory = allocate_aligned(kSlabBytes, kHugePage);
      slab().used = slab().memory ? 0 : kSlabBytes;
    }
    if (slab().memory) {
      buffer.owner_ = slab().memory;
      buffer.data_ = static_cast<std::byte*>(slab().memory.get()) + slab().used;
      slab().used += rounded;
      return buffer;
    }
  }
  const int64_t alignment = bytes >= kHugePage ? kHugePage : kLine;
  buffer.owner_ = allocate_aligned(round_up(bytes > 0 ? bytes : 1, alignment), alignment);
  buffer.data_ = static_cast<std::byte*>(buffer.owner_.get());
  if (buffer.data_ == nullptr) {
    return error(Code::kResourceExhausted, "not enough memory for {}: {} bytes", purpose, bytes);
  }
  return buffer;
}

Buffer Buffer::share() const {
  Buffer other;
  other.owner_ = owner_;
  other.data_ = data_;
  other.size_ = size_;
  return other;
}

TensorView Buffer::view(DType dtype, std::initializer_list<int64_t> shape) const {
  TensorView whole(data_, dtype, shape);
  FATHOM_CHECK(whole.num_elements() * size_of(dtype) <= size_, "{} of {} in {} bytes",
               whole.shape_string(), name_of(dtype), size_);
  return whole;
}

}  // namespace fathom
