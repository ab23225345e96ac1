#include "base/thread_stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxFrames = 64;
// The handler's own frame and the signal trampoline.
constexpr int kOwnFrames = 2;
// The limit is divided into this many shares. A thread that blocks the signal or waits for a disk
// takes one.
constexpr int kSilentThreads = 8;

// One thread is queried at a time. `asked` is its id; kAnswering while it writes its answer; 0
// otherwise, so a late answer writes nothing.
constexpr pid_t kAnswering = -1;
std::atomic<pid_t> asked{0};
sem_t answered;
void* addresses[kMaxFrames];
int num_addresses = 0;

int asking_signal() { return SIGRTMIN + 4; }

// The signal handler, on the queried thread. backtrace() has been called before, so that it does
// not allocate here.
void answer(int) {
  const int kept = errno;
  pid_t self = gettid();
  if (asked.compare_exchange_strong(self, kAnswering)) {
    num_addresses = backtrace(addresses, kMaxFrames);
    sem_post(&answered);
  }
  errno = kept;
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    void* unused[1];
    backtrace(unused, 1);  // loads libgcc, which allocates
    sem_init(&answered, 0, 0);
    struct sigaction action {};
    action.sa_handler = answer;
    action.sa_flags = SA_RESTART;
    sigaction(asking_signal(), &action, nullptr);
  });
}

bool wait_for_answer(Clock::time_point end) {
  const auto since_boot = end.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
  const timespec until{.tv_sec = seconds.count(),
                       .tv_nsec = std::chrono::nanoseconds(since_boot - seconds).count()};
  while (sem_clockwait(&answered, CLOCK_MONOTONIC, &until) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

std::string name_at(void* address) {
  Dl_info where{};
  if (dladdr(address, &where) == 0 || where.dli_fname == nullptr) {
    return fmt::format("{}", fmt::ptr(address));
  }
  const std::string_view path = where.dli_fname;
  const auto offset = [address](const void* begin) {
    return static_cast<const char*>(address) - static_cast<const char*>(begin);
  };
  std::string place = fmt::format("{}+{:#x}", path.substr(path.rfind('/') + 1),  // npos + 1 is 0
                                  offset(where.dli_fbase));
  if (where.dli_sname == nullptr) return place;
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(where.dli_sname, nullptr, nullptr, &status), std::free);
  return fmt::format("{} ({})", status == 0 ? readable.get() : where.dli_sname, place);
}

std::vector<std::string> names_of(std::span<void* const> stack) {
  std::vector<std::string> names;
  for (size_t i = 0; i < stack.size(); ++i) {
    // A return address follows the call and may belong to the next function.
    names.push_back(name_at(i == 0 ? stack[i] : static_cast<char*>(stack[i]) - 1));
  }
  return names;
}

// Returns nothing if the thread does not answer in time. `usable` becomes false if it has begun to
// answer and does not finish: then no other thread can be queried.
std::vector<std::string> ask(pid_t thread, Clock::time_point end, bool& usable) {
  asked = thread;
  if (tgkill(getpid(), thread, asking_signal()) != 0) {
    asked = 0;
    return {};
  }
  if (!wait_for_answer(end)) {
    pid_t expected = thread;
    if (asked.compare_exchange_strong(expected, 0)) return {};
    usable = wait_for_answer(end + std::chrono::milliseconds(50));
    if (!usable) return {};
  }
  asked = 0;
  const int own = std::min(kOwnFrames, num_addresses);
  return names_of(std::span(addresses).subspan(static_cast<size_t>(own),
                                               static_cast<size_t>(num_addresses - own)));
}

std::vector<pid_t> threads_of_process() {
  std::vector<pid_t> threads;
  std::error_code failure;
  for (std::filesystem::directory_iterator entry("/proc/self/task", failure), end;
       !failure && entry != end; entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    pid_t thread = 0;
    std::from_chars(name.data(), name.data() + name.size(), thread);
    if (thread > 0) threads.push_back(thread);
  }
  std::sort(threads.begin(), threads.end());
  return threads;
}

}  // namespace

std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit) {
  install_handler();
  const Clock::time_point end = Clock::now() + limit;
  bool usable = true;
  std::vector<ThreadStack> stacks;
  for (const pid_t thread : threads_of_process()) {
    std::vector<std::string> frames;
    const auto now = Clock::now();
    if (usable && now < end)
      frames = ask(thread, std::min(end, now + limit / kSilentThreads), usable);
    const auto equal = std::find_if(stacks.begin(), stacks.end(), [&](const ThreadStack& other) {
      return other.frames == frames;
    });
    if (equal != stacks.end()) {
      equal->threads.push_back(thread);
    } else {
      stacks.push_back({{thread}, std::move(frames)});
    }
  }
  return stacks;
}

}  // namespace fathom
