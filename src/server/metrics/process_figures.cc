#include "server/metrics/process_figures.h"

#include <sys/resource.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>

namespace fathom {
namespace {

// Returns the boot time in seconds since 1970.
double boot_seconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  for (double value = 0; file >> word;) {
    if (word == "btime" && file >> value) return value;
  }
  return 0;
}

// Reads field 22 of /proc/self/stat. The name in field 2 may hold blanks and parentheses.
double start_seconds() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  size_t at = line.rfind(')');
  constexpr int kStartTime = 22, kName = 2;
  for (int field = kName; field < kStartTime && at != std::string::npos; ++field) {
    at = line.find(' ', at + 1);
  }
  if (at == std::string::npos) return 0;
  const double ticks = std::strtod(line.c_str() + at, nullptr);
  return boot_seconds() + ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

ProcessFigures process_figures() {
  static const double started = start_seconds();
  ProcessFigures figures{.start_seconds = started, .cpu_seconds = cpu_seconds()};
  std::ifstream memory("/proc/self/statm");
  int64_t virtual_pages = 0, resident_pages = 0;
  if (memory >> virtual_pages >> resident_pages) {
    figures.virtual_bytes = virtual_pages * sysconf(_SC_PAGESIZE);
    figures.resident_bytes = resident_pages * sysconf(_SC_PAGESIZE);
  }
  std::error_code failed;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", failed), end;
       !failed && entry != end; entry.increment(failed)) {
    ++figures.open_files;
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
    figures.max_files = static_cast<int64_t>(limit.rlim_cur);
  return figures;
}

}  // namespace fathom
