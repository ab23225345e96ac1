// Which running sequence is computing which page of a text, so that others that begin with the same
// text wait for it instead of computing it too. Engine thread only; owned by the scheduler.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "cache/prefix_key.h"
#include "engine/sequence.h"

namespace fathom {

class PendingPages {
 public:
  // The sequence begins to compute its full pages from `first_page` on; those that another is
  // computing stay that one's.
  void add(const Sequence& sequence, int64_t first_page);

  // The page is in the tree.
  void done(const PageKey& key) { owners_.erase(key); }

  // The sequence stops, whatever it has computed: nobody waits for it any longer.
  void remove(const Sequence& sequence);

  // Null: nobody is computing it.
  const Sequence* owner(const PageKey& key) const;

  bool empty() const { return owners_.empty(); }

 private:
  std::unordered_map<PageKey, const Sequence*, PageKeyHash> owners_;
};

}  // namespace fathom
