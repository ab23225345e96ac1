#include "comm/abort_bell.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>

namespace fathom {

AbortBell::AbortBell(AbortWord& abort_word)
    : abort_word_(abort_word), fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) throw std::runtime_error("no eventfd: " + errno_text(errno));
  watch_ = abort_word_.watch([this] { ring(); });
}

AbortBell::~AbortBell() { abort_word_.unwatch(watch_); }

void AbortBell::ring() {
  const uint64_t one = 1;
  // It fails only where the counter is full: then it is readable.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof one);
}

void AbortBell::quiet() {
  uint64_t rings = 0;
  // It fails where nobody has rung.
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &rings, sizeof rings);
}

}  // namespace fathom
