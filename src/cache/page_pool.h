// Which pages of the latent cache are free, and how many sequences hold each of the others.
//
// Knows page ids only, not their memory. A page is held by one sequence, which writes it, or shared
// by several, which then only read it: full pages of a common prefix. A page whose rows are worth
// keeping (keep()) is not free when its last holder has gone but cached, until somebody holds it
// again or drop() gives it up. Used by the engine's thread only. free() + cached() + used() ==
// total() always; what is used after all sequences have gone is a leak, which the engine checks for
// whenever it is idle.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom {

class PagePool {
 public:
  explicit PagePool(int64_t num_pages);

  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t cached() const { return cached_; }  // kept and held by nobody
  int64_t used() const { return used_; }      // held

  // Appends `count` pages, each held once, to `pages`; false, and nothing changed, if fewer are
  // free. The page released last comes first: its memory is the likeliest to be in the CPU's cache.
  bool allocate(int64_t count, std::vector<int32_t>& pages);

  // One more holder of a page that has one or is cached.
  void share(int32_t page);

  // One holder fewer; after the last the page is cached if it is kept, otherwise free.
  void release(int32_t page);

  // The rows of a held page are worth keeping.
  void keep(int32_t page);

  // They no longer are: the page is free unless it is held.
  void drop(int32_t page);

  int32_t holders(int32_t page) const;

  // Recounts everything: each page either free once, cached or held. For tests and an idle engine.
  void check_invariant() const;

 private:
  struct Page {
    int32_t holders = 0;
    bool kept = false;
  };
  Page& at(int32_t page);

  std::vector<int32_t> free_;  // a stack
  std::vector<Page> pages_;    // [total]
  int64_t used_ = 0, cached_ = 0;
};

}  // namespace fathom
