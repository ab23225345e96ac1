// Where every thread of this process is, for the last lines of a process that hangs.
//
// Each thread is asked by a signal and notes its own return addresses; names are looked up by the
// caller. What a program shows of its own names it has to export (ENABLE_EXPORTS); the rest stands
// there as FILE+OFFSET, which addr2line reads.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace fathom {

// Threads that are at the same place.
struct ThreadStack {
  std::vector<pid_t> threads;
  std::vector<std::string> frames;  // innermost first; none: they did not answer
};

// In order of the first thread's id, the caller's among them. Takes at most `limit`, a fraction of
// it for a thread that does not answer. One call at a time; installs a handler for a real-time
// signal and leaves it.
std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit);

}  // namespace fathom
