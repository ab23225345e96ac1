// Rows that come straight into a page of the receiver's pool, with no buffer between.
//
// Before a byte of a piece is written its header has been checked against its ticket, so the page
// is quarantined and this piece's alone. The thread that receives the rows writes them; how that
// ended is told to the engine's thread, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>

#include "transfer/ticket.h"

namespace fathom {

enum class Landed : uint8_t {
  kWritten,
  kWrongDigest,  // all rows came, and they are others than the header's digest covers
  kBroken,       // the connection ended before: the page may have some of them
};

struct LandedPiece {
  PieceHeader header;
  Landed how = Landed::kBroken;
};

struct LandingPlace {
  std::span<std::byte> rows;  // [page_bytes]
  uint64_t digest_seed = 0;   // 0: pieces have no digest
};

// Says where pieces may land.
class LandingBook {
 public:
  virtual ~LandingBook() = default;
  // Any thread. None: this piece is not to be written; it goes into a buffer and is judged there.
  // Otherwise the place is this piece's until the engine has taken the LandedPiece.
  virtual std::optional<LandingPlace> begin_landing(const PieceHeader& header) = 0;
};

class PieceMailbox;

// A piece that is landing. Used by one thread.
class Landing {
 public:
  // Made by PieceMailbox::land().
  Landing(std::shared_ptr<PieceMailbox> mailbox, const PieceHeader& header);
  // Tells that it is broken, unless it is finished or never began.
  ~Landing();
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  // Once; does not throw, so that no place is begun and forgotten.
  void begin(LandingPlace place) noexcept { place_ = place; }
  std::span<std::byte> rows() const { return place_.rows; }
  // All rows are there. Checks their digest.
  void finish();

 private:
  const std::shared_ptr<PieceMailbox> mailbox_;
  LandingPlace place_;            // without rows: it has not begun
  std::list<LandedPiece> piece_;  // one; none: it has been told. Telling allocates nothing
};

}  // namespace fathom
