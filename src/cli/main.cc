#include <fcntl.h>

#include "cli/command_line.h"

namespace {

// If a standard stream is closed, the next file or connection would get its descriptor, and log
// lines would be written into it.
void keep_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    // Takes the lowest free descriptor.
    if (fcntl(descriptor, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
}

}  // namespace

int main(int argc, char** argv) {
  keep_standard_descriptors();
  return fathom::run_command_line(argc, argv);
}
