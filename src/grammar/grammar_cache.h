// An LRU cache of compiled grammars, keyed by their source. Any thread.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "grammar/compiled_grammar.h"

namespace fathom {

class GrammarCache {
 public:
  // Holds at most max_bytes of grammars (CompiledGrammar::memory_bytes()) and keys.
  explicit GrammarCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // The grammar, or null.
  std::shared_ptr<const CompiledGrammar> find(const std::string& key);
  // Inserts a grammar, unless it is larger than the whole cache.
  void insert(const std::string& key, std::shared_ptr<const CompiledGrammar> grammar);

  int64_t bytes() const;
  int64_t size() const;

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const CompiledGrammar> grammar;
    int64_t bytes = 0;
  };

  const int64_t max_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  int64_t bytes_ = 0;
};

}  // namespace fathom
