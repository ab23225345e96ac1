#include "server/http/listener.h"

#include <utility>

#include "base/log.h"

namespace fathom::http {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

// Without descriptors or memory accept() fails at once, again and again: try so often.
constexpr std::chrono::milliseconds kPauseBeforeAccepting{100};
// Connections above the limit that may be told so, each for the linger time; more are just closed.
constexpr int64_t kToldAtOnce = 256;

error_code bind_to(tcp::acceptor& acceptor, const tcp::endpoint& endpoint) {
  error_code failure;
  acceptor.close(failure);
  if (acceptor.open(endpoint.protocol(), failure)) return failure;
  // A restarted server may bind while old connections are in TIME_WAIT.
  if (acceptor.set_option(tcp::acceptor::reuse_address(true), failure)) return failure;
  if (acceptor.bind(endpoint, failure)) return failure;
  acceptor.listen(asio::socket_base::max_listen_connections, failure);
  return failure;
}

}  // namespace

Listener::Listener(ServerState& state, const std::vector<std::unique_ptr<IoLoop>>& loops)
    : state_(state),
      loops_(loops),
      acceptor_(loops.front()->context()),
      pause_(loops.front()->context()) {}

Result<> Listener::bind(const std::string& host, int port) {
  error_code failure;
  tcp::resolver resolver(loops_.front()->context());
  const auto endpoints = resolver.resolve(
      host, std::to_string(port), tcp::resolver::passive | tcp::resolver::numeric_service, failure);
  if (!failure && endpoints.empty()) failure = asio::error::host_not_found;
  for (const auto& entry : endpoints) {
    failure = bind_to(acceptor_, entry.endpoint());
    if (!failure) break;
  }
  if (failure)
    return error(Code::kUnavailable, "cannot listen on {}:{}: {}", host, port, failure.message());
  port_ = acceptor_.local_endpoint().port();
  return {};
}

void Listener::resume() {
  ++generation_;
  error_code ignored;
  acceptor_.cancel(ignored);
  pause_.cancel();
  accept();
}

void Listener::close() {
  error_code ignored;
  acceptor_.close(ignored);
}

void Listener::accept() {
  IoLoop& loop = *loops_[next_];
  acceptor_.async_accept(loop.context(), [this, &loop, generation = generation_](
                                             error_code failure, tcp::socket socket) {
    if (failure == asio::error::operation_aborted) return;
    if (!failure) {
      failing_ = false;
      next_ = (next_ + 1) % loops_.size();
      accepted(std::move(socket), loop);
    }
    if (generation != generation_) return;  // resume() has asked for the next
    if (!failure) return accept();
    if (!std::exchange(failing_, true)) {
      log_warning("http: cannot accept connections: {}", failure.message());
    }
    pause_.expires_after(kPauseBeforeAccepting);
    pause_.async_wait([this](const error_code& stopped) {
      if (!stopped) accept();
    });
  });
}

void Listener::accepted(tcp::socket socket, IoLoop& loop) {
  ++state_.accepted;
  const int64_t others = state_.connections;
  const bool refuse = others >= state_.options.max_connections;
  if (refuse) ++state_.refused;
  if (others >= state_.options.max_connections + kToldAtOnce) return;
  loop.adopt(std::move(socket), ConnectionCount(state_.connections), refuse);
}

}  // namespace fathom::http
