#include "transfer/landing.h"

#include <utility>

#include "transfer/piece_mailbox.h"

namespace fathom {

Landing::Landing(std::shared_ptr<PieceMailbox> mailbox, const PieceHeader& header)
    : mailbox_(std::move(mailbox)), piece_{{.header = header}} {}

Landing::~Landing() {
  if (!piece_.empty() && !place_.rows.empty()) mailbox_->landed(std::move(piece_));
}

void Landing::finish() {
  LandedPiece& piece = piece_.front();
  const uint64_t seed = place_.digest_seed;
  const bool is_right =
      seed == 0 || piece.header.digest == piece_digest(seed, piece.header, place_.rows);
  piece.how = is_right ? Landed::kWritten : Landed::kWrongDigest;
  mailbox_->landed(std::move(piece_));
}

}  // namespace fathom
