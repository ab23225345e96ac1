#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace fathom {

void check_failed(const char* condition, const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "fathom: bug at %s:%d: %s (%s)\n", file, line, message.c_str(), condition);
  std::fflush(stderr);
  std::abort();
}

}  // namespace fathom
