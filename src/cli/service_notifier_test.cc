#include "cli/service_notifier.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace fathom {
namespace {

// The service manager's side of the socket.
class Manager {
 public:
  explicit Manager(std::string path) : path_(std::move(path)) {
    handle_ = socket(AF_UNIX, SOCK_DGRAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    if (path_[0] == '@') address.sun_path[0] = '\0';
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path_.size());
    EXPECT_EQ(bind(handle_, reinterpret_cast<const sockaddr*>(&address), length), 0);
    setenv("NOTIFY_SOCKET", path_.c_str(), 1);
  }
  ~Manager() {
    close(handle_);
    if (path_[0] != '@') unlink(path_.c_str());
    for (const char* name : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}) unsetenv(name);
  }

  // The next datagram; empty on timeout.
  std::string next(int milliseconds) const {
    pollfd waiting{handle_, POLLIN, 0};
    if (poll(&waiting, 1, milliseconds) != 1) return "";
    char text[64];
    const ssize_t size = recv(handle_, text, sizeof(text), 0);
    return std::string(text, static_cast<size_t>(std::max<ssize_t>(size, 0)));
  }

 private:
  std::string path_;
  int handle_ = -1;
};

constexpr int kLong = 10'000, kShort = 60;  // milliseconds

TEST(ServiceNotifier, TellsReadyAndStopping) {
  const std::string name = "fathom-notifier-test-" + std::to_string(getpid());
  for (const std::string& path : {testing::TempDir() + name, "@" + name}) {
    const Manager manager(path);
    ServiceNotifier notifier;
    EXPECT_EQ(manager.next(0), "");
    notifier.ready();
    EXPECT_EQ(manager.next(kLong), "READY=1");
    notifier.stopping();
    EXPECT_EQ(manager.next(kLong), "STOPPING=1");
    EXPECT_EQ(manager.next(kShort), "");
  }
}

TEST(ServiceNotifier, GivesSignsOfLifeWhileItLives) {
  const Manager manager("@fathom-watchdog-test-" + std::to_string(getpid()));
  setenv("WATCHDOG_USEC", "20000", 1);
  setenv("WATCHDOG_PID", std::to_string(getpid()).c_str(), 1);
  {
    ServiceNotifier notifier;
    EXPECT_EQ(manager.next(kShort), "");
    notifier.ready();
    EXPECT_EQ(manager.next(kLong), "READY=1");
    EXPECT_EQ(manager.next(kLong), "WATCHDOG=1");
    EXPECT_EQ(manager.next(kLong), "WATCHDOG=1");
  }
  while (!manager.next(0).empty()) continue;
  EXPECT_EQ(manager.next(kShort), "");
}

TEST(ServiceNotifier, AnotherProcessesWatchdogIsNotOurs) {
  const Manager manager("@fathom-watchdog-test-" + std::to_string(getpid()));
  setenv("WATCHDOG_USEC", "20000", 1);
  setenv("WATCHDOG_PID", "1", 1);
  ServiceNotifier notifier;
  notifier.ready();
  EXPECT_EQ(manager.next(kLong), "READY=1");
  EXPECT_EQ(manager.next(kShort), "");
}

TEST(ServiceNotifier, NobodyListening) {
  ServiceNotifier silent;  // NOTIFY_SOCKET is unset
  silent.ready();
  silent.stopping();
  testing::internal::CaptureStderr();
  setenv("NOTIFY_SOCKET", "/nonexistent/socket", 1);
  ServiceNotifier unheard;
  unheard.ready();
  unsetenv("NOTIFY_SOCKET");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("was not told READY=1"), std::string::npos);
}

}  // namespace
}  // namespace fathom
