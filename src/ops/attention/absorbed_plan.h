// Split-KV plan of absorbed attention on the CPU: threads compute a sequence's splits apart and
// combine them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/math.h"

namespace fathom::cpu {

inline constexpr int64_t kMaxSplits = 16;

struct KeySplit {
  int64_t splits = 1;
  int64_t keys = 0;  // keys of each split but the last

  friend bool operator==(const KeySplit&, const KeySplit&) = default;
};

// `length` is what a row sees. Depends on nothing else, never on the batch or the threads, so a
// row's result is batch-invariant. An even number of equal splits, of 512 keys at most until there
// are 16: two threads share a single sequence evenly, and a split's work stays far above the cost
// of its combine (1 KB of sums a row and split, against 1.1 KB of cache a key).
inline KeySplit split_keys(int64_t length) {
  if (length < 32) return {1, length};
  const int64_t wanted = std::min<int64_t>(2 * ceil_div(length, 1024), kMaxSplits);
  const int64_t keys = round_up(ceil_div(length, wanted), 8);
  return {ceil_div(length, keys), keys};
}

}  // namespace fathom::cpu
