// A piece as bytes: a header of kPieceHeaderBytes, then the page's rows. Little-endian.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/status.h"
#include "transfer/ticket.h"

namespace fathom {

inline constexpr size_t kPieceHeaderBytes = 64;

// Replaces `message`.
void write_piece(const PieceHeader& header, std::span<const std::byte> rows,
                 std::vector<std::byte>& message);

struct ReceivedPiece {
  PieceHeader header;
  std::span<const std::byte> rows;  // of the message
};
// kInvalidArgument: too short for a header, another kind of message, or not as many bytes of rows
// as the header says.
Result<ReceivedPiece> read_piece(std::span<const std::byte> message);

}  // namespace fathom
