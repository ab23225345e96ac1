// Which tokens a sequence has seen, and how often it wrote each: what penalties look at.
//
// Grows with the number of different tokens, not with the vocabulary or the length. One sequence's
// own; kept over preemption.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace fathom {

class TokenHistory {
 public:
  struct Entry {
    int32_t id = 0;
    int32_t output_count = 0;  // 0: only in the prompt
  };

  void add_prompt(std::span<const int32_t> ids) {
    for (const int32_t id : ids) entry(id);
  }
  void add_output(int32_t id) { ++entry(id).output_count; }

  // Each token once, in the order of first appearance.
  std::span<const Entry> entries() const { return entries_; }

 private:
  Entry& entry(int32_t id) {
    const auto [it, is_new] = index_.try_emplace(id, entries_.size());
    if (is_new) entries_.push_back({id, 0});
    return entries_[it->second];
  }

  std::vector<Entry> entries_;
  std::unordered_map<int32_t, size_t> index_;
};

}  // namespace fathom
