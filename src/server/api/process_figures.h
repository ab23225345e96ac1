// What the kernel knows of this process, as Prometheus' client libraries export it.
#pragma once

#include <cstdint>

namespace fathom {

struct ProcessFigures {
  int64_t resident_bytes = 0, virtual_bytes = 0;
  int64_t open_files = 0, max_files = 0;
  double start_seconds = 0;  // since 1970
  double cpu_seconds = 0;    // of all threads, user and system
};

// Reads /proc; what can't be read is 0. Any thread.
ProcessFigures process_figures();

}  // namespace fathom
