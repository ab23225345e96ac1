// A TCP connection that carries frames: reads them one after the other within the limits that its
// handler sets, and sends what it is given. With a lane (transfer/piece_lane.h) pieces go by that,
// and no frame may come any more; the connection tells when the other end has gone.
//
// Used on its I/O thread only, except last_received(). Alive while an operation is pending or an
// owner holds it. Asks its handler before a byte of a frame is kept, so a stranger costs no memory.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "transfer/landing.h"
#include "transfer/lent_rows.h"
#include "transfer/piece_lane.h"
#include "transfer/piece_mailbox.h"
#include "transfer/piece_wire.h"
#include "transfer/tcp/frame.h"
#include "transfer/tcp/records.h"

namespace fathom {

class TransferConnection;

class FrameHandler {
 public:
  virtual ~FrameHandler() = default;
  // The most bytes that a frame of this type may have now; none: it must not come. kPiece is asked
  // for the piece with its header.
  virtual std::optional<uint64_t> most_bytes(const TransferConnection& from, FrameType type) = 0;
  // An error closes the connection.
  virtual Result<> on_frame(TransferConnection& from, FrameType type, Payload payload) = 0;
  // Once, last. Nothing is called for this connection afterwards.
  virtual void on_closed(TransferConnection& connection, const std::string& why) = 0;

  // Where a piece goes while it comes; null: into a buffer(), to be given to on_piece().
  virtual std::unique_ptr<Landing> land(TransferConnection& /*from*/, const PieceHeader&) {
    return nullptr;
  }
  // A piece of so many bytes has landed.
  virtual void on_landed(TransferConnection& /*from*/, int64_t /*bytes*/) {}
  // Memory for a piece's rows.
  virtual std::vector<std::byte> buffer(size_t bytes) { return std::vector<std::byte>(bytes); }
  // False: not now; the connection keeps the piece and reads on after resume(), which offers it
  // again.
  virtual bool on_piece(TransferConnection& /*from*/, PagePiece& /*piece*/) { return true; }
  // A frame of so many bytes has been sent.
  virtual void on_sent(TransferConnection& /*connection*/, int64_t /*bytes*/) {}
};

class TransferConnection : public std::enable_shared_from_this<TransferConnection> {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `socket` is connected.
  TransferConnection(boost::asio::ip::tcp::socket socket, std::shared_ptr<FrameHandler> handler);

  // Begins to read.
  void start() { read_header(); }
  // From the next frame on.
  void set_handler(std::shared_ptr<FrameHandler> handler) { handler_ = std::move(handler); }
  // From now on; the lane is connected. What was to be sent before goes by the socket.
  void use_lane(std::unique_ptr<PieceLane> lane);
  bool has_lane() const { return lane_ != nullptr; }
  // The connection was closed because its lane failed.
  bool lane_has_failed() const { return lane_has_failed_; }
  // A frame; `rows` are what follows the bytes of `frame`, and are read where they lie.
  void send(Frame frame, std::shared_ptr<LentRows> rows = nullptr);
  bool is_sending() const { return !out_.empty() || lane_bytes_ > 0; }
  bool is_landing() const { return landing_ != nullptr; }
  void resume();
  // Calls on_closed() from a later turn of the I/O thread. What is still to be sent is not.
  void close(std::string why);
  // Closes when what is to be sent has been sent, and drops whatever comes.
  void close_when_sent();

  // When bytes came the last time, and since when a frame waits to be sent; none: none does.
  Time last_received() const { return last_received_; }
  // When the header of the frame, or the offer of the piece, came whose other bytes have not all
  // come; none: they have.
  std::optional<Time> receiving_since() const { return receiving_since_; }
  std::optional<Time> sending_since() const;
  // "10.0.0.1:5000", for logs.
  const std::string& peer() const { return peer_; }

 private:
  void read_header();
  void on_header();
  void read_piece(uint64_t bytes);
  void begin_piece(const PieceHeader& header);
  std::span<std::byte> piece_rows();
  void read_rows();
  void deliver_piece();
  void write();
  void finish_frame();
  void send_by_lane(const Frame& frame, LentRows& rows);
  void schedule_lane();
  void run_lane();
  bool step_lane();
  bool take_offer();
  void fail_lane(const Status& why);
  void fail(const boost::system::error_code& failure);
  void fail_with_errno();

  boost::asio::ip::tcp::socket socket_;
  std::shared_ptr<FrameHandler> handler_;
  std::string peer_;
  std::array<std::byte, kFrameHeaderBytes> header_{};
  std::array<std::byte, kPieceHeaderBytes> piece_header_{};
  std::vector<std::byte> payload_;
  // The piece that comes: into its page, or into rows of its own.
  std::unique_ptr<Landing> landing_;
  PagePiece piece_;
  size_t rows_read_ = 0;  // bytes of it
  bool holds_piece_ = false, closed_ = false, closing_ = false;
  // A frame that waits to be sent, and how much of it has been.
  struct Outgoing {
    Frame frame;
    std::shared_ptr<LentRows> rows;
    size_t sent = 0;

    size_t size() const { return frame.size() + (rows ? rows->size() : 0); }
    ssize_t send_some(int socket);
  };
  std::deque<Outgoing> out_;
  bool is_writing_ = false;  // write() goes on, or is about to be called
  Time last_received_, sending_since_;
  std::optional<Time> receiving_since_;

  std::unique_ptr<PieceLane> lane_;
  std::optional<boost::asio::posix::stream_descriptor> lane_events_;
  int64_t lane_bytes_ = 0;       // of the frame that is being sent
  bool lane_receives_ = false;   // a piece
  bool lane_scheduled_ = false;  // run_lane() is about to be called
  bool lane_waits_ = false;      // for its events
  bool lane_has_failed_ = false;
};

}  // namespace fathom
