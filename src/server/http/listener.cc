#include "server/http/listener.h"

#include <utility>

#include "base/log.h"
#include "server/http/host.h"

namespace fathom::http {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

// Without descriptors or memory accept() keeps failing at once, so it is retried at this interval.
constexpr std::chrono::milliseconds kPauseBeforeAccepting{100};

error_code bind_to(tcp::acceptor& acceptor, const tcp::endpoint& endpoint) {
  error_code failure;
  acceptor.close(failure);
  if (acceptor.open(endpoint.protocol(), failure)) return failure;
  // Lets a restarted server bind while old connections are in TIME_WAIT.
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
      pause_(loops.front()->context()),
      farewell_(loops.front()->context(), state) {}

Result<> Listener::bind(const std::string& host, int port) {
  error_code failure;
  tcp::resolver resolver(loops_.front()->context());
  const auto endpoints =
      resolver.resolve(std::string(without_brackets(host)), std::to_string(port),
                       tcp::resolver::passive | tcp::resolver::numeric_service, failure);
  if (!failure && endpoints.empty()) failure = asio::error::host_not_found;
  for (const auto& entry : endpoints) {
    failure = bind_to(acceptor_, entry.endpoint());
    if (!failure) break;
  }
  if (failure)
    return error(Code::kUnavailable, "cannot listen on {}: {}", address_text(host, port),
                 failure.message());
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
    if (generation != generation_) return;  // resume() has started another accept
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
  if (state_.connections >= state_.options.max_connections) {
    ++state_.refused;
    return farewell_.tell(std::move(socket));
  }
  loop.adopt(std::move(socket), ConnectionCount(state_.connections));
}

}  // namespace fathom::http
