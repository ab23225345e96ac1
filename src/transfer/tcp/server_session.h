// One decoding engine's session at a transfer server: its orders go to the link, its pieces to its
// data connections, whichever is free.
//
// put(), done() and fail() are called by the engine's threads; everything else runs on the I/O
// thread. The core holds it until one of its connections is closed, which ends the session; the
// engine may hold it longer.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "transfer/tcp/connection.h"
#include "transfer/tcp/server_core.h"

namespace fathom {

class ServerSession : public PieceReceiver,
                      public FrameHandler,
                      public std::enable_shared_from_this<ServerSession> {
 public:
  ServerSession(std::shared_ptr<ServerCore> core, uint64_t id,
                std::shared_ptr<TransferConnection> control)
      : core_(std::move(core)), id_(id), control_(std::move(control)) {}

  void start();
  void add_stream(const std::shared_ptr<TransferConnection>& connection);
  int64_t num_streams() const { return std::ssize(streams_); }
  // Sends a heartbeat, and ends a session whose other end is silent or does not read.
  void tick(TransferConnection::Time now);
  void close(const std::string& why);

  bool put(const PieceHeader& header, std::shared_ptr<LentRows> rows) override;
  void done(const TicketId& id) override;
  void fail(FailedOrder failed) override;

  std::optional<uint64_t> most_bytes(const TransferConnection& from, FrameType type) override;
  Result<> on_frame(TransferConnection& from, FrameType type, Payload payload) override;
  void on_closed(TransferConnection& connection, const std::string& why) override;
  void on_sent(TransferConnection& connection, int64_t bytes) override;

 private:
  struct Stream {
    std::shared_ptr<TransferConnection> connection;
    std::unique_ptr<PieceLane> lane;  // offered to the other end
    bool is_open = false;             // the other end has said whether it takes the lane
  };

  Result<> on_order(Payload payload);
  Result<> on_lane(TransferConnection& from, Payload address);
  Stream& stream_of(const TransferConnection& connection);
  void on_cancel(const TicketId& id);
  void end_order(const TicketId& id, Frame news);
  void send_waiting();

  const std::shared_ptr<ServerCore> core_;
  const uint64_t id_;
  std::shared_ptr<TransferConnection> control_;
  std::vector<Stream> streams_;
  std::shared_ptr<PromptLink> link_;
  std::unordered_set<TicketId, TicketIdHash> orders_;  // neither done nor cancelled
  TransferConnection::Time last_heartbeat_;

  std::mutex mutex_;  // guards what follows
  bool closed_ = false;
  struct Piece {
    Frame head;
    std::shared_ptr<LentRows> rows;
  };
  std::deque<Piece> waiting_;
  int64_t bytes_ = 0;  // of pieces that wait, are being written or are sent
  bool is_posted_ = false;
};

}  // namespace fathom
