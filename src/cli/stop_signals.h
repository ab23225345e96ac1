// A server's handling of SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup).
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fathom {

// Must be created before any other thread: it blocks the signals in the calling thread, and later
// threads inherit that. One at a time.
//
// Before may_wait() a signal ends the process at once with status 0, as there is nothing to finish.
// After it the first signal makes wait() return, and the second ends the process with status 130.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  void may_wait() { waits_ = true; }
  void wait();  // blocks until the first signal

 private:
  void watch();

  std::atomic<bool> waits_ = false;
  std::atomic<bool> ends_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool signalled_ = false;
  std::thread thread_;
};

}  // namespace fathom
