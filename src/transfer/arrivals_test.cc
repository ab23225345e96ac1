// The book of tickets, piece by piece: what is admitted, what is refused, and when pages are free.
#include "transfer/arrivals.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <vector>

#include "transfer/piece_wire.h"

namespace fathom {
namespace {

constexpr int64_t kPageBytes = 128;

struct Receiver {
  explicit Receiver(int64_t num_pages, ArrivalsOptions options = {.engine = 7,
                                                                  .epoch = 3,
                                                                  .page_bytes = kPageBytes,
                                                                  .form = 11,
                                                                  .with_digests = true})
      : pool(num_pages), arrivals(options, pool) {}

  Ticket open(int64_t count, int64_t first_page = 0) {
    pages.clear();
    EXPECT_TRUE(pool.allocate(count, pages));
    return arrivals.open(1, first_page, pages);
  }
  void release() {
    for (const int32_t page : pages) pool.release(page);
    pages.clear();
  }

  PagePool pool;
  Arrivals arrivals;
  std::vector<int32_t> pages;
};

std::vector<std::byte> rows_of(int value) {
  return std::vector<std::byte>(kPageBytes, static_cast<std::byte>(value));
}

TEST(Arrivals, ATicketIsCompleteWhenAllItsPiecesAreWritten) {
  Receiver receiver(4);
  const Ticket ticket = receiver.open(2, /*first_page=*/5);
  EXPECT_EQ(receiver.pool.quarantined(), 2);
  EXPECT_EQ(receiver.pool.used(), 0);
  for (const int64_t page : {6, 5}) {
    EXPECT_FALSE(receiver.arrivals.is_complete(ticket.id.number));
    const auto rows = rows_of(static_cast<int>(page));
    const auto admitted = receiver.arrivals.admit(make_piece(ticket, page, rows), rows);
    ASSERT_EQ(admitted.verdict, PieceVerdict::kAccepted);
    EXPECT_EQ(admitted.page, receiver.pages[static_cast<size_t>(page - 5)]);
    EXPECT_FALSE(receiver.arrivals.is_complete(ticket.id.number)) << "it is being written";
    receiver.arrivals.end_write(ticket.id, page, true);
  }
  EXPECT_TRUE(receiver.arrivals.is_complete(ticket.id.number));
  receiver.arrivals.close(ticket.id.number);
  EXPECT_EQ(receiver.pool.quarantined(), 0);
  EXPECT_EQ(receiver.pool.used(), 2) << "they are their holder's now";
  EXPECT_EQ(receiver.arrivals.num_open() + receiver.arrivals.num_draining(), 0);
  receiver.release();
  EXPECT_EQ(receiver.pool.free(), 4);
  receiver.pool.check_invariant();
}

TEST(Arrivals, EveryRefusalIsCounted) {
  Receiver receiver(8);
  const Ticket closed = receiver.open(1);
  receiver.arrivals.close(closed.id.number);
  receiver.release();
  const Ticket ticket = receiver.open(2, 5);
  const auto rows = rows_of(1);
  const auto verdict = [&](const PieceHeader& header, std::span<const std::byte> bytes) {
    const auto admitted = receiver.arrivals.admit(header, bytes);
    EXPECT_EQ(admitted.page >= 0, admitted.verdict == PieceVerdict::kAccepted);
    return admitted.verdict;
  };
  PieceHeader good = make_piece(ticket, 5, rows);

  PieceHeader header = good;
  header.ticket.engine = 8;
  EXPECT_EQ(verdict(header, rows), PieceVerdict::kForeign);
  header = good;
  header.ticket.number = 3;
  EXPECT_EQ(verdict(header, rows), PieceVerdict::kForeign) << "never handed out";
  header.ticket.number = 0;
  EXPECT_EQ(verdict(header, rows), PieceVerdict::kForeign);
  header = good;
  header.ticket.epoch = 2;
  EXPECT_EQ(verdict(header, rows), PieceVerdict::kStale);
  EXPECT_EQ(verdict(make_piece(closed, 0, rows), rows), PieceVerdict::kStale);
  EXPECT_EQ(verdict(make_piece(ticket, 4, rows), rows), PieceVerdict::kOutOfRange);
  EXPECT_EQ(verdict(make_piece(ticket, 7, rows), rows), PieceVerdict::kOutOfRange);
  EXPECT_EQ(verdict(make_piece(ticket, INT64_MIN, rows), rows), PieceVerdict::kOutOfRange);
  EXPECT_EQ(verdict(make_piece(ticket, INT64_MAX, rows), rows), PieceVerdict::kOutOfRange);
  Ticket other = ticket;
  other.form = 12;
  EXPECT_EQ(verdict(make_piece(other, 5, rows), rows), PieceVerdict::kOtherForm);
  EXPECT_EQ(verdict(good, std::span(rows).first(100)), PieceVerdict::kWrongSize);
  other = ticket;
  other.page_bytes = 64;
  EXPECT_EQ(verdict(make_piece(other, 5, rows), std::span(rows).first(64)),
            PieceVerdict::kWrongSize);
  auto damaged = rows;
  damaged[77] ^= std::byte{1};
  EXPECT_EQ(verdict(good, damaged), PieceVerdict::kWrongDigest);
  header = good;
  header.page = 6;  // another place of the same ticket
  EXPECT_EQ(verdict(header, rows), PieceVerdict::kWrongDigest);
  EXPECT_EQ(receiver.arrivals.verdicts()[0], 0) << "nothing has been admitted so far";

  EXPECT_EQ(verdict(good, rows), PieceVerdict::kAccepted);
  EXPECT_EQ(verdict(good, rows), PieceVerdict::kRepeated) << "while it is being written";
  receiver.arrivals.end_write(ticket.id, 5, true);
  EXPECT_EQ(verdict(good, rows), PieceVerdict::kRepeated);
  const std::array<int64_t, kNumPieceVerdicts> counts = {1, 3, 2, 4, 1, 2, 2, 2};
  EXPECT_EQ(receiver.arrivals.verdicts(), counts);
}

TEST(Arrivals, AClosedTicketsPageStaysInQuarantineWhileItIsWritten) {
  Receiver receiver(2);
  const Ticket ticket = receiver.open(2);
  const auto admitted = receiver.arrivals.admit(make_piece(ticket, 1));
  ASSERT_EQ(admitted.verdict, PieceVerdict::kAccepted);
  receiver.arrivals.close(ticket.id.number);
  receiver.release();
  EXPECT_EQ(receiver.arrivals.num_draining(), 1);
  EXPECT_EQ(receiver.pool.quarantined(), 1);
  EXPECT_EQ(receiver.pool.free(), 1);
  receiver.pool.check_invariant();
  std::vector<int32_t> pages;
  EXPECT_FALSE(receiver.pool.allocate(2, pages)) << "a write could still reach one of them";
  EXPECT_EQ(receiver.arrivals.admit(make_piece(ticket, 0)).verdict, PieceVerdict::kStale);
  receiver.arrivals.end_write(ticket.id, 1, true);
  EXPECT_EQ(receiver.arrivals.num_draining(), 0);
  EXPECT_EQ(receiver.pool.free(), 2);
  EXPECT_EQ(receiver.arrivals.admit(make_piece(ticket, 1)).verdict, PieceVerdict::kStale);
}

TEST(Arrivals, APieceThatMayNotLandChangesNothing) {
  Receiver receiver(8);
  const Ticket closed = receiver.open(1);
  receiver.arrivals.close(closed.id.number);
  receiver.release();
  const Ticket ticket = receiver.open(2, /*first_page=*/5);
  const PieceHeader good = make_piece(ticket, 5);
  const auto may_land = [&](const std::function<void(PieceHeader&)>& change) {
    PieceHeader header = good;
    change(header);
    return receiver.arrivals.begin_landing(header).has_value();
  };
  EXPECT_FALSE(may_land([](PieceHeader& header) { ++header.ticket.engine; }));
  EXPECT_FALSE(may_land([](PieceHeader& header) { --header.ticket.epoch; }));
  EXPECT_FALSE(may_land([](PieceHeader& header) { ++header.ticket.number; }));
  EXPECT_FALSE(may_land([&](PieceHeader& header) { header.ticket = closed.id; }));
  EXPECT_FALSE(may_land([](PieceHeader& header) { header.page = 4; }));
  EXPECT_FALSE(may_land([](PieceHeader& header) { header.page = 7; }));
  EXPECT_FALSE(may_land([](PieceHeader& header) { ++header.form; }));
  EXPECT_FALSE(may_land([](PieceHeader& header) { --header.num_bytes; }));
  EXPECT_EQ(receiver.arrivals.verdicts(), (std::array<int64_t, kNumPieceVerdicts>{}))
      << "it is judged when it has come";
  const auto place = receiver.arrivals.begin_landing(good);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->page, receiver.pages[0]);
  EXPECT_EQ(place->digest_seed, ticket.digest_seed);
  EXPECT_FALSE(may_land([](PieceHeader&) {})) << "it is landing";
  EXPECT_EQ(receiver.arrivals.admit(good).verdict, PieceVerdict::kRepeated);
}

// It is complete only when all rows are there, and as their digest says.
TEST(Arrivals, APieceThatHasNotLandedMayComeAgain) {
  Receiver receiver(1);
  const Ticket ticket = receiver.open(1);
  const PieceHeader piece = make_piece(ticket, 0);
  for (const Landed how : {Landed::kBroken, Landed::kWrongDigest, Landed::kWritten}) {
    ASSERT_TRUE(receiver.arrivals.begin_landing(piece).has_value());
    EXPECT_FALSE(receiver.arrivals.is_complete(ticket.id.number));
    receiver.arrivals.end_landing(piece, how);
    EXPECT_EQ(receiver.arrivals.is_complete(ticket.id.number), how == Landed::kWritten);
    EXPECT_FALSE(receiver.arrivals.has_failed(ticket.id.number));
  }
  const std::array<int64_t, kNumPieceVerdicts> counts = {1, 0, 0, 0, 0, 0, 0, 1};
  EXPECT_EQ(receiver.arrivals.verdicts(), counts);
  EXPECT_FALSE(receiver.arrivals.begin_landing(piece).has_value()) << "it is written";
}

TEST(Arrivals, AClosedTicketsPageStaysInQuarantineWhileAPieceLands) {
  for (const Landed how : {Landed::kBroken, Landed::kWrongDigest, Landed::kWritten}) {
    Receiver receiver(1);
    const Ticket ticket = receiver.open(1);
    const PieceHeader piece = make_piece(ticket, 0);
    ASSERT_TRUE(receiver.arrivals.begin_landing(piece).has_value());
    receiver.arrivals.close(ticket.id.number);
    receiver.release();
    EXPECT_EQ(receiver.pool.quarantined(), 1);
    EXPECT_EQ(receiver.pool.free(), 0);
    receiver.arrivals.end_landing(piece, how);
    EXPECT_EQ(receiver.arrivals.num_draining(), 0);
    EXPECT_EQ(receiver.pool.free(), 1);
    receiver.pool.check_invariant();
  }
}

TEST(Arrivals, AFailedWriteLeavesItsTicketIncomplete) {
  Receiver receiver(1);
  const Ticket ticket = receiver.open(1);
  for (const bool ok : {false, true}) {
    ASSERT_EQ(receiver.arrivals.admit(make_piece(ticket, 0)).verdict, PieceVerdict::kAccepted);
    receiver.arrivals.end_write(ticket.id, 0, ok);
    EXPECT_TRUE(receiver.arrivals.has_failed(ticket.id.number));
    EXPECT_FALSE(receiver.arrivals.is_complete(ticket.id.number));
  }
}

TEST(Arrivals, DigestsDependOnTicketAndPlace) {
  Receiver receiver(4);
  const auto rows = rows_of(9);
  const Ticket first = receiver.open(2), second = receiver.open(2);
  EXPECT_NE(first.digest_seed, second.digest_seed);
  EXPECT_NE(make_piece(first, 0, rows).digest, make_piece(first, 1, rows).digest);
  EXPECT_NE(make_piece(first, 0, rows).digest, make_piece(second, 0, rows).digest);
  EXPECT_NE(make_piece(first, 0, rows).digest, make_piece(first, 0, rows, 64).digest);
  Receiver without(1, {.engine = 7, .epoch = 3, .page_bytes = kPageBytes});
  const Ticket plain = without.open(1);
  EXPECT_EQ(plain.digest_seed, 0u);
  EXPECT_EQ(make_piece(plain, 0, rows).digest, 0u);
  EXPECT_EQ(without.arrivals.admit(make_piece(plain, 0, rows), rows).verdict,
            PieceVerdict::kAccepted);
}

TEST(PieceWire, APieceReadsAsItWasWritten) {
  const PieceHeader header{
      .ticket = {1, 2, 3}, .page = 4, .num_bytes = 8, .form = 5, .digest = 6, .cached_tokens = 9};
  const std::vector<std::byte> rows(8, std::byte{42});
  std::vector<std::byte> message;
  write_piece(header, rows, message);
  ASSERT_EQ(message.size(), kPieceHeaderBytes + 8);
  const auto read = read_piece(message);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->header.ticket, header.ticket);
  EXPECT_EQ(read->header.page, 4);
  EXPECT_EQ(read->header.num_bytes, 8);
  EXPECT_EQ(read->header.form, 5u);
  EXPECT_EQ(read->header.digest, 6u);
  EXPECT_EQ(read->header.cached_tokens, 9);
  EXPECT_TRUE(std::equal(rows.begin(), rows.end(), read->rows.begin(), read->rows.end()));

  EXPECT_EQ(read_piece(std::span(message).first(71)).error().message,
            "a piece has 71 bytes, its header alone has 72");
  EXPECT_EQ(read_piece(std::span(message).first(78)).error().message,
            "a piece has 6 bytes of rows, its header says 8");
  message[0] ^= std::byte{1};
  EXPECT_FALSE(read_piece(message).has_value());
}

}  // namespace
}  // namespace fathom
