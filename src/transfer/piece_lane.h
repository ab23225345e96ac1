// A way for pieces beside the socket of a connection, between the same two ends: for instance
// through memory that two processes of one machine share.
//
// One piece at a time in each direction. The ends are told apart by their addresses, which they
// exchange by the connection once both have proved who they are. The receiver is told of a piece
// before a byte of it comes, and says where its rows go: no sender writes into its memory.
//
// Used by one thread. Errors are final: the lane is to be destroyed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/status.h"
#include "transfer/piece_wire.h"

namespace fathom {

// Maximum size of a lane's address, in bytes.
inline constexpr size_t kMaxLaneAddressBytes = 1 << 10;

class PieceLane {
 public:
  struct Offer {
    std::array<std::byte, kPieceHeaderBytes> header;  // as the sender has written it
    uint64_t bytes = 0;                               // of rows
  };

  virtual ~PieceLane() = default;
  virtual std::span<const std::byte> address() const = 0;  // of this end
  // Once, before pieces are sent or come.
  virtual Result<> connect(std::span<const std::byte> other_end) = 0;

  // Is readable when progress() has something to do again.
  virtual int event_fd() const = 0;
  // Does what can be done. False: nothing is left to be done until event_fd() is readable.
  virtual Result<bool> progress() = 0;

  // Sends a piece of at least one byte of rows; they have been copied when it returns. Not while
  // one is being sent.
  virtual Result<> send(std::span<const std::byte, kPieceHeaderBytes> header,
                        std::span<const std::byte> rows) = 0;
  // Whether the other end has not taken the last one yet.
  virtual bool is_sending() const = 0;

  // The piece that the other end wants to send.
  virtual std::optional<Offer> offer() const = 0;
  // Takes the offered piece: its rows are written to `rows`, which has their size and is nobody
  // else's until has_received(), or until the lane is destroyed.
  virtual Result<> receive(std::span<std::byte> rows) = 0;
  // True once for each piece that was taken: all its rows are there.
  virtual bool has_received() = 0;
};

// Pieces of at most `page_bytes`. `key` is known to the two ends alone.
using MakeLane =
    std::function<Result<std::unique_ptr<PieceLane>>(int64_t page_bytes, uint64_t key)>;

}  // namespace fathom
