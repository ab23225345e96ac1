#include "cache/page_transfer.h"

#include <cstring>

namespace fathom {

int64_t LatentPageTransfer::page_bytes() const {
  return cache_->num_layers() * cache_->layout().page_bytes();
}

void LatentPageTransfer::save(int32_t page, std::byte* host) {
  const int64_t bytes = cache_->layout().page_bytes();
  for (int64_t layer = 0; layer < cache_->num_layers(); ++layer) {
    std::memcpy(host + layer * bytes, cache_->layer(layer).row(page, 0),
                static_cast<size_t>(bytes));
  }
}

void LatentPageTransfer::load(const std::byte* host, int32_t page) {
  const int64_t bytes = cache_->layout().page_bytes();
  for (int64_t layer = 0; layer < cache_->num_layers(); ++layer) {
    std::memcpy(cache_->layer(layer).row(page, 0), host + layer * bytes,
                static_cast<size_t>(bytes));
  }
}

}  // namespace fathom
