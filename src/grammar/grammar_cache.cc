#include "grammar/grammar_cache.h"

#include <utility>

namespace fathom {

std::shared_ptr<const CompiledGrammar> GrammarCache::find(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->grammar;
}

void GrammarCache::insert(const std::string& key, std::shared_ptr<const CompiledGrammar> grammar) {
  const int64_t bytes = grammar->memory_bytes() + 2 * static_cast<int64_t>(key.size());
  const std::lock_guard lock(mutex_);
  if (bytes > max_bytes_ || index_.contains(key)) return;
  while (bytes_ + bytes > max_bytes_) {
    bytes_ -= entries_.back().bytes;
    index_.erase(entries_.back().key);
    entries_.pop_back();
  }
  entries_.push_front({key, std::move(grammar), bytes});
  index_.emplace(key, entries_.begin());
  bytes_ += bytes;
}

int64_t GrammarCache::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

int64_t GrammarCache::size() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(entries_);
}

}  // namespace fathom
