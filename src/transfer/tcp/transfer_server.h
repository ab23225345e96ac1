// The port at which an engine that computes prompts takes orders of engines that decode, over TCP.
//
// A decoding engine opens a control connection for orders and several data connections for pieces.
// Both ends prove that they have the secret, then what has to be equal on both sides is compared;
// before that nothing of variable length is read. Every length has a limit, every wait a deadline,
// and what waits to be sent to one engine is at most `window_bytes`.
//
// Owns its I/O thread. Does not know what computes the orders: `make_link` gives each session its
// way to the engine.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "comm/socket.h"
#include "transfer/piece_lane.h"
#include "transfer/piece_receiver.h"
#include "transfer/prompt_link.h"
#include "transfer/tcp/facts.h"

namespace fathom {

struct TransferServerOptions {
  Endpoint listen = {};     // port 0: one that is free
  std::string secret = {};  // empty: anybody who can connect may order
  Facts facts = {};         // must be equal on both sides
  uint64_t engine = 0;      // what decode sides know this one by
  uint64_t form = 0;        // of the pages
  int64_t page_bytes = 0;
  int64_t max_tokens = 0;  // of an order
  int64_t window_bytes = int64_t{64} << 20;
  int64_t max_sessions = 64, max_handshakes = 64, max_streams = 8, max_orders = 4096;
  MakeLane make_lane = {};  // for decode sides that want one; empty: pieces go by TCP
  bool needs_lane = false;  // decode sides that want none are refused
  std::chrono::nanoseconds handshake_limit = std::chrono::seconds(5);
  std::chrono::nanoseconds silence_limit = std::chrono::seconds(10);  // of a decoding engine
  std::chrono::nanoseconds stall_limit = std::chrono::seconds(30);    // for one frame to be sent
  std::chrono::nanoseconds heartbeat = std::chrono::seconds(1);
};

enum class ConnectionRefusal : uint8_t {
  kMalformed,  // what came is none of the protocol, or breaks one of its limits
  kProtocol,   // another version of it
  kSecret,
  kFacts,
  kTooMany,
  kTimeout,
};
inline constexpr size_t kNumConnectionRefusals = 6;
// "malformed", …: as metrics have them.
std::string_view name_of(ConnectionRefusal refusal);

struct TransferServerStats {
  int64_t sessions = 0;  // open now
  int64_t orders = 0, pieces_sent = 0, bytes_sent = 0;
  int64_t lane_pieces_sent = 0;                           // of these, by a lane
  std::array<int64_t, kNumConnectionRefusals> refused{};  // connections
};

class TransferServer {
 public:
  // The way of one session's orders to the engine. Called on the I/O thread; so are the link's
  // methods. The receiver may be used by any thread for as long as the link's engine likes.
  using MakeLink = std::function<std::shared_ptr<PromptLink>(std::shared_ptr<PieceReceiver>)>;

  // Listens. Errors are those of listen_on().
  static Result<std::unique_ptr<TransferServer>> create(const TransferServerOptions& options,
                                                        MakeLink make_link);
  // Closes all connections and cancels their orders.
  ~TransferServer();
  TransferServer(const TransferServer&) = delete;
  TransferServer& operator=(const TransferServer&) = delete;

  const Endpoint& endpoint() const;  // with the port
  TransferServerStats stats() const;

 private:
  struct Parts;
  explicit TransferServer(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
