#include "transfer/piece_wire.h"

#include <cstring>

namespace fathom {
namespace {

constexpr uint64_t kPieceMagic = 0x3165636569706846;  // "Fhpiece1"

struct WireHeader {
  uint64_t magic = kPieceMagic;
  TicketId ticket;
  int64_t page = 0, num_bytes = 0;
  uint64_t form = 0, digest = 0;
};
static_assert(sizeof(WireHeader) == kPieceHeaderBytes);

}  // namespace

void write_piece(const PieceHeader& header, std::span<const std::byte> rows,
                 std::vector<std::byte>& message) {
  const WireHeader wire{.ticket = header.ticket,
                        .page = header.page,
                        .num_bytes = header.num_bytes,
                        .form = header.form,
                        .digest = header.digest};
  message.resize(kPieceHeaderBytes + rows.size());
  std::memcpy(message.data(), &wire, kPieceHeaderBytes);
  if (!rows.empty()) std::memcpy(message.data() + kPieceHeaderBytes, rows.data(), rows.size());
}

Result<ReceivedPiece> read_piece(std::span<const std::byte> message) {
  if (message.size() < kPieceHeaderBytes) {
    return invalid("a piece has {} bytes, its header alone has {}", message.size(),
                   kPieceHeaderBytes);
  }
  WireHeader wire;
  std::memcpy(&wire, message.data(), kPieceHeaderBytes);
  if (wire.magic != kPieceMagic) {
    return invalid("a piece begins with {:016x}, expected {:016x}", wire.magic, kPieceMagic);
  }
  const auto rows = message.subspan(kPieceHeaderBytes);
  if (wire.num_bytes != std::ssize(rows)) {
    return invalid("a piece has {} bytes of rows, its header says {}", rows.size(), wire.num_bytes);
  }
  return ReceivedPiece{.header = {.ticket = wire.ticket,
                                  .page = wire.page,
                                  .num_bytes = wire.num_bytes,
                                  .form = wire.form,
                                  .digest = wire.digest},
                       .rows = rows};
}

}  // namespace fathom
