// Random bits that nobody can predict, for names that must not be guessed. base/random.h has the
// reproducible ones.
#pragma once

#include <unistd.h>

#include <cstdint>

#include "base/check.h"

namespace fathom {

// From the kernel, without blocking once the machine is up. Any thread.
inline uint64_t unpredictable_bits() {
  uint64_t bits = 0;
  FATHOM_CHECK(getentropy(&bits, sizeof(bits)) == 0, "the kernel gives no random bytes");
  return bits;
}

}  // namespace fathom
