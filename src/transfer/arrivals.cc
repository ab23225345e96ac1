#include "transfer/arrivals.h"

#include "base/check.h"
#include "base/random.h"

namespace fathom {

std::string_view name_of(PieceVerdict verdict) {
  switch (verdict) {
    case PieceVerdict::kAccepted:
      return "accepted";
    case PieceVerdict::kForeign:
      return "foreign";
    case PieceVerdict::kStale:
      return "stale";
    case PieceVerdict::kOutOfRange:
      return "out_of_range";
    case PieceVerdict::kOtherForm:
      return "other_form";
    case PieceVerdict::kWrongSize:
      return "wrong_size";
    case PieceVerdict::kRepeated:
      return "repeated";
    case PieceVerdict::kWrongDigest:
      return "wrong_digest";
  }
  return "";
}

Ticket Arrivals::open(uint64_t request, int64_t first_page, std::span<const int32_t> pages) {
  FATHOM_CHECK(!pages.empty() && first_page >= 0, "a ticket for {} pages from {} on", pages.size(),
               first_page);
  const std::lock_guard lock(mutex_);
  const uint64_t number = last_number_ + 1;
  Entry entry;
  entry.ticket = {.id = {options_.engine, options_.epoch, number},
                  .request = request,
                  .first_page = first_page,
                  .num_pages = std::ssize(pages),
                  .page_bytes = options_.page_bytes,
                  .form = options_.form};
  if (options_.with_digests) {
    entry.ticket.digest_seed = mix64(options_.epoch ^ mix64(number)) | 1;  // not 0
  }
  entry.pages.assign(pages.begin(), pages.end());
  entry.pieces.assign(pages.size(), Piece::kMissing);
  const Ticket ticket = entry.ticket;
  tickets_.emplace(number, std::move(entry));  // may throw; nothing has changed then
  last_number_ = number;
  ++num_open_;
  for (const int32_t page : pages) pool_->begin_quarantine(page);
  return ticket;
}

// Everything but the rows. The ticket first: of another's or an old one nothing else is read.
PieceVerdict Arrivals::verdict_of(const PieceHeader& header) const {
  if (header.ticket.engine != options_.engine) return PieceVerdict::kForeign;
  if (header.ticket.epoch != options_.epoch) return PieceVerdict::kStale;
  const auto it = tickets_.find(header.ticket.number);
  if (it == tickets_.end()) {
    return header.ticket.number > last_number_ || header.ticket.number == 0 ? PieceVerdict::kForeign
                                                                            : PieceVerdict::kStale;
  }
  const Entry& entry = it->second;
  if (entry.closed) return PieceVerdict::kStale;
  const Ticket& ticket = entry.ticket;
  if (header.page < ticket.first_page || header.page - ticket.first_page >= ticket.num_pages) {
    return PieceVerdict::kOutOfRange;
  }
  if (header.form != options_.form) return PieceVerdict::kOtherForm;
  if (header.num_bytes != options_.page_bytes) return PieceVerdict::kWrongSize;
  const auto index = static_cast<size_t>(header.page - ticket.first_page);
  if (entry.pieces[index] != Piece::kMissing) return PieceVerdict::kRepeated;
  return PieceVerdict::kAccepted;
}

Arrivals::Admitted Arrivals::admit(const PieceHeader& header) {
  const std::lock_guard lock(mutex_);
  return begin_write(header, verdict_of(header));
}

Arrivals::Admitted Arrivals::admit(const PieceHeader& header, std::span<const std::byte> rows) {
  const std::lock_guard lock(mutex_);
  PieceVerdict verdict = verdict_of(header);
  if (verdict == PieceVerdict::kAccepted) {
    const uint64_t seed = at(header.ticket.number).ticket.digest_seed;
    if (std::ssize(rows) != options_.page_bytes) {
      verdict = PieceVerdict::kWrongSize;
    } else if (seed != 0 && header.digest != piece_digest(seed, header, rows)) {
      verdict = PieceVerdict::kWrongDigest;
    }
  }
  return begin_write(header, verdict);
}

Arrivals::Admitted Arrivals::begin_write(const PieceHeader& header, PieceVerdict verdict) {
  ++verdicts_[static_cast<size_t>(verdict)];
  if (verdict != PieceVerdict::kAccepted) return {.verdict = verdict};
  return {.verdict = verdict, .page = begin_write(header)};
}

// The page of a piece that is accepted.
int32_t Arrivals::begin_write(const PieceHeader& header) {
  Entry& entry = at(header.ticket.number);
  const auto index = static_cast<size_t>(header.page - entry.ticket.first_page);
  entry.pieces[index] = Piece::kWriting;
  ++entry.num_writing;
  return entry.pages[index];
}

std::optional<Arrivals::Place> Arrivals::begin_landing(const PieceHeader& header) {
  const std::lock_guard lock(mutex_);
  if (verdict_of(header) != PieceVerdict::kAccepted) return std::nullopt;
  return Place{.page = begin_write(header),
               .digest_seed = at(header.ticket.number).ticket.digest_seed};
}

void Arrivals::end_landing(const PieceHeader& header, Landed how) {
  const std::lock_guard lock(mutex_);
  if (how == Landed::kWritten) ++verdicts_[static_cast<size_t>(PieceVerdict::kAccepted)];
  if (how == Landed::kWrongDigest) ++verdicts_[static_cast<size_t>(PieceVerdict::kWrongDigest)];
  end_write(header.ticket, header.page, how == Landed::kWritten ? Write::kDone : Write::kUndone);
}

void Arrivals::end_write(const TicketId& id, int64_t page, bool ok) {
  const std::lock_guard lock(mutex_);
  end_write(id, page, ok ? Write::kDone : Write::kFailed);
}

void Arrivals::end_write(const TicketId& id, int64_t page, Write how) {
  Entry& entry = at(id.number);
  const auto index = static_cast<size_t>(page - entry.ticket.first_page);
  FATHOM_CHECK(entry.pieces[index] == Piece::kWriting, "page {} of ticket {} is not being written",
               page, id.number);
  entry.pieces[index] = how == Write::kDone ? Piece::kWritten : Piece::kMissing;
  --entry.num_writing;
  entry.num_written += how == Write::kDone;
  entry.failed |= how == Write::kFailed;
  if (!entry.closed) return;
  pool_->end_quarantine(entry.pages[index]);
  if (entry.num_writing == 0) tickets_.erase(id.number);
}

bool Arrivals::is_complete(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto it = tickets_.find(number);
  return it != tickets_.end() && !it->second.closed && !it->second.failed &&
         it->second.num_written == it->second.ticket.num_pages;
}

bool Arrivals::has_failed(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto it = tickets_.find(number);
  return it != tickets_.end() && it->second.failed;
}

void Arrivals::close(uint64_t number) {
  const std::lock_guard lock(mutex_);
  Entry& entry = at(number);
  FATHOM_CHECK(!entry.closed, "ticket {} is closed twice", number);
  entry.closed = true;
  --num_open_;
  for (size_t i = 0; i < entry.pages.size(); ++i) {
    if (entry.pieces[i] != Piece::kWriting) pool_->end_quarantine(entry.pages[i]);
  }
  if (entry.num_writing == 0) tickets_.erase(number);
}

int64_t Arrivals::num_open() const {
  const std::lock_guard lock(mutex_);
  return num_open_;
}

int64_t Arrivals::num_draining() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(tickets_) - num_open_;
}

int64_t Arrivals::pages_draining() const {
  const std::lock_guard lock(mutex_);
  int64_t pages = 0;
  for (const auto& [number, entry] : tickets_) pages += entry.closed ? entry.num_writing : 0;
  return pages;
}

Arrivals::Entry& Arrivals::at(uint64_t number) {
  const auto it = tickets_.find(number);
  FATHOM_CHECK(it != tickets_.end(), "ticket {} is not open", number);
  return it->second;
}

}  // namespace fathom
