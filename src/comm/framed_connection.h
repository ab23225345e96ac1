// A TCP connection that carries messages with a type and a length. It never blocks: its owner
// polls fd() and calls fill() and flush(). Not synchronised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/socket.h"

namespace fathom {

// Values are part of the protocol.
enum class MessageType : uint32_t {
  kHello = 1,      // a node to node 0: who it is
  kRefused = 2,    // to a node, or a rank's connection: one sentence
  kWelcome = 3,    // node 0 to a node: token and layout
  kConnected = 4,  // a node to node 0: its ranks are connected
  kBegin = 5,      // node 0 to a node: all ranks are
  kRankHello = 6,  // a rank to a rank: token, who it is, whom it wants
  kRankWelcome = 7,
  kHeartbeat = 8,
  kMessage = 9,  // the engine's
  kAbort = 10,   // rank, code, sentence
  kGoodbye = 11,
  kFarewell = 12,  // in reply to kAbort and kGoodbye: it has been read
};

struct ControlMessage {
  MessageType type;
  std::vector<std::byte> payload;
};

class FramedConnection {
 public:
  // Longer messages are refused: while joining, when a stranger may be at the other end, and after.
  static constexpr size_t kMaxJoinPayload = 1 << 20;
  static constexpr size_t kMaxPayload = 64 << 20;

  explicit FramedConnection(Fd fd) : fd_(std::move(fd)) {}
  // The peer has shown that it belongs here.
  void trust() { max_payload_ = kMaxPayload; }

  int fd() const { return fd_.get(); }
  // The socket, when has_bytes_left() is false.
  Fd release();
  bool has_bytes_left() const { return in_begin_ < in_.size() || queued_bytes() > 0; }

  // Appends a message to what is to be sent. payload.size() <= kMaxPayload.
  void queue(MessageType type, std::span<const std::byte> payload = {});
  size_t queued_bytes() const { return out_.size() - out_begin_; }
  // Sends as much as the socket takes. False: the connection is broken.
  bool flush();
  // Reads what has come, 1 MiB at most. False: the peer has closed it, or it is broken; messages
  // that came before can still be taken.
  bool fill();
  // How many bytes have come since the beginning.
  uint64_t total_received() const { return total_received_; }
  // The next message that has come completely. Fails if what came is none.
  Result<std::optional<ControlMessage>> next();

 private:
  Fd fd_;
  size_t max_payload_ = kMaxJoinPayload;
  std::vector<std::byte> in_, out_;
  size_t in_begin_ = 0, out_begin_ = 0;
  uint64_t total_received_ = 0;
};

}  // namespace fathom
