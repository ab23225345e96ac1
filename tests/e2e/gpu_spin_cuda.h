// A kernel that occupies a whole GPU, which looks like a stuck kernel to the engine.
#pragma once

#include <chrono>

namespace fathom {

// Enqueues, on its own stream, CTAs that leave no room for others on any SM of the current device
// and end after `duration`; 0: never.
void occupy_gpu(std::chrono::nanoseconds duration);

}  // namespace fathom
