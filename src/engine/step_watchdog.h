// Ends the process when a device does not come back: kernels whose CTAs wait for one another can
// wait for ever (device/cuda/co_resident.h), and a call of the driver then blocks with them.
//
// Owns a thread. Watches are made on one thread, where that waits for the device. Time counts in
// ticks of the watchdog's own thread, so that a process that was stopped and continued has not used
// its time up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace fathom {

class StepWatchdog {
 public:
  // Called once, on the watchdog's thread, with what did not end.
  using Expired = std::function<void(const std::string& what, std::chrono::nanoseconds limit)>;

  // Says so on stderr and ends the process with status kExitStuck, without destructors: they would
  // wait for the device.
  static constexpr int kExitStuck = 3;
  [[noreturn]] static void end_process(const std::string& what, std::chrono::nanoseconds limit);

  explicit StepWatchdog(Expired expired = end_process);
  ~StepWatchdog();
  StepWatchdog(const StepWatchdog&) = delete;
  StepWatchdog& operator=(const StepWatchdog&) = delete;

  // As long as it lives: `what` must end within the limit. 0: any time. One at a time.
  class Watch {
   public:
    Watch(StepWatchdog& watchdog, std::string what, std::chrono::nanoseconds limit)
        : watchdog_(watchdog) {
      watchdog_.begin(std::move(what), limit);
    }
    ~Watch() { watchdog_.end(); }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    StepWatchdog& watchdog_;
  };

 private:
  void begin(std::string what, std::chrono::nanoseconds limit);
  void end();
  void run();

  const Expired expired_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string what_;
  std::chrono::nanoseconds limit_{0}, used_{0};
  bool watching_ = false, stopping_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace fathom
