// Tells a service manager how the server is: systemd's protocol of Type=notify units
// (sd_notify(3)), datagrams to the socket that NOTIFY_SOCKET names. Without that variable all of it
// does nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace fathom {

// Owns a thread while the service manager wants signs of life (WATCHDOG_USEC, WatchdogSec= of the
// unit). Made after StopSignals, so that the thread does not take the signals.
class ServiceNotifier {
 public:
  // Reads the environment; WATCHDOG_PID, if set, must be this process for WATCHDOG_USEC to count.
  ServiceNotifier();
  ~ServiceNotifier();  // ends the signs of life
  ServiceNotifier(const ServiceNotifier&) = delete;
  ServiceNotifier& operator=(const ServiceNotifier&) = delete;

  void ready();     // READY=1, and from here on WATCHDOG=1 twice in each interval
  void stopping();  // STOPPING=1

 private:
  void send(std::string_view state) const;
  void keep_alive();

  std::string socket_path_;  // empty: nobody listens; a leading '@': the abstract name space
  std::chrono::microseconds interval_{0};  // 0: no signs of life are wanted
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace fathom
