// How a rank waits before it sleeps.
#pragma once

#include <chrono>

namespace fathom {

// Longer than ranks of one machine are apart in a decode step, shorter than what a neighbour's
// process would notice.
inline constexpr auto kRankSpin = std::chrono::microseconds(50);
// Between two looks at the clock.
inline constexpr int kSpinsALook = 64;

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace fathom
