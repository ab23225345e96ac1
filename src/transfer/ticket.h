// What names a transfer of cache pages, and each of its pieces.
//
// The side that decodes reserves pages and hands out a ticket: whose pages, of which request, which
// of its text, in which form. The side that computes the prompt sends the ticket's pages, one piece
// a page. A piece names its ticket and its place in the text, never a page of the receiver's pool:
// where it goes is known to the receiver alone, so no sender can write another request's page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fathom {

struct TicketId {
  uint64_t engine = 0;  // the receiver, as long as its process lives or longer
  uint64_t epoch = 0;   // of the receiver's process: another one after a restart
  uint64_t number = 0;  // counts from 1, never reused within an epoch

  friend bool operator==(const TicketId&, const TicketId&) = default;
};

struct TicketIdHash {
  size_t operator()(const TicketId& id) const { return id.number ^ id.engine << 32 ^ id.epoch; }
};

// The pages [first_page, first_page + num_pages) of a request's text, each of 64 tokens; of the
// last one the rows of the prompt's tokens count.
struct Ticket {
  TicketId id;
  uint64_t request = 0;  // the receiver's
  int64_t first_page = 0, num_pages = 0;
  int64_t page_bytes = 0;
  uint64_t form = 0;         // of a page: format, layers, model. Equal on both sides
  uint64_t digest_seed = 0;  // 0: pieces have no digest
};

struct PieceHeader {
  TicketId ticket;
  int64_t page = 0;  // of the text
  int64_t num_bytes = 0;
  uint64_t form = 0;
  uint64_t digest = 0;        // 0 without a digest seed
  int64_t cached_tokens = 0;  // of the text: rows that the sender had and did not compute
};

// A piece with these rows [page_bytes]; with an empty span its digest is 0.
PieceHeader make_piece(const Ticket& ticket, int64_t page, std::span<const std::byte> rows = {},
                       int64_t cached_tokens = 0);

// Covers the header's other fields, and the rows: 64 bits of XXH3, keyed with the ticket's seed. It
// finds what was damaged, exchanged or cut off. It is no signature.
uint64_t piece_digest(uint64_t seed, const PieceHeader& header, std::span<const std::byte> rows);

}  // namespace fathom
