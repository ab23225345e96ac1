// How a rank waits before it sleeps.
#pragma once

#include <chrono>

namespace fathom {

// Longer than ranks of one machine are apart in a step and the engine's work between two steps, so
// that they seldom sleep: waking takes some ten microseconds. As long as ThreadPool's workers spin;
// shorter than what anybody would notice as load.
inline constexpr auto kRankSpin = std::chrono::microseconds(300);
// Between two looks at the clock.
inline constexpr int kSpinsALook = 64;

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spins for `time` at most, as long as waits().
template <typename Waits>
void spin_while(std::chrono::nanoseconds time, const Waits& waits) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point until = Clock::now() + time;
  for (int spins = 1; waits(); ++spins) {
    spin_pause();
    if (spins % kSpinsALook == 0 && Clock::now() >= until) return;
  }
}

}  // namespace fathom
