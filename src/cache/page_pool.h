// Refcounts and free list of the latent cache's pages.
//
// Knows page ids only, not their memory. A page is held by one sequence, which writes it, or shared
// by several, which then only read it: full pages of a common prefix. A page marked by keep()
// becomes cached instead of free at refcount 0, until it is held again or drop() evicts it. A page
// that is being copied to or from host memory is in transfer until the copy has ended: it is
// neither allocated nor counted as anything else, though it may have holders, who wait for it. The
// same holds of a quarantined page: another lane or process sends its rows, which may still arrive
// after its last holder has gone. Used by the engine's thread only. free() + cached() + used() +
// in_transfer() + quarantined() == total() always; pages in use after all sequences have ended are
// a leak, which the engine checks for whenever it is idle.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom {

class PagePool {
 public:
  explicit PagePool(int64_t num_pages);

  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t cached() const { return cached_; }  // kept, refcount 0
  int64_t used() const { return used_; }      // held
  int64_t in_transfer() const { return in_transfer_; }
  int64_t leaving() const { return leaving_; }  // in transfer, refcount 0: free when the copy ends
  int64_t quarantined() const { return quarantined_; }

  // Appends `count` pages, each with refcount 1, to `pages`; returns false and changes nothing if
  // fewer are free. The page released last comes first: its memory is the likeliest to be in the
  // CPU's cache.
  bool allocate(int64_t count, std::vector<int32_t>& pages);

  // Increments the refcount of a page that is held, cached or in transfer.
  void share(int32_t page);

  // Decrements the refcount; at 0 the page is cached if it is kept, otherwise free.
  void release(int32_t page);

  // Marks a held page as kept: cached after its last release.
  void keep(int32_t page);

  // Undoes keep(): the page is free unless it is held.
  void drop(int32_t page);

  // Begins a transfer of a held page that is not kept, to be filled, or of a cached one, to be
  // evicted: it is no longer kept.
  void begin_transfer(int32_t page);

  // Ends a transfer: the page is used if it is held, otherwise free.
  void end_transfer(int32_t page);

  // Quarantines a page with one holder that is not kept: a sender may have its rows written at any
  // time. It can be released, but not shared, kept or copied.
  void begin_quarantine(int32_t page);

  // No sender can write the page any more: it is used if it is held, otherwise free.
  void end_quarantine(int32_t page);

  bool is_in_transfer(int32_t page) const;
  bool is_quarantined(int32_t page) const;
  int32_t holders(int32_t page) const;

  // Recounts everything: each page either free once, cached, held, in transfer or quarantined. For
  // tests and an idle engine.
  void check_invariant() const;

 private:
  struct Page {
    int32_t holders = 0;
    bool kept = false;
    bool in_transfer = false;
    bool quarantined = false;
  };
  Page& at(int32_t page);

  std::vector<int32_t> free_;  // a stack
  std::vector<Page> pages_;    // [total]
  int64_t used_ = 0, cached_ = 0, in_transfer_ = 0, leaving_ = 0, quarantined_ = 0;
};

}  // namespace fathom
