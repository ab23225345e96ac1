#include "comm/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <memory>
#include <system_error>

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Ranks of many nodes dial at once.
constexpr int kBacklog = 1024;

Result<Addresses> resolve(const Endpoint& endpoint, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(endpoint.port);
  const char* host = endpoint.host.empty() ? nullptr : endpoint.host.c_str();
  const int failed = getaddrinfo(host, port.c_str(), &hints, &found);
  if (failed != 0) {
    return error(Code::kUnavailable, "host '{}' is not known: {}", endpoint.host,
                 failed == EAI_SYSTEM ? errno_text(errno) : gai_strerror(failed));
  }
  return Addresses(found, &freeaddrinfo);
}

Fd make_socket(const addrinfo& address) {
  return Fd(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
}

// Small messages go at once, and a host that has vanished is noticed. Buffers are left to the
// kernel: setting their sizes would end its own adaption.
void set_stream_options(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

// 0 or an errno value.
int bind_and_listen(const addrinfo& address, Fd& listener) {
  listener = make_socket(address);
  if (!listener) return errno;
  const int on = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener.get(), address.ai_addr, address.ai_addrlen) != 0) return errno;
  return listen(listener.get(), kBacklog) == 0 ? 0 : errno;
}

Result<Fd> connect_once(const addrinfo& address, Clock::time_point deadline) {
  Fd fd = make_socket(address);
  if (!fd) return error(Code::kUnavailable, "{}", errno_text(errno));
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return error(Code::kUnavailable, "{}", errno_text(errno));
    pollfd writable{fd.get(), POLLOUT, 0};
    int ready = 0;
    do {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      ready = poll(&writable, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
    } while (ready < 0 && errno == EINTR);
    if (ready <= 0) return error(Code::kUnavailable, "no answer");
    int failed = 0;
    socklen_t length = sizeof failed;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &failed, &length);
    if (failed != 0) return error(Code::kUnavailable, "{}", errno_text(failed));
  }
  set_stream_options(fd.get());
  return fd;
}

Result<Endpoint> endpoint_of(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  const int failed = getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host,
                                 sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  if (failed != 0) return error(Code::kUnavailable, "{}", gai_strerror(failed));
  return Endpoint{host, std::stoi(port)};
}

}  // namespace

std::string errno_text(int error_number) {
  return std::error_code(error_number, std::generic_category()).message();
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Result<Endpoint> parse_endpoint(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) {
    return invalid("'{}' is not HOST:PORT: it has no port", text);
  }
  std::string_view host = text.substr(0, colon);
  const std::string_view port_text = text.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return invalid("'{}' is not HOST:PORT: an IPv6 address stands in brackets, [::1]:5000", text);
  }
  if (host.empty()) return invalid("'{}' is not HOST:PORT: it has no host", text);
  int port = 0;
  const auto [end, failed] =
      std::from_chars(port_text.data(), port_text.data() + port_text.size(), port);
  if (failed != std::errc() || end != port_text.data() + port_text.size() || port < 1 ||
      port > 65535) {
    return invalid("'{}' is not HOST:PORT: the port is a number from 1 to 65535", text);
  }
  return Endpoint{std::string(host), port};
}

std::string to_string(const Endpoint& endpoint) {
  const bool ipv6 = endpoint.host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", ipv6 ? "[" : "", endpoint.host, ipv6 ? "]" : "", endpoint.port);
}

Result<Fd> listen_on(const Endpoint& endpoint) {
  FATHOM_TRY(const Addresses addresses, resolve(endpoint, AI_PASSIVE));
  int failed = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Fd listener;
    failed = bind_and_listen(*address, listener);
    if (failed == 0) return listener;
    if (failed != EADDRNOTAVAIL) break;
  }
  if (failed == EADDRINUSE) {
    return invalid("port {} of {} is in use by another process", endpoint.port, endpoint.host);
  }
  const Code code = failed == EADDRNOTAVAIL ? Code::kNotFound : Code::kInvalidArgument;
  return error(code, "cannot listen on {}: {}", to_string(endpoint), errno_text(failed));
}

Result<Fd> listen_everywhere(int port) {
  // "::" takes IPv4 too; where the kernel has no IPv6 it does not exist.
  auto listener = listen_on({"::", port});
  return listener ? std::move(listener) : listen_on({"0.0.0.0", port});
}

Result<Fd> connect_to(const Endpoint& endpoint, Clock::time_point deadline) {
  FATHOM_TRY(const Addresses addresses, resolve(endpoint, 0));
  Result<Fd> connected = error(Code::kUnavailable, "it has no address");
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    connected = connect_once(*address, deadline);
    if (connected) break;
  }
  return connected;
}

Fd accept_from(int listener) {
  Fd fd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd) set_stream_options(fd.get());
  return fd;
}

Result<Endpoint> local_endpoint(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return error(Code::kUnavailable, "{}", errno_text(errno));
  }
  return endpoint_of(address, length);
}

Result<Endpoint> peer_endpoint(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return error(Code::kUnavailable, "{}", errno_text(errno));
  }
  return endpoint_of(address, length);
}

}  // namespace fathom
