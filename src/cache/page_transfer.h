// Moves whole pages, the rows of all layers, between a device's pool and host memory.
//
// A device may do it while it computes: save() and load() only begin a copy. Copies take effect in
// the order in which they were begun, after the steps that were begun before them and before those
// that come later; finish() waits until the host sees all of them. Until then `host` belongs to the
// copy. Called by the engine's thread between two steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/latent_layout.h"

namespace fathom {

class PageTransfer {
 public:
  virtual ~PageTransfer() = default;

  virtual int64_t page_bytes() const = 0;  // of one page, in host memory
  virtual void save(int32_t page, std::byte* host) = 0;
  virtual void load(const std::byte* host, int32_t page) = 0;
  virtual void finish() {}
};

// Of a cache that lies in host memory itself: layer by layer, done when the call returns.
class LatentPageTransfer : public PageTransfer {
 public:
  // The cache outlives it and stays where it is.
  explicit LatentPageTransfer(const LatentCache& cache) : cache_(&cache) {}

  int64_t page_bytes() const override;
  void save(int32_t page, std::byte* host) override;
  void load(const std::byte* host, int32_t page) override;

 private:
  const LatentCache* cache_;
};

}  // namespace fathom
