// What all operations ask of the positions that they rotate by.
#pragma once

#include <cstdint>
#include <span>

#include "base/check.h"

namespace fathom {

inline void check_positions(std::span<const int32_t> positions, int64_t rows) {
  FATHOM_CHECK(static_cast<int64_t>(positions.size()) == rows, "{} positions for {} rows",
               positions.size(), rows);
  for (const int32_t position : positions) FATHOM_CHECK(position >= 0, "position {}", position);
}

}  // namespace fathom
