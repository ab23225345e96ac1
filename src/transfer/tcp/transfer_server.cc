#include "transfer/tcp/transfer_server.h"

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "transfer/tcp/accepted_connection.h"
#include "transfer/tcp/io_run.h"
#include "transfer/tcp/server_core.h"
#include "transfer/tcp/server_session.h"

namespace fathom {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{100};
// After an accept() that failed, of which the common cause is a lack of descriptors.
constexpr std::chrono::milliseconds kAcceptAgain{50};

asio::ip::tcp protocol_of(const Endpoint& endpoint) {
  return endpoint.host.find(':') == std::string::npos ? asio::ip::tcp::v4() : asio::ip::tcp::v6();
}

}  // namespace

std::string_view name_of(ConnectionRefusal refusal) {
  switch (refusal) {
    case ConnectionRefusal::kMalformed:
      return "malformed";
    case ConnectionRefusal::kProtocol:
      return "protocol";
    case ConnectionRefusal::kSecret:
      return "secret";
    case ConnectionRefusal::kFacts:
      return "facts";
    case ConnectionRefusal::kTooMany:
      return "too_many";
    case ConnectionRefusal::kTimeout:
      return "timeout";
  }
  return "";
}

struct TransferServer::Parts {
  explicit Parts(const TransferServerOptions& options)
      : core(std::make_shared<ServerCore>(options)),
        acceptor(*core->context),
        timer(*core->context),
        again(*core->context) {}

  void accept() {
    acceptor.async_accept([this](const error_code& failure, asio::ip::tcp::socket socket) {
      if (stopping) return;
      if (failure) {
        again.expires_after(kAcceptAgain);
        again.async_wait([this](const error_code& ended) {
          if (!ended && !stopping) accept();
        });
        return;
      }
      if (std::ssize(core->handshakes) >= core->options.max_handshakes) {
        core->count(ConnectionRefusal::kTooMany);  // closed with the socket
      } else {
        const auto accepted = std::make_shared<AcceptedConnection>(core, std::move(socket));
        core->handshakes.insert(accepted);
        accepted->start();
      }
      accept();
    });
  }

  void tick() {
    timer.expires_after(kTick);
    timer.async_wait([this](const error_code& ended) {
      if (ended || stopping) return;
      const auto now = Clock::now();
      for (const auto& accepted : core->handshakes) accepted->check_deadline(now);
      for (const auto& [id, session] : core->sessions) session->tick(now);
      tick();
    });
  }

  void stop() {
    stopping = true;
    error_code ignored;
    acceptor.close(ignored);
    timer.cancel();
    again.cancel();
    for (const auto& accepted : core->handshakes) accepted->close();
    for (const auto& [id, session] : core->sessions) session->close("the server ends");
  }

  std::shared_ptr<ServerCore> core;
  asio::ip::tcp::acceptor acceptor;
  asio::steady_timer timer, again;
  Endpoint endpoint;
  bool stopping = false;  // I/O thread
  std::thread thread;
};

TransferServer::TransferServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Result<std::unique_ptr<TransferServer>> TransferServer::create(const TransferServerOptions& options,
                                                               MakeLink make_link) {
  FATHOM_TRY(Fd listener, listen_on(options.listen));
  auto parts = std::make_unique<Parts>(options);
  FATHOM_TRY(parts->endpoint, local_endpoint(listener.get()));
  parts->core->make_link = std::move(make_link);
  parts->acceptor.assign(protocol_of(parts->endpoint), listener.release());
  parts->accept();
  parts->tick();
  parts->thread = std::thread([context = parts->core->context] { run_io(*context); });
  return std::unique_ptr<TransferServer>(new TransferServer(std::move(parts)));
}

// The I/O thread ends by itself when nothing is open any more.
TransferServer::~TransferServer() {
  asio::post(*parts_->core->context, [parts = parts_.get()] { parts->stop(); });
  parts_->thread.join();
}

const Endpoint& TransferServer::endpoint() const { return parts_->endpoint; }

TransferServerStats TransferServer::stats() const {
  const ServerCore& core = *parts_->core;
  TransferServerStats stats{.sessions = core.num_sessions,
                            .orders = core.orders,
                            .pieces_sent = core.pieces_sent,
                            .bytes_sent = core.bytes_sent,
                            .lane_pieces_sent = core.lane_pieces_sent};
  for (size_t i = 0; i < kNumConnectionRefusals; ++i) stats.refused[i] = core.refused[i];
  return stats;
}

}  // namespace fathom
