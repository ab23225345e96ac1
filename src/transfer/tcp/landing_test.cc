// Pieces that land in the receiver's pool over loopback: what may not is written nowhere, and what
// is broken off is no page.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <semaphore>

#include "cache/page_pool.h"
#include "transfer/arrivals.h"
#include "transfer/tcp/fake_prefill.h"

namespace fathom {
namespace {

constexpr std::byte kUntouched{0xEE};

class Landings : public OverEach {};
INSTANTIATE_TEST_SUITE_P(Each, Landings, testing::Values(By::kTcp, By::kUcx), name_of_by);

// A decoding engine's pool with a ticket for all its pages.
class Pool : public LandingBook {
 public:
  Pool(std::shared_ptr<PieceMailbox> mailbox, int64_t page_bytes, bool with_digests = false)
      : mailbox_(std::move(mailbox)),
        page_bytes_(page_bytes),
        memory_(static_cast<size_t>(kNumPages * page_bytes), kUntouched),
        arrivals_({.engine = 1,
                   .epoch = 2,
                   .page_bytes = page_bytes,
                   .form = 7,
                   .with_digests = with_digests},
                  pool_) {
    EXPECT_TRUE(pool_.allocate(kNumPages, pages_));
    ticket_ = arrivals_.open(1, 0, pages_);
    mailbox_->set_landings(this);
  }
  ~Pool() override { mailbox_->set_landings(nullptr); }

  static constexpr int64_t kNumPages = 3;
  std::optional<LandingPlace> begin_landing(const PieceHeader& header) override {
    const auto place = arrivals_.begin_landing(header);
    if (place && before) before();
    if (!place) return std::nullopt;
    return LandingPlace{.rows = memory(place->page), .digest_seed = place->digest_seed};
  }
  PromptOrder order() const {
    PromptOrder order = Decode::order_of(ticket_.id.number, kNumPages * kPageSize);
    order.ticket = ticket_;
    return order;
  }
  // Of a page of the text.
  std::vector<std::byte> rows(int64_t page) {
    const auto rows = memory(pages_[static_cast<size_t>(page)]);
    return {rows.begin(), rows.end()};
  }
  // Waits for so many ends, and tells the book.
  std::vector<Landed> ends(Decode& decode, size_t count) {
    std::vector<Landed> ends;
    wait_for([&] {
      decode.mailbox->take(decode.news);
      for (const LandedPiece& piece : decode.news.landed) {
        arrivals_.end_landing(piece.header, piece.how);
        ends.push_back(piece.how);
      }
      for (const PagePiece& piece : decode.news.pieces) decode.pieces.push_back(piece);
      for (const FailedOrder& failed : decode.news.failures) decode.failures.push_back(failed);
      return ends.size() >= count;
    });
    return ends;
  }
  const Ticket& ticket() const { return ticket_; }
  Arrivals& arrivals() { return arrivals_; }

  std::function<void()> before;  // called on the thread that receives, when a piece may land

 private:
  std::span<std::byte> memory(int32_t page) {
    return std::span(memory_).subspan(static_cast<size_t>(page * page_bytes_),
                                      static_cast<size_t>(page_bytes_));
  }
  const std::shared_ptr<PieceMailbox> mailbox_;
  const int64_t page_bytes_;
  std::vector<std::byte> memory_;
  PagePool pool_{kNumPages};
  Arrivals arrivals_;
  std::vector<int32_t> pages_;
  Ticket ticket_;
};

std::shared_ptr<ScriptedLink> ordered(Server& server, Decode& decode, const PromptOrder& order) {
  decode.wait_ready();
  EXPECT_TRUE(decode.links->order(order).has_value());
  auto link = server.link();
  wait_for([&] { return link->num_orders() == 1; });
  return link;
}

TEST_P(Landings, PiecesLandInTheirPages) {
  Server server;
  Decode decode({server.server->endpoint()});
  Pool pool(decode.mailbox, kPageBytes, /*with_digests=*/true);
  const auto link = ordered(server, decode, pool.order());
  for (int64_t page = 0; page < Pool::kNumPages; ++page) {
    const auto rows = rows_of(page);
    EXPECT_TRUE(link->receiver->put(make_piece(pool.ticket(), page, rows), lent(rows)));
  }
  EXPECT_EQ(pool.ends(decode, 3), std::vector(3, Landed::kWritten));
  for (int64_t page = 0; page < Pool::kNumPages; ++page) EXPECT_EQ(pool.rows(page), rows_of(page));
  EXPECT_TRUE(pool.arrivals().is_complete(pool.ticket().id.number));
  EXPECT_TRUE(decode.pieces.empty());
  EXPECT_EQ(decode.links->stats().pieces_received, 3);
  EXPECT_EQ(decode.links->stats().lane_pieces_received, by == By::kUcx ? 3 : 0);
  EXPECT_EQ(decode.links->stats().bytes_received, 3 * kPageBytes);
}

// They come into buffers, for the engine to judge.
TEST_P(Landings, WhatMayNotLandIsWrittenNowhere) {
  Server server;
  Decode decode({server.server->endpoint()});
  Pool pool(decode.mailbox, kPageBytes);
  const auto link = ordered(server, decode, pool.order());
  const auto rows = rows_of(1), others = rows_of(2);
  PieceHeader form = make_piece(pool.ticket(), 1, others);
  ++form.form;
  PieceHeader foreign = make_piece(pool.ticket(), 2, others);
  ++foreign.ticket.number;
  const PieceHeader last = make_piece(pool.ticket(), 0, rows);
  EXPECT_TRUE(link->receiver->put(last, lent(rows)));
  EXPECT_EQ(pool.ends(decode, 1), std::vector{Landed::kWritten});
  for (const PieceHeader& header :
       {last, form, make_piece(pool.ticket(), Pool::kNumPages, others), foreign}) {
    EXPECT_TRUE(link->receiver->put(header, lent(others)));
  }
  decode.collect(3);
  EXPECT_EQ(decode.pieces.size(), 3u);
  wait_for([&] { return decode.links->stats().foreign_pieces == 1; });
  for (const PagePiece& piece : decode.pieces) {
    EXPECT_NE(pool.arrivals().admit(piece.header, piece.rows).verdict, PieceVerdict::kAccepted);
  }
  EXPECT_EQ(pool.rows(0), rows);
  for (const int64_t page : {1, 2}) {
    EXPECT_EQ(pool.rows(page), std::vector<std::byte>(kPageBytes, kUntouched));
  }
}

// It may be nobody's order here, although the engine's ticket is open.
TEST_P(Landings, APieceThatWasNotOrderedIsWrittenNowhere) {
  Server server;
  Decode decode({server.server->endpoint()});
  Pool pool(decode.mailbox, kPageBytes);
  const auto link = ordered(server, decode, pool.order());
  decode.links->cancel(pool.ticket().id);
  const auto rows = rows_of(1);
  EXPECT_TRUE(link->receiver->put(make_piece(pool.ticket(), 1, rows), lent(rows)));
  wait_for([&] { return decode.links->stats().foreign_pieces == 1; });
  EXPECT_EQ(pool.rows(1), std::vector<std::byte>(kPageBytes, kUntouched));
}

TEST_P(Landings, ADamagedPieceIsNoPage) {
  Server server;
  Decode decode({server.server->endpoint()});
  Pool pool(decode.mailbox, kPageBytes, /*with_digests=*/true);
  const auto link = ordered(server, decode, pool.order());
  const auto rows = rows_of(0), others = rows_of(1);
  EXPECT_TRUE(link->receiver->put(make_piece(pool.ticket(), 0, rows), lent(others)));
  EXPECT_EQ(pool.ends(decode, 1), std::vector{Landed::kWrongDigest});
  EXPECT_TRUE(link->receiver->put(make_piece(pool.ticket(), 0, rows), lent(rows)));
  EXPECT_EQ(pool.ends(decode, 1), std::vector{Landed::kWritten}) << "it may come again";
  EXPECT_EQ(pool.rows(0), rows);
}

// The sender goes when a piece's header has come, and its rows have not all been read.
TEST_P(Landings, ASenderThatGoesLeavesNoPage) {
  constexpr int64_t kBytes = 32 << 20;  // more than the kernel's buffers hold
  auto server = std::make_unique<Server>(
      TransferServerOptions{.page_bytes = kBytes, .window_bytes = 256 << 20});
  PrefillPeersOptions options;
  options.page_bytes = kBytes;
  Decode decode({server->server->endpoint()}, options);
  Pool pool(decode.mailbox, kBytes);
  const auto link = ordered(*server, decode, pool.order());
  std::binary_semaphore begun{0}, gone{0};
  pool.before = [&] {
    begun.release();
    gone.acquire();
  };
  const std::vector<std::byte> rows(kBytes, std::byte{1});
  EXPECT_TRUE(link->receiver->put(make_piece(pool.ticket(), 0), lent(rows)));
  begun.acquire();
  server = nullptr;
  gone.release();
  EXPECT_EQ(pool.ends(decode, 1), std::vector{Landed::kBroken});
  EXPECT_FALSE(pool.arrivals().is_complete(pool.ticket().id.number));
  wait_for([&] { return pool.ends(decode, 0), !decode.failures.empty(); });
  EXPECT_EQ(pool.arrivals().verdicts()[0], 0);
}

// The sender waits in the middle of a piece: the engine's end does not wait for it.
TEST(LandingsByTcp, AnEngineThatGoesBreaksOffWhatLands) {
  by = By::kTcp;
  constexpr int64_t kBytes = 32 << 20;
  Server server({.page_bytes = kBytes, .window_bytes = 256 << 20});
  PrefillPeersOptions options;
  options.page_bytes = kBytes;
  Decode decode({server.server->endpoint()}, options);
  std::optional<Pool> pool(std::in_place, decode.mailbox, kBytes);
  const auto link = ordered(server, decode, pool->order());
  const std::vector<std::byte> rows(kBytes, std::byte{1});
  const auto loan = std::make_shared<LentRows>(std::span<const std::byte>(rows));
  std::binary_semaphore begun{0}, held{0};
  pool->before = [&] {
    begun.release();
    held.acquire();
  };
  EXPECT_TRUE(link->receiver->put(make_piece(pool->ticket(), 0), lend(loan)));
  begun.acquire();
  loan->read([&](std::span<const std::byte>) {  // the sender waits for its end
    held.release();
    pool.reset();
  });
  decode.collect(0, 1);
  ASSERT_EQ(decode.failures.size(), 1u);
  EXPECT_NE(decode.failures[0].why.message.find("takes no more pages"), std::string::npos)
      << decode.failures[0].why.message;
}

}  // namespace
}  // namespace fathom
