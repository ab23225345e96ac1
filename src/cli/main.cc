#include <fcntl.h>

#include "cli/command_line.h"

namespace {

// A standard stream that is closed would be given to the next file or connection that is opened,
// and what is logged would be written into that.
void keep_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) < 0) open("/dev/null", O_RDWR);  // takes the lowest free one
  }
}

}  // namespace

int main(int argc, char** argv) {
  keep_standard_descriptors();
  return fathom::run_command_line(argc, argv);
}
