// State shared by all I/O threads of one server.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "server/http/byte_stream.h"
#include "server/http/dispatcher.h"
#include "server/http/route_table.h"
#include "server/http/server_options.h"

namespace fathom::http {

// Number of requests being answered. Any thread may call.
class InFlight {
 public:
  void add();
  void remove();
  int64_t count() const;

  // Waits until the count is zero; false at the deadline.
  bool wait_until_none(std::chrono::steady_clock::time_point deadline);
  // Moves the deadline of waiting threads to an earlier time.
  void hasten(std::chrono::steady_clock::time_point deadline);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t count_ = 0;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
};

// Counts one open connection towards max_connections. Moved from the listener to the connection.
class ConnectionCount {
 public:
  explicit ConnectionCount(std::atomic<int64_t>& connections) : connections_(&connections) {
    ++*connections_;
  }
  ConnectionCount(ConnectionCount&& other) noexcept
      : connections_(std::exchange(other.connections_, nullptr)) {}
  ConnectionCount& operator=(ConnectionCount&&) = delete;
  ~ConnectionCount() {
    if (connections_ != nullptr) --*connections_;
  }

 private:
  std::atomic<int64_t>* connections_;
};

struct ServerState {
  ServerOptions options;
  RouteTable routes;
  std::unique_ptr<const Dispatcher> dispatcher;
  std::unique_ptr<const TlsContext> tls;  // null: no TLS
  std::function<void(std::function<void()>)> run_on_worker;

  std::atomic<bool> draining{false};
  InFlight in_flight;
  std::atomic<int64_t> body_bytes{0};  // sum of bodies being received, see max_total_body_bytes

  std::atomic<int64_t> connections{0}, accepted{0}, refused{0};
  std::atomic<int64_t> responses[6] = {};
  std::atomic<int64_t> closed_by_client{0}, cut_off{0};
  std::atomic<int64_t> bytes_received{0}, bytes_sent{0};
};

}  // namespace fathom::http
