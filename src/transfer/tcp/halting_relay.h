// For tests: a relay between a decode side and a transfer server over loopback, on whose
// connections the way to the decode side ends after so many bytes. Nobody closes them, and what
// stays below, as the control connection does, goes on.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "comm/socket.h"

namespace fathom {

class HaltingRelay {
 public:
  HaltingRelay(Endpoint server, int64_t most_bytes)
      : server_(std::move(server)), most_bytes_(most_bytes), buffer_(size_t{1} << 16) {
    auto listener = listen_on({.host = "127.0.0.1", .port = 0});
    EXPECT_TRUE(listener.has_value());
    listener_ = std::move(*listener);
    endpoint_ = *local_endpoint(listener_.get());
    thread_ = std::thread([this] { run(); });
  }
  ~HaltingRelay() {
    stopping_ = true;
    thread_.join();
  }
  HaltingRelay(const HaltingRelay&) = delete;
  HaltingRelay& operator=(const HaltingRelay&) = delete;

  const Endpoint& endpoint() const { return endpoint_; }
  // Connections that have come to their end.
  int64_t num_halted() const { return halted_; }
  // Those that are made from now on have none.
  void open() { is_open_ = true; }

 private:
  struct Pair {
    Fd decode, server;
    int64_t left = 0;  // bytes that may still go to the decode side
    bool is_over = false;
  };

  void run() {
    while (!stopping_) {
      std::vector<pollfd> waits = {{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
      for (const Pair& pair : pairs_) {
        waits.push_back({.fd = pair.decode.get(), .events = POLLIN, .revents = 0});
        const int16_t events = pair.left > 0 ? POLLIN : 0;
        waits.push_back({.fd = pair.server.get(), .events = events, .revents = 0});
      }
      if (poll(waits.data(), waits.size(), 10) <= 0) continue;
      size_t number = 1;
      for (Pair& pair : pairs_) {
        int64_t all = INT64_MAX;
        if (waits[number++].revents != 0) pass(pair.decode, pair.server, all, pair);
        if (waits[number++].revents == 0) continue;
        const bool had_some = pair.left > 0;
        pass(pair.server, pair.decode, pair.left, pair);
        halted_ += had_some && pair.left == 0;
      }
      pairs_.remove_if([](const Pair& pair) { return pair.is_over; });
      if (waits[0].revents != 0) accept();
    }
  }

  void accept() {
    Pair pair{.decode = accept_from(listener_.get()),
              .server = Fd(),
              .left = is_open_ ? INT64_MAX : most_bytes_};
    auto server = connect_to(server_, std::chrono::steady_clock::now() + std::chrono::minutes(1));
    if (!pair.decode || !server) return;
    pair.server = std::move(*server);
    pairs_.push_back(std::move(pair));
  }

  // Passes on what has arrived, at most `left` bytes.
  void pass(const Fd& from, const Fd& to, int64_t& left, Pair& pair) {
    const size_t most = std::min(buffer_.size(), static_cast<size_t>(left));
    // Where nothing may go, poll() tells of the connection's end alone.
    const ssize_t got = most > 0 ? recv(from.get(), buffer_.data(), most, MSG_DONTWAIT) : 0;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      pair.is_over = true;
      return;
    }
    left -= got;
    for (ssize_t sent = 0; sent < got && !stopping_;) {
      const ssize_t part = send(to.get(), buffer_.data() + sent, static_cast<size_t>(got - sent),
                                MSG_NOSIGNAL | MSG_DONTWAIT);
      if (part < 0 && errno != EAGAIN) {
        pair.is_over = true;
        return;
      }
      if (part < 0) {
        pollfd room{.fd = to.get(), .events = POLLOUT, .revents = 0};
        poll(&room, 1, 10);
      } else {
        sent += part;
      }
    }
  }

  const Endpoint server_;
  const int64_t most_bytes_;
  std::vector<std::byte> buffer_;
  Fd listener_;
  Endpoint endpoint_;
  std::list<Pair> pairs_;
  std::atomic<int64_t> halted_{0};
  std::atomic<bool> is_open_{false}, stopping_{false};
  std::thread thread_;
};

}  // namespace fathom
