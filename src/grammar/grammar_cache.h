// Compiled grammars by what they were compiled from, the least recently used given up first.
// Any thread.
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
  // Holds at most so many bytes, as CompiledGrammar::memory_bytes() counts them, and keys.
  explicit GrammarCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Null: not there.
  std::shared_ptr<const CompiledGrammar> find(const std::string& key);
  // A grammar larger than the whole cache is not kept.
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
  std::list<Entry> entries_;  // the latest used first
  std::unordered_map<std::string, std::list<Entry>::iterator> index_;
  int64_t bytes_ = 0;
};

}  // namespace fathom
