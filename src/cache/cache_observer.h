// Is told which pages of text a prefix tree gets and loses.
//
// Only text that any request may share: without a salt, and of no request's own scope. A page
// counts as there while its rows are in the pool, in host memory or in a file.
#pragma once

#include <cstdint>
#include <span>

#include "cache/prefix_key.h"

namespace fathom {

// Called by the tree's thread in the middle of a change: does not call the tree, nor block.
class CacheObserver {
 public:
  virtual ~CacheObserver() = default;
  // `tokens` [kPageSize]; `parent` is the page before, null for a text's first one.
  virtual void stored(const PageKey& key, const PageKey* parent,
                      std::span<const int32_t> tokens) noexcept = 0;
  virtual void removed(const PageKey& key) noexcept = 0;
  // Nothing is left, of which every page was removed before.
  virtual void cleared() noexcept = 0;
};

}  // namespace fathom
