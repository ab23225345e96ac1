#include "server/http/server.h"

#include <signal.h>

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "server/http/io_loop.h"
#include "server/http/listener.h"
#include "server/http/server_state.h"

namespace fathom::http {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;

// Blocks signals in threads created while it lives: the program's own threads handle them, and a
// write to a closed connection returns EPIPE.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigemptyset(&blocked);
    for (const int number : {SIGPIPE, SIGINT, SIGTERM, SIGHUP}) sigaddset(&blocked, number);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

Result<> check_options(const ServerOptions& options) {
  const auto at_least = [](std::string_view name, int64_t value, int64_t least) -> Result<> {
    if (value >= least) return {};
    return invalid("{} is {}, the least is {}", name, value, least);
  };
  if (options.port < 0 || options.port > 65535) {
    return invalid("port is {}, expected 0 to 65535", options.port);
  }
  if (options.tls_certificate_file.empty() != options.tls_key_file.empty()) {
    return invalid("TLS needs both a certificate file and a key file");
  }
  constexpr int64_t kLeastHeaderBytes = 256, kMostHeaderBytes = 1 << 20;
  if (options.max_header_bytes > kMostHeaderBytes) {
    return invalid("max_header_bytes is {}, the most is {}", options.max_header_bytes,
                   kMostHeaderBytes);
  }
  FATHOM_RETURN_IF_ERROR(at_least("io_threads", options.io_threads, 1));
  FATHOM_RETURN_IF_ERROR(at_least("worker_threads", options.worker_threads, 1));
  FATHOM_RETURN_IF_ERROR(at_least("max_connections", options.max_connections, 1));
  FATHOM_RETURN_IF_ERROR(at_least("max_header_bytes", options.max_header_bytes, kLeastHeaderBytes));
  FATHOM_RETURN_IF_ERROR(at_least("max_headers", options.max_headers, 1));
  FATHOM_RETURN_IF_ERROR(at_least("max_body_bytes", options.max_body_bytes, 0));
  FATHOM_RETURN_IF_ERROR(
      at_least("max_total_body_bytes", options.max_total_body_bytes, options.max_body_bytes));
  FATHOM_RETURN_IF_ERROR(at_least("send_buffer_bytes", options.send_buffer_bytes, 1));
  FATHOM_RETURN_IF_ERROR(
      at_least("max_unsent_bytes", options.max_unsent_bytes, options.send_buffer_bytes));
  FATHOM_RETURN_IF_ERROR(at_least("check_interval", options.check_interval.count(), 1));
  FATHOM_RETURN_IF_ERROR(at_least("write_delay", options.write_delay.count(), 0));
  return {};
}

}  // namespace

struct Server::Parts {
  ServerState state;
  std::vector<std::unique_ptr<IoLoop>> loops;
  std::unique_ptr<Listener> listener;
  std::unique_ptr<asio::thread_pool> workers;
  std::mutex stopping;  // held while the threads are joined
  bool started = false, stopped = false;
};

Server::Server(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Server::~Server() { stop(std::chrono::nanoseconds(0)); }

Result<std::unique_ptr<Server>> Server::create(ServerOptions options, RouteTable routes) {
  FATHOM_RETURN_IF_ERROR(check_options(options));
  auto parts = std::make_unique<Parts>();
  ServerState& state = parts->state;
  FATHOM_TRY(KeyRing keys, KeyRing::create(options.api_keys, options.admin_keys));
  if (!options.tls_certificate_file.empty()) {
    FATHOM_TRY(state.tls, TlsContext::load(options.tls_certificate_file, options.tls_key_file));
  }
  state.routes = std::move(routes);
  state.dispatcher =
      std::make_unique<Dispatcher>(state.routes, std::move(keys), BrowserGuard(options));
  state.options = std::move(options);
  // KeyRing holds the digests; the keys themselves are no longer needed.
  state.options.api_keys.clear();
  state.options.admin_keys.clear();
  for (int i = 0; i < state.options.io_threads; ++i) {
    parts->loops.push_back(std::make_unique<IoLoop>(state));
  }
  parts->listener = std::make_unique<Listener>(state, parts->loops);
  return std::unique_ptr<Server>(new Server(std::move(parts)));
}

Result<> Server::listen() {
  return parts_->listener->bind(parts_->state.options.host, parts_->state.options.port);
}

int Server::port() const { return parts_->listener->port(); }

const RouteTable& Server::routes() const { return parts_->state.routes; }

void Server::start() {
  FATHOM_CHECK(!parts_->started && port() != 0, "start() comes once, after listen()");
  parts_->started = true;
  const SignalsBlocked blocked;
  parts_->workers = std::make_unique<asio::thread_pool>(
      static_cast<size_t>(parts_->state.options.worker_threads));
  parts_->state.run_on_worker = [workers = parts_->workers.get()](std::function<void()> work) {
    asio::post(*workers, std::move(work));
  };
  for (const auto& loop : parts_->loops) {
    const bool listens = loop == parts_->loops.front();
    loop->start(listens ? [listener = parts_->listener.get()] { listener->resume(); }
                        : std::function<void()>());
  }
}

void Server::begin_drain() { parts_->state.draining = true; }

std::shared_ptr<const std::atomic<int>> Server::flush() {
  const auto& loops = parts_->loops;
  const auto late = std::make_shared<std::atomic<int>>(static_cast<int>(loops.size()));
  for (const auto& loop : loops) loop->flush([late] { --*late; });
  return late;
}

bool Server::stop(std::chrono::nanoseconds grace) {
  begin_drain();
  InFlight& in_flight = parts_->state.in_flight;
  const auto deadline = Clock::now() + grace;
  in_flight.hasten(deadline);
  const std::lock_guard lock(parts_->stopping);
  if (std::exchange(parts_->stopped, true) || !parts_->started) return in_flight.count() == 0;
  const bool all_answered = in_flight.wait_until_none(deadline);
  // The first loop stops last, because its listener hands connections to the others.
  for (size_t i = parts_->loops.size(); i-- > 0;) parts_->loops[i]->stop();
  parts_->listener->close();
  parts_->workers->stop();
  parts_->workers->join();
  return all_answered;
}

ServerStats Server::stats() const {
  const ServerState& state = parts_->state;
  ServerStats stats;
  stats.connections = state.connections;
  stats.requests_in_flight = state.in_flight.count();
  stats.connections_accepted = state.accepted;
  stats.connections_refused = state.refused;
  for (size_t i = 0; i < std::size(stats.responses); ++i) stats.responses[i] = state.responses[i];
  stats.closed_by_client = state.closed_by_client;
  stats.cut_off = state.cut_off;
  stats.bytes_received = state.bytes_received;
  stats.bytes_sent = state.bytes_sent;
  return stats;
}

}  // namespace fathom::http
