// A piece as bytes: a header of kPieceHeaderBytes, then the page's rows. Little-endian.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/status.h"
#include "transfer/ticket.h"

namespace fathom {

inline constexpr size_t kPieceHeaderBytes = 72;

// Replaces the kPieceHeaderBytes bytes at `to`.
void write_piece_header(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> to);
// kInvalidArgument: another kind of message.
Result<PieceHeader> read_piece_header(std::span<const std::byte, kPieceHeaderBytes> from);

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
