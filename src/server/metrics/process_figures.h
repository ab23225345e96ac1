// The kernel's figures about this process, as Prometheus client libraries export them.
#pragma once

#include <cstdint>

namespace fathom {

struct ProcessFigures {
  int64_t resident_bytes = 0, virtual_bytes = 0;
  int64_t open_files = 0, max_files = 0;
  double start_seconds = 0;  // since 1970
  double cpu_seconds = 0;    // all threads, user and system
};

// Reads /proc; a figure that cannot be read is 0. Any thread may call.
ProcessFigures process_figures();

}  // namespace fathom
