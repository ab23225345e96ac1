// The handshake of a connection that a transfer server has accepted: hello, challenge, proofs, and
// on a control connection the facts. Reads nothing of variable length before the proof.
//
// I/O thread only. The core holds it until the handshake has ended.
#pragma once

#include <memory>
#include <string>

#include "transfer/tcp/connection.h"
#include "transfer/tcp/server_core.h"

namespace fathom {

class AcceptedConnection : public FrameHandler,
                           public std::enable_shared_from_this<AcceptedConnection> {
 public:
  AcceptedConnection(std::shared_ptr<ServerCore> core, boost::asio::ip::tcp::socket socket)
      : core_(std::move(core)), socket_(std::move(socket)) {}

  void start();
  // Ends a handshake that takes too long.
  void check_deadline(TransferConnection::Time now);
  // The server ends.
  void close();

  std::optional<uint64_t> most_bytes(const TransferConnection& from, FrameType type) override;
  Result<> on_frame(TransferConnection& from, FrameType type, Payload payload) override;
  void on_closed(TransferConnection& connection, const std::string& why) override;

 private:
  enum class Stage { kHello, kProof, kFacts, kEnded };

  Result<> on_hello(Payload payload);
  Result<> on_proof(Payload payload);
  Result<> on_facts(Payload payload);
  Result<> join_session();
  Result<> refuse(ConnectionRefusal reason, const std::string& why);
  void end() { core_->handshakes.erase(shared_from_this()); }

  const std::shared_ptr<ServerCore> core_;
  boost::asio::ip::tcp::socket socket_;
  std::shared_ptr<TransferConnection> connection_;
  Stage stage_ = Stage::kHello;
  Handshake handshake_;
  TransferConnection::Time began_;
};

}  // namespace fathom
