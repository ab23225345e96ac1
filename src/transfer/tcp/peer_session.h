// A decoding engine's session with one engine that computes prompts, from the first connection to
// the loss of any.
//
// I/O thread only. Its owner holds it until on_lost().
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <memory>
#include <string>
#include <vector>

#include "transfer/tcp/connection.h"
#include "transfer/tcp/prefill_peers.h"

namespace fathom {

class PeerSession;

class PeerSessionOwner {
 public:
  virtual ~PeerSessionOwner() = default;
  virtual void on_ready(PeerSession& session) = 0;
  // Once, last. `is_refused`: the other side says why it does not want this one.
  virtual void on_lost(PeerSession& session, const std::string& why, bool is_refused) = 0;
  virtual void on_done(PeerSession& session, const TicketId& id) = 0;
  virtual void on_failed(PeerSession& session, FailedOrder failed) = 0;
  virtual std::unique_ptr<Landing> land(PeerSession& session, const PieceHeader& header) = 0;
  // One that has landed.
  virtual void count_piece(int64_t bytes, bool by_lane) = 0;
  virtual std::vector<std::byte> buffer(size_t bytes) = 0;
  // The rest of a piece has not come in time; on_lost() follows.
  virtual void count_stalled_piece() = 0;
  // False: there is no room; the session tries again after resume().
  virtual bool on_piece(PeerSession& session, PagePiece& piece, bool by_lane) = 0;
};

class PeerSession : public FrameHandler, public std::enable_shared_from_this<PeerSession> {
 public:
  // `with_lanes`: those of the options are wanted.
  PeerSession(boost::asio::io_context& context, const PrefillPeersOptions& options, size_t peer,
              bool with_lanes, PeerSessionOwner& owner);

  void start();
  size_t peer() const { return peer_; }
  uint64_t engine() const { return engine_; }  // the other side's, once it is ready
  bool is_ready() const { return is_ready_; }
  // A lane failed before any piece had come by one.
  bool lanes_are_useless() const { return lane_failed_ && lane_pieces_ == 0; }
  void send(Frame frame) { control_->connection->send(std::move(frame)); }
  // Offers pieces that found no room once more.
  void resume();
  // Ends it if a piece is landing.
  void break_landings();
  // Sends a heartbeat; ends a session that is silent, stuck, stops in a piece, or is not ready in
  // time.
  void tick(TransferConnection::Time now);
  void close(const std::string& why);
  // Ends it without a word to its owner, which goes.
  void abandon();

  std::optional<uint64_t> most_bytes(const TransferConnection& from, FrameType type) override;
  Result<> on_frame(TransferConnection& from, FrameType type, Payload payload) override;
  void on_closed(TransferConnection& connection, const std::string& why) override;
  std::unique_ptr<Landing> land(TransferConnection& from, const PieceHeader& header) override;
  void on_landed(TransferConnection& from, int64_t bytes) override;
  std::vector<std::byte> buffer(size_t bytes) override;
  bool on_piece(TransferConnection& from, PagePiece& piece) override;

 private:
  enum class Stage { kChallenge, kProof, kWelcome, kOpen };
  struct Stream {
    std::shared_ptr<TransferConnection> connection;
    Handshake handshake;
    Stage stage = Stage::kChallenge;
  };

  void connect_control(const boost::asio::ip::tcp::resolver::results_type& addresses);
  void connect_data();
  void on_connected(boost::asio::ip::tcp::socket socket, StreamKind kind);
  Result<> on_proof(Stream& stream, Payload payload);
  Result<> on_welcome(Stream& stream, Payload payload);
  Result<> choose_lane(Stream& stream, std::span<const std::byte> offered);
  bool wants_lane() const;
  Stream& stream_of(const TransferConnection& connection);
  bool is_control(const Stream& stream) const { return &stream == control_.get(); }
  const TransferConnection* find_stalled_piece(TransferConnection::Time now) const;
  void lose(const std::string& why);

  boost::asio::io_context& context_;
  const PrefillPeersOptions& options_;
  const size_t peer_;
  const bool with_lanes_;
  PeerSessionOwner* owner_;  // null: lost
  boost::asio::ip::tcp::resolver resolver_;
  boost::asio::ip::tcp::endpoint address_;
  std::unique_ptr<Stream> control_;
  std::vector<std::unique_ptr<Stream>> data_;
  uint64_t session_ = 0, engine_ = 0;
  bool is_same_machine_ = false;
  int64_t open_ = 0;  // data connections
  bool is_ready_ = false;
  int64_t lane_pieces_ = 0;
  bool lane_failed_ = false;
  std::string refusal_;  // empty: none
  TransferConnection::Time began_, last_heartbeat_;
};

}  // namespace fathom
