#include "cli/stop_signals.h"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>

#include "base/log.h"

namespace fathom {
namespace {

// Under nohup SIGHUP is ignored at start, so that the process outlives its terminal. Blocked
// signals that are ignored would still be returned by sigwait().
bool takes_sighup() {
  static const bool takes = [] {
    struct sigaction now = {};
    return sigaction(SIGHUP, nullptr, &now) != 0 || now.sa_handler != SIG_IGN;
  }();
  return takes;
}

sigset_t stop_set() {
  sigset_t set;
  sigemptyset(&set);
  if (takes_sighup()) sigaddset(&set, SIGHUP);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGUSR2);  // wakes the watching thread in the destructor
  return set;
}

}  // namespace

StopSignals::StopSignals() {
  const sigset_t set = stop_set();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { watch(); });
}

StopSignals::~StopSignals() {
  ends_ = true;
  pthread_kill(thread_.native_handle(), SIGUSR2);
  thread_.join();
}

void StopSignals::watch() {
  const sigset_t set = stop_set();
  for (;;) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) continue;
    if (ends_) return;
    if (signal == SIGUSR2) continue;
    const char* const name = signal == SIGINT ? "SIGINT" : signal == SIGHUP ? "SIGHUP" : "SIGTERM";
    if (!waits_) {
      log_info("{} while the model was being loaded", name);
      std::_Exit(0);
    }
    const std::lock_guard lock(mutex_);
    if (signalled_) {
      log_warning("{} again: what still runs is cut off", name);
      std::_Exit(130);
    }
    log_info("{}: no new requests, what runs may end", name);
    signalled_ = true;
    changed_.notify_all();
  }
}

void StopSignals::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return signalled_; });
}

}  // namespace fathom
