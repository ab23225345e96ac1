#include "router/connection_pool.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/connect.hpp>
#include <utility>

#include "server/http/host.h"

namespace fathom::router {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using tcp = asio::ip::tcp;
using Clock = std::chrono::steady_clock;

// A replica whose machine or link is gone sends nothing, not even a reset. The kernel asks after 10
// s of silence, every 5 s, and gives up after three; bytes that are not acknowledged have 25 s too.
void watch_peer(tcp::socket& socket) {
  error_code ignored;  // without the options only the time limits notice
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  const auto set = [&](int option, int value) {
    setsockopt(socket.native_handle(), IPPROTO_TCP, option, &value, sizeof(value));
  };
  set(TCP_KEEPIDLE, 10);
  set(TCP_KEEPINTVL, 5);
  set(TCP_KEEPCNT, 3);
  set(TCP_USER_TIMEOUT, 25'000);
}

// Between two requests a server sends nothing: anything to read is its close.
bool is_quiet(tcp::socket& socket) {
  char byte = 0;
  const auto got = recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace

ConnectionPool::ConnectionPool(asio::io_context& context, client::Endpoint endpoint)
    : context_(context), endpoint_(std::move(endpoint)), resolver_(context) {
  error_code not_an_address;
  const auto address =
      asio::ip::make_address(std::string(http::without_brackets(endpoint_.host)), not_an_address);
  if (!not_an_address) {
    address_.emplace(address, static_cast<asio::ip::port_type>(endpoint_.port));
  }
}

std::shared_ptr<Socket> ConnectionPool::take() {
  const auto oldest = Clock::now() - kMostIdle;
  while (!idle_.empty()) {
    // The most recent one: the others may become old enough to go.
    Idle idle = std::move(idle_.back());
    idle_.pop_back();
    if (idle.since < oldest) {
      idle_.clear();
      break;
    }
    if (is_quiet(*idle.socket)) return std::move(idle.socket);
  }
  return nullptr;
}

void ConnectionPool::put(std::shared_ptr<Socket> socket) {
  const auto now = Clock::now();
  idle_.push_back({std::move(socket), now});
  // Bounds what a burst leaves behind.
  size_t old = 0;
  while (idle_[old].since < now - kMostIdle) ++old;
  idle_.erase(idle_.begin(), idle_.begin() + static_cast<std::ptrdiff_t>(old));
}

void ConnectionPool::connect(std::shared_ptr<Socket> socket,
                             std::function<void(const error_code&)> then) {
  const auto connected = [socket, then](const error_code& failure) {
    if (!failure && socket->is_open()) watch_peer(*socket);
    then(failure);
  };
  if (address_) return socket->async_connect(*address_, connected);
  resolver_.async_resolve(
      endpoint_.host, std::to_string(endpoint_.port),
      [self = shared_from_this(), socket, connected](const error_code& failure,
                                                     const tcp::resolver::results_type& found) {
        if (failure) return connected(failure);
        asio::async_connect(
            *socket, found,
            [connected](const error_code& refused, const tcp::endpoint&) { connected(refused); });
      });
}

}  // namespace fathom::router
