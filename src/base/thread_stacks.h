// Stack traces of all threads of this process, for diagnosing a hang.
//
// Each thread gets a signal and records its own return addresses; the caller resolves the names.
// Functions of the program itself have names only if it exports them (ENABLE_EXPORTS). Other frames
// are printed as FILE+OFFSET, which addr2line reads.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace fathom {

// Threads with the same stack.
struct ThreadStack {
  std::vector<pid_t> threads;
  std::vector<std::string> frames;  // innermost first; empty: they did not respond
};

// Returns the stacks in order of their first thread's id, including the caller's. Takes at most
// `limit`, of which an unresponsive thread takes a fraction. One call at a time. Installs a handler
// for a real-time signal and leaves it installed.
std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit);

}  // namespace fathom
