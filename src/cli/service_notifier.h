// Reports the server's state to a service manager with systemd's protocol for Type=notify units
// (sd_notify(3)): datagrams to the socket in NOTIFY_SOCKET. Does nothing if that variable is unset.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace fathom {

// Owns a thread while the service manager wants keep-alive messages (WATCHDOG_USEC, the unit's
// WatchdogSec=). Create it after StopSignals, so that this thread does not receive the signals.
class ServiceNotifier {
 public:
  // Reads the environment. WATCHDOG_USEC applies only if WATCHDOG_PID is unset or this process.
  ServiceNotifier();
  ~ServiceNotifier();  // stops the keep-alive messages
  ServiceNotifier(const ServiceNotifier&) = delete;
  ServiceNotifier& operator=(const ServiceNotifier&) = delete;

  void ready();     // sends READY=1, and from then on WATCHDOG=1 twice per interval
  void stopping();  // STOPPING=1

 private:
  void send(std::string_view state) const;
  void keep_alive();

  std::string socket_path_;  // empty: no socket; a leading '@': the abstract namespace
  std::chrono::microseconds interval_{0};  // 0: no keep-alive messages
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace fathom
