#include "transfer/tcp/accepted_connection.h"

#include <cstring>

#include "base/log.h"
#include "transfer/tcp/server_session.h"

namespace fathom {
namespace {

uint64_t random_session() {
  const Nonce nonce = random_nonce();
  uint64_t session = 0;
  std::memcpy(&session, nonce.data(), sizeof session);
  return session;
}

}  // namespace

void AcceptedConnection::start() {
  began_ = std::chrono::steady_clock::now();
  connection_ = std::make_shared<TransferConnection>(std::move(socket_), shared_from_this());
  connection_->start();
}

void AcceptedConnection::check_deadline(TransferConnection::Time now) {
  if (now - began_ <= core_->options.handshake_limit) return;
  if (stage_ != Stage::kEnded) core_->count(ConnectionRefusal::kTimeout);
  stage_ = Stage::kEnded;
  connection_->close("the handshake took too long");
}

void AcceptedConnection::close() {
  stage_ = Stage::kEnded;
  connection_->close("the server ends");
}

std::optional<uint64_t> AcceptedConnection::most_bytes(const TransferConnection& /*from*/,
                                                       FrameType type) {
  switch (stage_) {
    case Stage::kHello:
      if (type == FrameType::kHello) return kHelloBytes;
      break;
    case Stage::kProof:
      if (type == FrameType::kProof) return std::tuple_size_v<Proof>;
      break;
    case Stage::kFacts:
      if (type == FrameType::kFacts) return kMaxFactsBytes;
      break;
    case Stage::kEnded:
      break;
  }
  return std::nullopt;
}

Result<> AcceptedConnection::on_frame(TransferConnection& /*from*/, FrameType type,
                                      Payload payload) {
  if (type == FrameType::kHello) return on_hello(payload);
  return type == FrameType::kProof ? on_proof(payload) : on_facts(payload);
}

Result<> AcceptedConnection::on_hello(Payload payload) {
  FATHOM_TRY(const Hello hello, read_hello(payload));
  if (hello.protocol != kTransferProtocol) {
    return refuse(ConnectionRefusal::kProtocol,
                  fmt::format("the transfer protocol is {} on the decode side and {} on the "
                              "prefill side",
                              hello.protocol, kTransferProtocol));
  }
  handshake_ = {.decode = hello.nonce,
                .prefill = random_nonce(),
                .kind = static_cast<uint32_t>(hello.kind),
                .session = hello.session};
  stage_ = Stage::kProof;
  connection_->send(challenge_frame(handshake_.prefill));
  return {};
}

Result<> AcceptedConnection::on_proof(Payload payload) {
  FATHOM_TRY(const Proof proof, read_proof(payload));
  const std::string& secret = core_->options.secret;
  if (!equal_proofs(proof, make_proof(secret, ProofOf::kDecode, handshake_))) {
    return refuse(ConnectionRefusal::kSecret,
                  "the transfer secrets of the decode side and the prefill side differ");
  }
  connection_->send(proof_frame(make_proof(secret, ProofOf::kPrefill, handshake_)));
  if (handshake_.kind == static_cast<uint32_t>(StreamKind::kData)) return join_session();
  stage_ = Stage::kFacts;
  return {};
}

Result<> AcceptedConnection::on_facts(Payload payload) {
  FATHOM_TRY(const Facts facts, read_facts(payload));
  if (const auto difference = first_difference(facts, core_->options.facts)) {
    return refuse(ConnectionRefusal::kFacts, *difference);
  }
  if (std::ssize(core_->sessions) >= core_->options.max_sessions) {
    return refuse(ConnectionRefusal::kTooMany,
                  fmt::format("{} decode sides are connected, at most {}", core_->sessions.size(),
                              core_->options.max_sessions));
  }
  stage_ = Stage::kEnded;
  const uint64_t id = random_session();
  const auto session = std::make_shared<ServerSession>(core_, id, connection_);
  core_->sessions.emplace(id, session);
  core_->num_sessions = std::ssize(core_->sessions);
  session->start();
  log_info("transfer: the decode side at {} is connected", connection_->peer());
  end();
  return {};
}

Result<> AcceptedConnection::join_session() {
  const auto session = core_->sessions.find(handshake_.session);
  if (session == core_->sessions.end()) {
    return refuse(ConnectionRefusal::kMalformed, "a data connection of an unknown session");
  }
  if (session->second->num_streams() >= core_->options.max_streams) {
    return refuse(ConnectionRefusal::kTooMany,
                  fmt::format("{} data connections, at most {}", session->second->num_streams(),
                              core_->options.max_streams));
  }
  stage_ = Stage::kEnded;
  session->second->add_stream(connection_);
  end();
  return {};
}

// The deadline ends the connection if the other end does not.
Result<> AcceptedConnection::refuse(ConnectionRefusal reason, const std::string& why) {
  core_->count(reason);
  log_warning("transfer: {} is refused: {}", connection_->peer(), why);
  stage_ = Stage::kEnded;
  connection_->send(refused_frame(why));
  connection_->close_when_sent();
  return {};
}

void AcceptedConnection::on_closed(TransferConnection& /*connection*/, const std::string& why) {
  if (stage_ != Stage::kEnded) {
    core_->count(ConnectionRefusal::kMalformed);
    log_warning("transfer: {} is no decode side: {}", connection_->peer(), why);
  }
  end();
}

}  // namespace fathom
