#include "comm/peer_links.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace fathom {
namespace {

bool is_sent(const PeerLinks::Exchange& exchange) {
  return exchange.sent == sizeof(FrameHeader) + exchange.given.size();
}

bool is_received(const PeerLinks::Exchange& exchange) {
  return exchange.got >= sizeof(FrameHeader) &&
         exchange.got == sizeof(FrameHeader) + exchange.in.bytes;
}

// How long a rank looks for bytes before it sleeps: some round trips. Each look is a system call.
constexpr auto kLinkSpin = std::chrono::microseconds(50);

// For poll(): rounded up, so that a wait does not end before the deadline again and again.
int milliseconds_until(PeerLinks::Clock::time_point deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - PeerLinks::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

}  // namespace

PeerLinks::Progress PeerLinks::send_some(Exchange& exchange, int fd) {
  Progress progress = Progress::kNone;
  while (!is_sent(exchange)) {
    iovec parts[2];
    int num_parts = 0;
    size_t skip = exchange.sent;
    const ConstBytes wholes[] = {std::as_bytes(std::span(&exchange.out, 1)), exchange.given};
    for (const ConstBytes whole : wholes) {
      const ConstBytes left = whole.subspan(std::min(skip, whole.size()));
      skip -= std::min(skip, whole.size());
      if (!left.empty()) parts[num_parts++] = {const_cast<std::byte*>(left.data()), left.size()};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      return errno == EAGAIN || errno == EWOULDBLOCK ? progress : Progress::kBroken;
    }
    exchange.sent += static_cast<size_t>(sent);
    progress = Progress::kSome;
  }
  return progress;
}

PeerLinks::Progress PeerLinks::receive_some(Exchange& exchange, int fd,
                                            const std::function<void()>& on_header) {
  Progress progress = Progress::kNone;
  while (!is_received(exchange)) {
    std::span<std::byte> to;
    if (exchange.got < sizeof(FrameHeader)) {
      to = std::as_writable_bytes(std::span(&exchange.in, 1)).subspan(exchange.got);
    } else {
      to = exchange.received.subspan(exchange.got - sizeof(FrameHeader));
    }
    const ssize_t got = recv(fd, to.data(), to.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return Progress::kBroken;
    if (got < 0) {
      return errno == EAGAIN || errno == EWOULDBLOCK ? progress : Progress::kBroken;
    }
    exchange.got += static_cast<size_t>(got);
    progress = Progress::kSome;
    if (exchange.got == sizeof(FrameHeader)) {
      on_header();
      exchange.received = exchange.buffer->take(exchange.in.bytes);
    }
  }
  return progress;
}

PeerLinks::Progress PeerLinks::advance(Exchange& exchange, const std::function<void()>& on_header) {
  const int fd = connections_.at(exchange.peer).get();
  // A peer that has sent its frame and failed then is not at fault for this meeting: what can be
  // received is, before a send that fails counts.
  const Progress sent = send_some(exchange, fd);
  const Progress received = receive_some(exchange, fd, on_header);
  return std::max(sent, received);
}

PeerLinks::Outcome PeerLinks::exchange(std::span<Exchange> exchanges, Clock::time_point deadline,
                                       const std::function<void(size_t)>& on_header,
                                       size_t* closed) {
  Clock::time_point spin_until = Clock::now() + kLinkSpin;
  while (true) {
    bool complete = true, progress = false;
    for (size_t i = 0; i < exchanges.size(); ++i) {
      Exchange& exchange = exchanges[i];
      if (is_sent(exchange) && is_received(exchange)) continue;
      const Progress made = advance(exchange, [&] { on_header(i); });
      if (made == Progress::kBroken) {
        *closed = i;
        return Outcome::kClosed;
      }
      progress = progress || made == Progress::kSome;
      complete = complete && is_sent(exchange) && is_received(exchange);
    }
    if (complete) return Outcome::kComplete;
    if (bell_.rung()) return Outcome::kAborted;
    const Clock::time_point now = Clock::now();
    if (now >= deadline) return Outcome::kTimedOut;
    if (progress) spin_until = now + kLinkSpin;
    if (progress || (spins_ && now < spin_until)) continue;

    polled_.assign(1, {bell_.fd(), POLLIN, 0});
    for (const Exchange& exchange : exchanges) {
      short events = 0;
      if (!is_sent(exchange)) events |= POLLOUT;
      if (!is_received(exchange)) events |= POLLIN;
      if (events != 0) polled_.push_back({connections_.at(exchange.peer).get(), events, 0});
    }
    poll(polled_.data(), polled_.size(), milliseconds_until(deadline));
  }
}

bool PeerLinks::await_abort(std::chrono::milliseconds longest) {
  pollfd bell{bell_.fd(), POLLIN, 0};
  const auto deadline = Clock::now() + longest;
  while (!bell_.rung() && Clock::now() < deadline) poll(&bell, 1, milliseconds_until(deadline));
  return bell_.rung();
}

}  // namespace fathom
