// Records which running sequence is computing which page of a text, so that sequences with the same
// prefix wait for it instead of computing it again. Owned by the scheduler; engine thread only.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "cache/prefix_key.h"
#include "engine/sequence.h"

namespace fathom {

class PendingPages {
 public:
  // The sequence begins to compute its full pages from `first_page` on. Pages that another sequence
  // is computing keep their owner.
  void add(const Sequence& sequence, int64_t first_page);

  // The page has been published in the prefix tree.
  void done(const PageKey& key) { owners_.erase(key); }

  // The sequence stops computing. Its pages have no owner any more.
  void remove(const Sequence& sequence);

  // The sequence that computes the page, or null.
  const Sequence* owner(const PageKey& key) const;

  bool empty() const { return owners_.empty(); }

 private:
  std::unordered_map<PageKey, const Sequence*, PageKeyHash> owners_;
};

}  // namespace fathom
