// Which pages of the latent cache are free, and how many sequences hold each of the others.
//
// Knows page ids only, not their memory. A page is held by one sequence, which writes it, or shared
// by several, which then only read it: full pages of a common prompt. Used by the engine's thread
// only. free() + used() == total() always; what is used after all sequences have gone is a leak,
// which the engine checks for whenever it is idle.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom {

class PagePool {
 public:
  explicit PagePool(int64_t num_pages);

  int64_t total() const { return static_cast<int64_t>(holders_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return used_; }

  // Appends `count` pages, each held once, to `pages`; false, and nothing changed, if fewer are
  // free. The page released last comes first: its memory is the likeliest to be in the CPU's cache.
  bool allocate(int64_t count, std::vector<int32_t>& pages);

  // One more holder of a page that has one.
  void share(int32_t page);

  // One holder fewer; the page is free when it was the last.
  void release(int32_t page);

  // Releases all and clears the vector.
  void release_all(std::vector<int32_t>& pages);

  int32_t holders(int32_t page) const;

  // Recounts everything: each page either free once or held. For tests and an idle engine.
  void check_invariant() const;

 private:
  void check_page(int32_t page) const;

  std::vector<int32_t> free_;     // a stack
  std::vector<int32_t> holders_;  // [total], 0: free
  int64_t used_ = 0;
};

}  // namespace fathom
