#include "cache/page_transfer.h"

#include <cstring>

namespace fathom {

int64_t LatentPageTransfer::page_bytes() const {
  return cache_->num_layers() * cache_->layout().page_bytes();
}

void LatentPageTransfer::save(int32_t page, std::byte* host) {
  std::memcpy(host, cache_->page(page), static_cast<size_t>(page_bytes()));
}

void LatentPageTransfer::load(const std::byte* host, int32_t page) {
  std::memcpy(cache_->page(page), host, static_cast<size_t>(page_bytes()));
}

}  // namespace fathom
