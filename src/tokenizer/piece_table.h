// Finds a vocabulary entry by its bytes. Entries of up to 16 bytes, which covers nearly all words,
// are stored in the table itself, so a lookup touches one cache line. Filled once, then read by any
// thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/table_hash.h"

namespace fathom {

// Whether merging an entry's own bytes produces the entry. Computed when first needed.
enum class Reached : uint8_t { kUnknown, kNo, kYes };

class PieceTable {
 public:
  struct Entry {
    uint64_t low = 0, high = 0;  // the bytes (short entries) or their hash (long ones)
    int32_t id = -1;             // -1: no entry here
    uint32_t length = 0;
    mutable std::atomic<Reached> reached{Reached::kUnknown};
  };

  // A table with room for `count` entries.
  explicit PieceTable(size_t count);

  // Inserts an entry, whose bytes must outlive the table. Returns false if these bytes exist
  // already.
  bool insert(std::string_view bytes, int32_t id);

  // The entry with exactly these bytes, or null.
  const Entry* find(std::string_view bytes) const;

 private:
  struct Key {
    uint64_t low, high, hash;
  };
  Key key_of(std::string_view bytes) const;

  TableHash hash_;
  size_t mask_;
  std::vector<Entry> slots_;
  std::vector<std::string_view> long_bytes_;  // by slot; only for entries over 16 bytes
};

}  // namespace fathom
