// Ends the process when a device does not end its work in time. Kernels whose CTAs wait for one
// another can hang (device/cuda/co_resident.h), and a driver call then blocks with them.
//
// Owns a thread. Watches are created on one thread, where it waits for the device. Time is counted
// in ticks of the watchdog's own thread, so time during which the process was stopped does not
// count.
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
  // Called once, on the watchdog's thread, with the name of what did not end and its limit.
  using Expired = std::function<void(const std::string& what, std::chrono::nanoseconds limit)>;

  // Prints a message on stderr and ends the process with status kExitStuck, without destructors:
  // those would wait for the device.
  static constexpr int kExitStuck = 3;
  [[noreturn]] static void end_process(const std::string& what, std::chrono::nanoseconds limit);

  explicit StepWatchdog(Expired expired = end_process);
  ~StepWatchdog();
  StepWatchdog(const StepWatchdog&) = delete;
  StepWatchdog& operator=(const StepWatchdog&) = delete;

  // While a Watch lives, the work named `what` must end within the limit; 0: no limit. At most one
  // lives at a time.
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
  std::thread thread_;  // last: uses the members above
};

}  // namespace fathom
