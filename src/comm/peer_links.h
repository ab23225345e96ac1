// The TCP connections of one rank to ranks of other processes, and the frames on them.
//
// One connection for each pair of ranks, for all groups that the two share: both meet in the same
// order in all of them, so the next frame on a connection is always that of the next meeting. The
// rank's own thread sends and receives; nothing is read ahead. Ends with the last of the rank's
// groups and its world.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "comm/abort_bell.h"
#include "comm/collective.h"
#include "comm/growing_buffer.h"
#include "comm/meeting_board.h"

namespace fathom {

// What stands before the bytes that one rank gives another. Little-endian, 72 bytes.
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x464D'4146;  // "FAMF"

  uint32_t magic = kMagic;
  uint32_t kind = 0;         // a Collective
  uint64_t epoch = 0;        // of the world: a connection of another one is found out
  uint64_t group = 0;        // group_id()
  uint64_t number = 0;       // of the collective, in the group
  uint64_t total_bytes = 0;  // that the rank gives to all
  uint64_t bytes = 0;        // that follow
  uint64_t plan = 0;         // Group::set_plan()
  char group_name[16] = {};  // for messages; cut, padded with zeros

  CollectiveRecord record() const {
    return {number, static_cast<Collective>(kind), total_bytes, plan};
  }
};
static_assert(sizeof(FrameHeader) == 72);

class PeerLinks {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Outcome { kComplete, kAborted, kTimedOut, kClosed };

  // A frame each way between this rank and another one.
  struct Exchange {
    int peer = 0;  // in the world's numbers
    FrameHeader out;
    ConstBytes given;
    FrameHeader in;
    GrowingBuffer* buffer = nullptr;  // where what comes goes; the caller's
    std::span<std::byte> received;
    // Progress of this meeting.
    size_t sent = 0, got = 0;
  };

  // spins: whether this rank has a CPU of its own to wait on.
  PeerLinks(AbortWord& abort_word, bool spins) : bell_(abort_word), spins_(spins) {}

  void add(int peer, Fd connection) { connections_.emplace(peer, std::move(connection)); }

  // Sends and receives all frames. on_header(i) is called when exchanges[i].in is there, before
  // its bytes are received, and may throw. On kClosed, *closed is the exchange whose connection is
  // closed or broken.
  Outcome exchange(std::span<Exchange> exchanges, Clock::time_point deadline,
                   const std::function<void(size_t)>& on_header, size_t* closed);

  // Waits a moment for an abort: a connection is often closed because of one, whose reason comes
  // another way.
  bool await_abort(std::chrono::milliseconds longest);

 private:
  enum class Progress { kNone, kSome, kBroken };
  Progress advance(Exchange& exchange, const std::function<void()>& on_header);
  Progress send_some(Exchange& exchange, int fd);
  Progress receive_some(Exchange& exchange, int fd, const std::function<void()>& on_header);

  AbortBell bell_;
  const bool spins_;
  std::map<int, Fd> connections_;
  std::vector<pollfd> polled_;
};

}  // namespace fathom
