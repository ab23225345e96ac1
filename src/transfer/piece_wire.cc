#include "transfer/piece_wire.h"

#include <cstring>

namespace fathom {
namespace {

constexpr uint64_t kPieceMagic = 0x3265636569706846;  // "Fhpiece2"

struct WireHeader {
  uint64_t magic = kPieceMagic;
  TicketId ticket;
  int64_t page = 0, num_bytes = 0;
  uint64_t form = 0, digest = 0;
  int64_t cached_tokens = 0;
};
static_assert(sizeof(WireHeader) == kPieceHeaderBytes);

}  // namespace

void write_piece_header(const PieceHeader& header, std::span<std::byte, kPieceHeaderBytes> to) {
  const WireHeader wire{.ticket = header.ticket,
                        .page = header.page,
                        .num_bytes = header.num_bytes,
                        .form = header.form,
                        .digest = header.digest,
                        .cached_tokens = header.cached_tokens};
  std::memcpy(to.data(), &wire, kPieceHeaderBytes);
}

Result<PieceHeader> read_piece_header(std::span<const std::byte, kPieceHeaderBytes> from) {
  WireHeader wire;
  std::memcpy(&wire, from.data(), kPieceHeaderBytes);
  if (wire.magic != kPieceMagic) {
    return invalid("a piece begins with {:016x}, expected {:016x}", wire.magic, kPieceMagic);
  }
  return PieceHeader{.ticket = wire.ticket,
                     .page = wire.page,
                     .num_bytes = wire.num_bytes,
                     .form = wire.form,
                     .digest = wire.digest,
                     .cached_tokens = wire.cached_tokens};
}

void write_piece(const PieceHeader& header, std::span<const std::byte> rows,
                 std::vector<std::byte>& message) {
  message.resize(kPieceHeaderBytes + rows.size());
  write_piece_header(header, std::span(message).first<kPieceHeaderBytes>());
  if (!rows.empty()) std::memcpy(message.data() + kPieceHeaderBytes, rows.data(), rows.size());
}

Result<ReceivedPiece> read_piece(std::span<const std::byte> message) {
  if (message.size() < kPieceHeaderBytes) {
    return invalid("a piece has {} bytes, its header alone has {}", message.size(),
                   kPieceHeaderBytes);
  }
  FATHOM_TRY(const PieceHeader header, read_piece_header(message.first<kPieceHeaderBytes>()));
  const auto rows = message.subspan(kPieceHeaderBytes);
  if (header.num_bytes != std::ssize(rows)) {
    return invalid("a piece has {} bytes of rows, its header says {}", rows.size(),
                   header.num_bytes);
  }
  return ReceivedPiece{.header = header, .rows = rows};
}

}  // namespace fathom
