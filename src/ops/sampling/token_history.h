// The tokens that a sequence has seen, and how often it generated each: the input of penalties.
//
// Grows with the number of different tokens, not with the vocabulary or the length. Owned by one
// sequence; kept over preemption.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "ops/sampling/device_sample_row.h"

namespace fathom {

class TokenHistory {
 public:
  void add_prompt(std::span<const int32_t> ids) {
    for (const int32_t id : ids) entry(id);
  }
  void add_output(int32_t id) { ++entry(id).output_count; }
  // An entry of another history: a copy that gets all entries in order equals it.
  void add(const SeenToken& seen) { entry(seen.id).output_count = seen.output_count; }

  // Each token once, in the order of first appearance.
  std::span<const SeenToken> entries() const { return entries_; }

 private:
  SeenToken& entry(int32_t id) {
    const auto [it, is_new] = index_.try_emplace(id, entries_.size());
    if (is_new) entries_.push_back({id, 0});
    return entries_[it->second];
  }

  std::vector<SeenToken> entries_;
  std::unordered_map<int32_t, size_t> index_;
};

}  // namespace fathom
