#include "engine/pending_pages.h"

namespace fathom {

void PendingPages::add(const Sequence& sequence, int64_t first_page) {
  const std::vector<PageKey>& keys = sequence.prefix->keys;
  for (auto page = static_cast<size_t>(first_page); page < keys.size(); ++page) {
    owners_.try_emplace(keys[page], &sequence);
  }
}

void PendingPages::remove(const Sequence& sequence) {
  if (owners_.empty() || !sequence.prefix) return;
  const std::vector<PageKey>& keys = sequence.prefix->keys;
  for (auto page = static_cast<size_t>(sequence.pages_in_tree); page < keys.size(); ++page) {
    const auto it = owners_.find(keys[page]);
    if (it != owners_.end() && it->second == &sequence) owners_.erase(it);
  }
}

const Sequence* PendingPages::owner(const PageKey& key) const {
  const auto it = owners_.find(key);
  return it == owners_.end() ? nullptr : it->second;
}

}  // namespace fathom
