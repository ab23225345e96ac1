// Copies whole pages, the rows of all layers, between a device's pool and host memory.
//
// A device copies while it computes: save() and load() only begin a copy, and take_ended() tells
// which have ended, in any order. A copy sees what the steps begun before it write. Until it has
// ended its page and its host memory are the copy's: no step that is begun later may read or write
// them, which is the caller's to see to (PagePool counts such pages). What a copy that has failed
// was to write may be anything. Called by the engine's thread between two steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cache/latent_layout.h"

namespace fathom {

// Host memory that a device can copy from and to by itself.
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  virtual std::byte* data() const = 0;
};

struct EndedCopy {
  int32_t id = 0;
  bool ok = false;
};

class PageTransfer {
 public:
  virtual ~PageTransfer() = default;

  virtual int64_t page_bytes() const = 0;  // of one page, in host memory

  // Memory for `slots` pages, and room for as many copies in flight. Once, before the first copy.
  // kResourceExhausted: there is not so much. Ordinary memory, unless the device wants another.
  virtual Result<std::unique_ptr<HostMemory>> allocate_slots(int64_t slots);

  // Page to host memory, and back. The id is the caller's, of no other copy in flight.
  virtual void save(int32_t page, std::byte* host, int32_t id) = 0;
  virtual void load(const std::byte* host, int32_t page, int32_t id) = 0;

  // Replaces `ended` by the copies that have ended since the last call. With `wait` it waits for
  // one if none has and some are in flight. Neither allocates nor throws.
  virtual void take_ended(std::vector<EndedCopy>& ended, bool wait) = 0;

  // The page's rows where they lie, [page_bytes], if the host can read them there; empty: it
  // cannot. Valid as long as the page has a holder.
  virtual std::span<const std::byte> rows_in_place(int32_t) const { return {}; }

  // The page's host-writable memory, [page_bytes]; empty if load() must do more than write there.
  // Valid as long as the page is not handed out again.
  virtual std::span<std::byte> memory_of(int32_t) const { return {}; }

  // Whether copies may still be in flight when save() and load() return: then room is made ahead of
  // its use.
  virtual bool is_asynchronous() const { return true; }
};

// Caches that lie in host memory themselves: a copy has ended when the call returns. They outlive
// it and stay where they are.
class LatentPageTransfer : public PageTransfer {
 public:
  explicit LatentPageTransfer(const LatentCache& cache) : caches_{&cache} {}
  // Caches with equal contents: a page is saved from the first and loaded into each.
  explicit LatentPageTransfer(std::vector<const LatentCache*> caches)
      : caches_(std::move(caches)) {}

  int64_t page_bytes() const override;
  Result<std::unique_ptr<HostMemory>> allocate_slots(int64_t slots) override;
  void save(int32_t page, std::byte* host, int32_t id) override;
  void load(const std::byte* host, int32_t page, int32_t id) override;
  void take_ended(std::vector<EndedCopy>& ended, bool wait) override;
  std::span<const std::byte> rows_in_place(int32_t page) const override;
  std::span<std::byte> memory_of(int32_t page) const override;
  bool is_asynchronous() const override { return false; }

 private:
  std::vector<const LatentCache*> caches_;
  std::vector<EndedCopy> ended_;
};

}  // namespace fathom
