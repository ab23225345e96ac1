#include "cache/page_transfer.h"

#include <cstring>
#include <utility>

#include "tensor/buffer.h"

namespace fathom {
namespace {

class OrdinaryMemory : public HostMemory {
 public:
  explicit OrdinaryMemory(Buffer buffer) : buffer_(std::move(buffer)) {}
  std::byte* data() const override { return buffer_.data(); }

 private:
  Buffer buffer_;
};

}  // namespace

Result<std::unique_ptr<HostMemory>> PageTransfer::allocate_slots(int64_t slots) {
  FATHOM_TRY(Buffer buffer, Buffer::allocate(slots * page_bytes(), "pages in host memory"));
  return std::make_unique<OrdinaryMemory>(std::move(buffer));
}

int64_t LatentPageTransfer::page_bytes() const { return caches_.front()->page_bytes(); }

Result<std::unique_ptr<HostMemory>> LatentPageTransfer::allocate_slots(int64_t slots) {
  ended_.reserve(static_cast<size_t>(slots));
  return PageTransfer::allocate_slots(slots);
}

void LatentPageTransfer::save(int32_t page, std::byte* host, int32_t id) {
  std::memcpy(host, caches_.front()->page(page), static_cast<size_t>(page_bytes()));
  ended_.push_back({id, true});
}

void LatentPageTransfer::load(const std::byte* host, int32_t page, int32_t id) {
  for (const LatentCache* cache : caches_) {
    std::memcpy(cache->page(page), host, static_cast<size_t>(page_bytes()));
  }
  ended_.push_back({id, true});
}

std::span<const std::byte> LatentPageTransfer::rows_in_place(int32_t page) const {
  return {caches_.front()->page(page), static_cast<size_t>(page_bytes())};
}

std::span<std::byte> LatentPageTransfer::memory_of(int32_t page) const {
  if (caches_.size() > 1) return {};
  return {caches_.front()->page(page), static_cast<size_t>(page_bytes())};
}

void LatentPageTransfer::take_ended(std::vector<EndedCopy>& ended, bool) {
  ended.clear();
  std::swap(ended, ended_);
}

}  // namespace fathom
