#include "allocation_faults.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace fathom {
namespace {

std::atomic<AllocationFaults*> control{nullptr};

// Counts down through all threads; the allocation that comes to 0 fails, and the next `length` - 1.
bool fails() {
  AllocationFaults* const faults = control.load(std::memory_order_acquire);
  if (faults == nullptr) return false;
  const std::atomic_ref<int64_t> countdown(faults->countdown), length(faults->length);
  int64_t left = countdown.load(std::memory_order_relaxed);
  while (left > 0 && !countdown.compare_exchange_weak(left, left - 1)) {
  }
  if (left != 1) return false;
  // This one fails; while more are to fail the next one is the last of a new countdown.
  if (length.fetch_sub(1) > 1) countdown.store(1);
  return true;
}

void* allocate(std::size_t size, std::size_t alignment) {
  if (fails()) return nullptr;
  if (size == 0) size = 1;
  if (alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__) return std::malloc(size);
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* const memory = allocate(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

bool control_allocations_by(int descriptor) {
  void* const mapped =
      mmap(nullptr, sizeof(AllocationFaults), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) return false;
  control.store(static_cast<AllocationFaults*>(mapped), std::memory_order_release);
  return true;
}

}  // namespace fathom

// All forms that the language has, in the order of [new.delete].
void* operator new(std::size_t size) { return fathom::allocate_or_throw(size, 1); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return fathom::allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return fathom::allocate(size, 1);
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return fathom::allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size) { return fathom::allocate_or_throw(size, 1); }
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return fathom::allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return fathom::allocate(size, 1);
}
void* operator new[](std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return fathom::allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}
