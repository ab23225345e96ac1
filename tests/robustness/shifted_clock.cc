// Preloaded into the server: the wall clock as an administrator, or a machine that wakes, sets it.
// The steady clock stays. The file FATHOM_SHIFTED_CLOCK begins with the shift in seconds (64 bits),
// which a test changes at any time. Timeouts that the kernel keeps by the wall clock are not moved.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

int64_t shift() {
  static int64_t* const seconds = [] {
    const char* const path = std::getenv("FATHOM_SHIFTED_CLOCK");
    const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
    void* const mapped = mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) std::abort();
    close(file);
    return static_cast<int64_t*>(mapped);
  }();
  return std::atomic_ref<int64_t>(*seconds).load(std::memory_order_relaxed);
}

template <typename Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static auto* const next = original<int(clockid_t, timespec*)>("clock_gettime");
  const int result = next(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    time->tv_sec += shift();
  }
  return result;
}

int gettimeofday(timeval* time, void* zone) noexcept {
  static auto* const next = original<int(timeval*, void*)>("gettimeofday");
  const int result = next(time, zone);
  if (result == 0) time->tv_sec += shift();
  return result;
}

time_t time(time_t* into) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (into != nullptr) *into = now.tv_sec;
  return now.tv_sec;
}
}
