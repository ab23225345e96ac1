// Maps two adjacent tokens to their merge: its rank and the resulting token. Filled once, then read
// by any thread.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "tokenizer/table_hash.h"

namespace fathom {

struct Merge {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t rank = kNone;  // lower merges first
  int32_t id = -1;        // the merged token
};

class MergeTable {
 public:
  explicit MergeTable(size_t count) : mask_(std::bit_ceil(count * 2 + 16) - 1), slots_(mask_ + 1) {}

  // Inserts a merge. A repeated pair takes the new rank: as in Hugging Face's `tokenizers`, the
  // last one counts.
  void insert(int32_t left, int32_t right, Merge merge) {
    const uint64_t key = key_of(left, right);
    size_t i = hash_(key, 0) & mask_;
    while (slots_[i].key != kEmpty && slots_[i].key != key) i = (i + 1) & mask_;
    slots_[i] = {key, merge};
  }

  // The merge of two tokens; rank is Merge::kNone if they do not merge.
  Merge find(int32_t left, int32_t right) const {
    const uint64_t key = key_of(left, right);
    for (size_t i = hash_(key, 0) & mask_;; i = (i + 1) & mask_) {
      if (slots_[i].key == key) return slots_[i].merge;
      if (slots_[i].key == kEmpty) return {};
    }
  }

 private:
  static constexpr uint64_t kEmpty = UINT64_MAX;  // no valid pair: ids are not negative
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge;
  };

  static uint64_t key_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  TableHash hash_;
  size_t mask_;
  std::vector<Slot> slots_;
};

}  // namespace fathom
