// TCP sockets as ranks use them: non-blocking, closed on exec, IPv4 and IPv6.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace fathom {

// A file descriptor that is closed with its owner.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// A host, as a name or a number, and a port.
struct Endpoint {
  std::string host;
  int port = 0;

  bool operator==(const Endpoint&) const = default;
};

// "host:5000", "10.0.0.1:5000", "[::1]:5000". The port is 1 … 65535.
Result<Endpoint> parse_endpoint(std::string_view text);
std::string to_string(const Endpoint& endpoint);

// Listens on the host's addresses, the first that is one of this machine. Port 0: one that is free.
// Fails with kUnavailable if the name is not known (yet), with kNotFound if no address is of this
// machine, with kInvalidArgument if the port is in use or not allowed.
Result<Fd> listen_on(const Endpoint& endpoint);
// Listens on all addresses of this machine.
Result<Fd> listen_everywhere(int port);

// One attempt, no longer than the deadline.
Result<Fd> connect_to(const Endpoint& endpoint, std::chrono::steady_clock::time_point deadline);

// The next connection of a listening socket; no value when none waits.
Fd accept_from(int listener);

// The two ends of a socket, as numbers.
Result<Endpoint> local_endpoint(int fd);
Result<Endpoint> peer_endpoint(int fd);

// "Connection refused", for errno's values. Any thread.
std::string errno_text(int error_number);

}  // namespace fathom
