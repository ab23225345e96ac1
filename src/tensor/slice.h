// Consecutive elements of a dimension: a rank's part of it.
#pragma once

#include <cstdint>

namespace fathom {

struct Slice {
  int64_t first = 0;
  int64_t count = 0;  // 0: none of them

  int64_t end() const { return first + count; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

}  // namespace fathom
