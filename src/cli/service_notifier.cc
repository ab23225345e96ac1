#include "cli/service_notifier.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "cli/flags.h"

namespace fathom {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::chrono::microseconds watchdog_interval() {
  const std::string pid = environment("WATCHDOG_PID");
  if (!pid.empty() && pid != std::to_string(getpid())) return {};
  const auto interval = parse_count(environment("WATCHDOG_USEC"));
  return std::chrono::microseconds(interval && *interval > 0 ? *interval : 0);
}

}  // namespace

ServiceNotifier::ServiceNotifier()
    : socket_path_(environment("NOTIFY_SOCKET")), interval_(watchdog_interval()) {}

ServiceNotifier::~ServiceNotifier() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ServiceNotifier::ready() {
  send("READY=1");
  if (socket_path_.empty() || interval_.count() == 0) return;
  thread_ = std::thread([this] { keep_alive(); });
}

void ServiceNotifier::stopping() { send("STOPPING=1"); }

void ServiceNotifier::keep_alive() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, interval_ / 2, [this] { return ends_; })) send("WATCHDOG=1");
}

void ServiceNotifier::send(std::string_view state) const {
  if (socket_path_.empty()) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_path_.size() >= sizeof(address.sun_path)) {
    log_warning("NOTIFY_SOCKET is longer than a socket's path can be");
    return;
  }
  std::memcpy(address.sun_path, socket_path_.data(), socket_path_.size());
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_path_.size());
  const int handle = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  if (handle < 0 || sendto(handle, state.data(), state.size(), MSG_NOSIGNAL, to, length) < 0) {
    log_warning("the service manager was not told {}: {}", state, std::strerror(errno));
  }
  if (handle >= 0) close(handle);
}

}  // namespace fathom
