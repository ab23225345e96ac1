// The receiver's book of tickets: which pages wait for which pieces. Every piece is checked against
// its ticket before a byte of it is written.
//
// A ticket's pages are quarantined from open() on. A piece that is admitted has a write in flight
// until end_write(). close() ends a ticket in any state, once: no piece is admitted any more, and
// each page leaves the quarantine when no write to it is in flight. So a page is handed out again
// only when nothing can write it.
//
//   state      | entered by                        | admits pieces | its pages
//   open       | open()                            | yes           | quarantined
//   complete   | end_write() of the last piece     | no: repeated  | quarantined, all rows there
//   failed     | end_write() of a failed write     | yes           | quarantined
//   draining   | close() with writes in flight     | no: stale     | quarantined while written
//   gone       | close(), or the last end_write()  | no: stale     | their holder's, or free
//
// A piece that lands (transfer/landing.h) is written while it comes: its header is checked before
// the first byte, its digest behind the last one, and until end_landing() a write is in flight.
//
// Owns which pieces have come, not the pages' holders: the caller holds each page once and releases
// it when it likes. Knows page ids, not their memory. The pool's thread only, but begin_landing().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cache/page_pool.h"
#include "transfer/landing.h"
#include "transfer/ticket.h"

namespace fathom {

enum class PieceVerdict : uint8_t {
  kAccepted,
  kForeign,     // another receiver's, or a ticket that was never handed out
  kStale,       // of an earlier epoch, or of a ticket that is closed
  kOutOfRange,  // a page that its ticket does not have
  kOtherForm,   // rows of another format, model or number of layers
  kWrongSize,   // not a page's bytes, or cut off
  kRepeated,    // its page has come, or is being written
  kWrongDigest,
};
inline constexpr size_t kNumPieceVerdicts = 8;

// "accepted", "foreign", …: as metrics have them.
std::string_view name_of(PieceVerdict verdict);

struct ArrivalsOptions {
  uint64_t engine = 0, epoch = 0;
  int64_t page_bytes = 0;
  uint64_t form = 0;
  bool with_digests = false;
};

class Arrivals {
 public:
  Arrivals(const ArrivalsOptions& options, PagePool& pool) : options_(options), pool_(&pool) {}

  // A ticket for `pages`, the request's pages from `first_page` of its text on: each held once, not
  // kept. At least one.
  Ticket open(uint64_t request, int64_t first_page, std::span<const int32_t> pages);

  struct Admitted {
    PieceVerdict verdict = PieceVerdict::kForeign;
    int32_t page = -1;  // of the pool, to be written now; only if accepted
  };
  // Checks a piece and counts the verdict. Without `rows` neither size nor digest of the rows is
  // checked: for a copy between two pools of one process.
  Admitted admit(const PieceHeader& header);
  Admitted admit(const PieceHeader& header, std::span<const std::byte> rows);

  // The write of an admitted piece has ended; after a failed one the ticket never completes.
  void end_write(const TicketId& id, int64_t page, bool ok);

  struct Place {
    int32_t page = -1;  // of the pool
    uint64_t digest_seed = 0;
  };
  // The page that a piece may be written to while it comes; none, and nothing has changed: admit()
  // would not accept it. Any thread.
  std::optional<Place> begin_landing(const PieceHeader& header);
  // Counts the verdict. A piece that was not written whole may come again.
  void end_landing(const PieceHeader& header, Landed how);

  // Whether all pieces have been written, of a ticket that is not closed.
  bool is_complete(uint64_t number) const;
  bool has_failed(uint64_t number) const;

  // Ends a ticket that is not closed.
  void close(uint64_t number);

  int64_t num_open() const;
  int64_t num_draining() const;
  // Pages of the draining tickets, which are still quarantined.
  int64_t pages_draining() const;
  // [verdicts]: pieces since the beginning.
  const std::array<int64_t, kNumPieceVerdicts>& verdicts() const { return verdicts_; }

 private:
  enum class Piece : uint8_t { kMissing, kWriting, kWritten };
  struct Entry {
    Ticket ticket;
    std::vector<int32_t> pages;  // [num_pages], of the pool
    std::vector<Piece> pieces;   // [num_pages]
    int64_t num_writing = 0, num_written = 0;
    bool failed = false;
    bool closed = false;
  };

  // The mutex is held.
  PieceVerdict verdict_of(const PieceHeader& header) const;
  Admitted begin_write(const PieceHeader& header, PieceVerdict verdict);
  int32_t begin_write(const PieceHeader& header);
  enum class Write { kDone, kUndone, kFailed };
  void end_write(const TicketId& id, int64_t page, Write how);
  Entry& at(uint64_t number);

  const ArrivalsOptions options_;
  PagePool* pool_;
  mutable std::mutex mutex_;                     // of the tickets
  std::unordered_map<uint64_t, Entry> tickets_;  // open and draining, by number
  uint64_t last_number_ = 0;
  int64_t num_open_ = 0;
  std::array<int64_t, kNumPieceVerdicts> verdicts_{};
};

}  // namespace fathom
