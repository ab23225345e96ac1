// A decoding engine's way to engines that compute prompts in other processes, over TCP.
//
// Connects to each of them and keeps trying. An order goes to the one that its text's first page
// names, so that prompts that begin alike come where their beginning is cached, unless that one has
// much more to do than another. Pieces are taken only for an order that this session was given, and
// go to the mailbox; while that is full nothing is read, so the sender waits. Orders of a session
// that is lost fail at once.
//
// Owns its I/O thread. order(), cancel() and holds() are for the engine's thread, stats() for any.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/socket.h"
#include "transfer/piece_lane.h"
#include "transfer/piece_mailbox.h"
#include "transfer/prompt_link.h"
#include "transfer/tcp/facts.h"

namespace fathom {

struct PrefillPeersOptions {
  std::vector<Endpoint> peers = {};  // at least one
  std::string secret = {};
  Facts facts = {};
  int64_t page_bytes = 0;
  int64_t streams = 2;      // data connections to each
  MakeLane make_lane = {};  // what is wanted beside TCP; empty: nothing
  bool needs_lane = false;  // anywhere, not only on this machine, and pieces never go by TCP
  std::chrono::nanoseconds connect_limit = std::chrono::seconds(5);  // with all handshakes
  std::chrono::nanoseconds retry_first = std::chrono::milliseconds(100);
  std::chrono::nanoseconds retry_most = std::chrono::seconds(2);
  std::chrono::nanoseconds silence_limit = std::chrono::seconds(10);
  // For one frame to be sent, and for a piece to come once its header has.
  std::chrono::nanoseconds stall_limit = std::chrono::seconds(30);
  std::chrono::nanoseconds heartbeat = std::chrono::seconds(1);
  // A peer that has refused an order for lack of room, or because it ends, gets none for so long.
  std::chrono::nanoseconds pause = std::chrono::seconds(1);
};

struct PrefillPeersStats {
  int64_t peers = 0, ready = 0;
  int64_t orders = 0;  // held by peers now
  int64_t sessions_lost = 0, refused = 0;
  int64_t pieces_received = 0, bytes_received = 0;
  int64_t lane_pieces_received = 0;  // of these, by a lane
  int64_t foreign_pieces = 0;        // for no order of the session that they came by; not taken
  int64_t stalled_pieces = 0;        // broken off with their session at the stall limit
};

class PrefillPeers : public PromptLink {
 public:
  // Begins to connect. The mailbox's room is watched until this ends.
  PrefillPeers(const PrefillPeersOptions& options, std::shared_ptr<PieceMailbox> mailbox);
  ~PrefillPeers() override;

  // Waits until each peer has been tried once, or for `timeout`. Fails with the sentence of a peer
  // that refuses this side; one that cannot be reached is no error.
  Result<> wait_until_tried(std::chrono::nanoseconds timeout);

  Result<> order(PromptOrder order) override;
  void cancel(const TicketId& id) override;
  bool holds(const TicketId& id) override;

  PrefillPeersStats stats() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
