#include "transfer/ticket.h"

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include "base/random.h"

namespace fathom {

PieceHeader make_piece(const Ticket& ticket, int64_t page, std::span<const std::byte> rows,
                       int64_t cached_tokens) {
  PieceHeader header{.ticket = ticket.id,
                     .page = page,
                     .num_bytes = ticket.page_bytes,
                     .form = ticket.form,
                     .digest = 0,
                     .cached_tokens = cached_tokens};
  if (ticket.digest_seed != 0 && !rows.empty()) {
    header.digest = piece_digest(ticket.digest_seed, header, rows);
  }
  return header;
}

uint64_t piece_digest(uint64_t seed, const PieceHeader& header, std::span<const std::byte> rows) {
  uint64_t key = mix64(seed);
  for (const uint64_t field :
       {header.ticket.engine, header.ticket.epoch, header.ticket.number,
        static_cast<uint64_t>(header.page), static_cast<uint64_t>(header.num_bytes), header.form,
        static_cast<uint64_t>(header.cached_tokens)}) {
    key = mix64(key ^ field);
  }
  return XXH3_64bits_withSeed(rows.data(), rows.size(), key);
}

}  // namespace fathom
