#include "transfer/tcp/peer_session.h"

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/post.hpp>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace fathom {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

PeerSession::PeerSession(asio::io_context& context, const PrefillPeersOptions& options, size_t peer,
                         bool with_lanes, PeerSessionOwner& owner)
    : context_(context),
      options_(options),
      peer_(peer),
      with_lanes_(with_lanes),
      owner_(&owner),
      resolver_(context),
      began_(std::chrono::steady_clock::now()),
      last_heartbeat_(began_) {}

void PeerSession::start() {
  const Endpoint& endpoint = options_.peers[peer_];
  resolver_.async_resolve(endpoint.host, std::to_string(endpoint.port),
                          [self = shared_from_this()](const error_code& failure,
                                                      const tcp::resolver::results_type& found) {
                            if (self->owner_ == nullptr) return;
                            if (failure) return self->lose(failure.message());
                            self->connect_control(found);
                          });
}

void PeerSession::connect_control(const tcp::resolver::results_type& addresses) {
  const auto socket = std::make_shared<tcp::socket>(context_);
  asio::async_connect(
      *socket, addresses,
      [self = shared_from_this(), socket](const error_code& failure, const tcp::endpoint& address) {
        if (self->owner_ == nullptr) return;
        if (failure) return self->lose(failure.message());
        self->address_ = address;
        error_code unknown;
        self->is_same_machine_ =
            socket->local_endpoint(unknown).address() == address.address() && !unknown;
        self->on_connected(std::move(*socket), StreamKind::kControl);
      });
}

// To the address that the control connection has: a name may have several.
void PeerSession::connect_data() {
  const auto socket = std::make_shared<tcp::socket>(context_);
  socket->async_connect(address_, [self = shared_from_this(), socket](const error_code& failure) {
    if (self->owner_ == nullptr) return;
    if (failure) return self->lose(failure.message());
    self->on_connected(std::move(*socket), StreamKind::kData);
  });
}

void PeerSession::on_connected(tcp::socket socket, StreamKind kind) {
  auto stream = std::make_unique<Stream>();
  stream->handshake = {.decode = random_nonce(),
                       .prefill = {},
                       .kind = static_cast<uint32_t>(kind),
                       .session = session_};
  stream->connection = std::make_shared<TransferConnection>(std::move(socket), shared_from_this());
  TransferConnection& connection = *stream->connection;
  connection.send(
      hello_frame({.kind = kind, .session = session_, .nonce = stream->handshake.decode}));
  if (kind == StreamKind::kControl) {
    control_ = std::move(stream);
  } else {
    data_.push_back(std::move(stream));
  }
  connection.start();
}

PeerSession::Stream& PeerSession::stream_of(const TransferConnection& connection) {
  if (control_->connection.get() == &connection) return *control_;
  for (const auto& stream : data_) {
    if (stream->connection.get() == &connection) return *stream;
  }
  FATHOM_CHECK(false, "a connection of another session");
}

std::optional<uint64_t> PeerSession::most_bytes(const TransferConnection& from, FrameType type) {
  const Stream& stream = stream_of(from);
  // A data connection may be refused for the lane that was chosen.
  if (type == FrameType::kRefused && (stream.stage != Stage::kOpen || !is_control(stream))) {
    return kMaxSentenceBytes;
  }
  switch (stream.stage) {
    case Stage::kChallenge:
      if (type == FrameType::kChallenge) return std::tuple_size_v<Nonce>;
      break;
    case Stage::kProof:
      if (type == FrameType::kProof) return std::tuple_size_v<Proof>;
      break;
    case Stage::kWelcome:
      if (type == FrameType::kWelcome) return kMaxWelcomeBytes;
      break;
    case Stage::kOpen:
      if (!is_control(stream)) {
        if (type == FrameType::kPiece) {
          return kPieceHeaderBytes + static_cast<uint64_t>(options_.page_bytes);
        }
        break;
      }
      if (type == FrameType::kDone) return kTicketIdBytes;
      if (type == FrameType::kFailed) return kMaxFailedBytes;
      if (type == FrameType::kHeartbeat) return 0;
      break;
  }
  return std::nullopt;
}

Result<> PeerSession::on_frame(TransferConnection& from, FrameType type, Payload payload) {
  if (owner_ == nullptr) return {};
  Stream& stream = stream_of(from);
  switch (type) {
    case FrameType::kRefused: {
      FATHOM_TRY(refusal_, read_refused(payload));
      return error(Code::kInvalidArgument, "{}", refusal_);
    }
    case FrameType::kChallenge: {
      FATHOM_TRY(stream.handshake.prefill, read_challenge(payload));
      stream.stage = Stage::kProof;
      from.send(proof_frame(make_proof(options_.secret, ProofOf::kDecode, stream.handshake)));
      return {};
    }
    case FrameType::kProof:
      return on_proof(stream, payload);
    case FrameType::kWelcome:
      return on_welcome(stream, payload);
    case FrameType::kDone: {
      FATHOM_TRY(const TicketId id, read_ticket_id(payload));
      owner_->on_done(*this, id);
      return {};
    }
    case FrameType::kFailed: {
      FATHOM_TRY(FailedOrder failed, read_failed(payload));
      owner_->on_failed(*this, std::move(failed));
      return {};
    }
    default:
      return {};  // a heartbeat
  }
}

// Nothing of this side is told to somebody without the secret.
Result<> PeerSession::on_proof(Stream& stream, Payload payload) {
  FATHOM_TRY(const Proof proof, read_proof(payload));
  if (!equal_proofs(proof, make_proof(options_.secret, ProofOf::kPrefill, stream.handshake))) {
    return error(Code::kUnauthenticated, "the prefill side has another transfer secret");
  }
  stream.stage = Stage::kWelcome;
  if (is_control(stream)) stream.connection->send(facts_frame(options_.facts));
  return {};
}

Result<> PeerSession::on_welcome(Stream& stream, Payload payload) {
  FATHOM_TRY(const Welcome welcome, read_welcome(payload));
  stream.stage = Stage::kOpen;
  if (is_control(stream)) {
    session_ = welcome.session;
    engine_ = welcome.engine;
    for (int64_t i = 0; i < options_.streams; ++i) connect_data();
    return {};
  }
  FATHOM_RETURN_IF_ERROR(choose_lane(stream, welcome.lane));
  if (++open_ < options_.streams) return {};
  is_ready_ = true;
  owner_->on_ready(*this);
  return {};
}

// Shared memory is of use on the same machine only; what is beyond it is tried if it is demanded.
bool PeerSession::wants_lane() const {
  return options_.make_lane && with_lanes_ && (is_same_machine_ || options_.needs_lane);
}

Result<> PeerSession::choose_lane(Stream& stream, std::span<const std::byte> offered) {
  std::unique_ptr<PieceLane> lane;
  Result<> made;
  if (!offered.empty() && wants_lane()) {
    auto created = options_.make_lane(options_.page_bytes, session_);
    made = created ? (*created)->connect(offered) : tl::unexpected(created.error());
    if (made) lane = std::move(*created);
  }
  if (options_.needs_lane && !lane) {
    refusal_ = made ? "--transfer-backend is 'ucx' on the decode side, the prefill side sends "
                      "pages by TCP"
                    : made.error().message;
    return error(Code::kInvalidArgument, "{}", refusal_);
  }
  if (!made) log_warning("transfer: pages come by TCP: {}", made.error().message);
  stream.connection->send(lane_frame(lane ? lane->address() : std::span<const std::byte>()));
  if (lane) stream.connection->use_lane(std::move(lane));
  return {};
}

std::unique_ptr<Landing> PeerSession::land(TransferConnection& /*from*/,
                                           const PieceHeader& header) {
  return owner_ == nullptr ? nullptr : owner_->land(*this, header);
}

void PeerSession::on_landed(TransferConnection& from, int64_t bytes) {
  lane_pieces_ += from.has_lane();
  if (owner_ != nullptr) owner_->count_piece(bytes, from.has_lane());
}

std::vector<std::byte> PeerSession::buffer(size_t bytes) {
  return owner_ == nullptr ? std::vector<std::byte>(bytes) : owner_->buffer(bytes);
}

bool PeerSession::on_piece(TransferConnection& from, PagePiece& piece) {
  lane_pieces_ += from.has_lane();
  return owner_ == nullptr || owner_->on_piece(*this, piece, from.has_lane());
}

void PeerSession::resume() {
  for (const auto& stream : data_) stream->connection->resume();
}

void PeerSession::break_landings() {
  const bool any = std::any_of(data_.begin(), data_.end(),
                               [](const auto& stream) { return stream->connection->is_landing(); });
  if (any) close("the engine takes no more pages");
}

void PeerSession::tick(TransferConnection::Time now) {
  if (!is_ready_) {
    if (now - began_ > options_.connect_limit) close("it did not answer in time");
    return;
  }
  const TransferConnection& control = *control_->connection;
  const auto since = control.sending_since();
  if (now - control.last_received() > options_.silence_limit) return close("it is silent");
  if (since && now - *since > options_.stall_limit) return close("it does not read");
  if (const TransferConnection* const stalled = find_stalled_piece(now)) {
    lane_failed_ |= stalled->has_lane();
    owner_->count_stalled_piece();
    return close(fmt::format("the rest of a page has not come in {} s",
                             std::chrono::duration<double>(options_.stall_limit).count()));
  }
  if (now - last_heartbeat_ < options_.heartbeat || control.is_sending()) return;
  last_heartbeat_ = now;
  send(heartbeat_frame());
}

// The connection on which the rest of a piece is overdue. The piece's page is quarantined as long
// as it lands, whatever else the other end sends.
const TransferConnection* PeerSession::find_stalled_piece(TransferConnection::Time now) const {
  for (const auto& stream : data_) {
    const auto since = stream->connection->receiving_since();
    if (since && now - *since > options_.stall_limit) return stream->connection.get();
  }
  return nullptr;
}

void PeerSession::close(const std::string& why) { lose(why); }

void PeerSession::abandon() {
  owner_ = nullptr;
  lose("");
}

void PeerSession::on_closed(TransferConnection& connection, const std::string& why) {
  lane_failed_ |= connection.lane_has_failed();
  lose(why);
}

void PeerSession::lose(const std::string& why) {
  const auto self = shared_from_this();
  resolver_.cancel();
  if (control_) control_->connection->close(why);
  for (const auto& stream : data_) stream->connection->close(why);
  PeerSessionOwner* const owner = std::exchange(owner_, nullptr);
  if (owner != nullptr) owner->on_lost(*this, refusal_.empty() ? why : refusal_, !refusal_.empty());
}

}  // namespace fathom
