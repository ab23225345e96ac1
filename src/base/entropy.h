// Unpredictable random bits, for names that must not be guessed. For reproducible random numbers
// see base/random.h.
#pragma once

#include <unistd.h>

#include <cstdint>

#include "base/check.h"

namespace fathom {

// 64 bits from the kernel, which does not block once the machine is up. Any thread.
inline uint64_t unpredictable_bits() {
  uint64_t bits = 0;
  FATHOM_CHECK(getentropy(&bits, sizeof(bits)) == 0, "the kernel gives no random bytes");
  return bits;
}

}  // namespace fathom
