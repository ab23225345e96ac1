// SIGINT, SIGTERM and SIGHUP (unless it is ignored, as under nohup) as a server takes them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fathom {

// Made before any other thread: it blocks the signals in the calling thread, and the threads that
// come later inherit that. One at a time.
//
// Until may_wait() a signal ends the process at once, with status 0: there is nothing to finish.
// After it the first one is told by wait(), and the second ends the process, with status 130.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  void may_wait() { waits_ = true; }
  void wait();  // for the first signal

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
