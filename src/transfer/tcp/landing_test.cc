// Pieces that land in the receiver's pool over loopback: what may not is written nowhere, and what
// is broken off is no page.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <semaphore>

#include "cache/page_pool.h"
#include "transfer/arrivals.h"
#include "transfer/tcp/fake_prefill.h"
#include "transfer/tcp/halting_relay.h"

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
    open();
    mailbox_->set_landings(this);
  }
  ~Pool() override { mailbox_->set_landings(nullptr); }

  static constexpr int64_t kNumPages = 3;
  void open() {
    EXPECT_TRUE(pool_.allocate(kNumPages, pages_));
    ticket_ = arrivals_.open(1, 0, pages_);
  }
  // As when its request ends.
  void close() {
    arrivals_.close(ticket_.id.number);
    for (const int32_t page : pages_) pool_.release(page);
    pages_.clear();
  }
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
  // Rows of one page of the text.
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
  const PagePool& pages() const { return pool_; }

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

// A lane that never tells that the rest of a piece has come, while `stalls`.
class StallingLane : public PieceLane {
 public:
  StallingLane(std::unique_ptr<PieceLane> lane, const std::atomic<bool>& stalls)
      : lane_(std::move(lane)), stalls_(stalls) {}
  std::span<const std::byte> address() const override { return lane_->address(); }
  Result<> connect(std::span<const std::byte> other_end) override {
    return lane_->connect(other_end);
  }
  int event_fd() const override { return lane_->event_fd(); }
  Result<bool> progress() override { return lane_->progress(); }
  Result<> send(std::span<const std::byte, kPieceHeaderBytes> header,
                std::span<const std::byte> rows) override {
    return lane_->send(header, rows);
  }
  bool is_sending() const override { return lane_->is_sending(); }
  std::optional<Offer> offer() const override { return lane_->offer(); }
  Result<> receive(std::span<std::byte> rows) override { return lane_->receive(rows); }
  bool has_received() override { return lane_->has_received() && !stalls_; }

 private:
  const std::unique_ptr<PieceLane> lane_;
  const std::atomic<bool>& stalls_;
};

// Half a page comes and then nothing, while the control connection lives. The request's end does
// not free the page, the limit does.
TEST_P(Landings, APageThatStallsComesBack) {
  constexpr int64_t kBytes = 1 << 20;
  const bool by_lane = by == By::kUcx;
  const std::vector<std::byte> rows(kBytes, std::byte{1});  // lent as long as the server lives
  std::atomic<bool> stalls{true};
  Server server({.page_bytes = kBytes, .window_bytes = 16 << 20});
  HaltingRelay relay(server.server->endpoint(), kBytes / 2);
  PrefillPeersOptions options;
  options.page_bytes = kBytes;
  options.silence_limit = 1h;
  options.stall_limit = 300ms;
  if (by_lane) {
    options.make_lane = [&](int64_t bytes, uint64_t key) -> Result<std::unique_ptr<PieceLane>> {
      FATHOM_TRY(auto lane, make_ucx_lane(bytes, key));
      return std::make_unique<StallingLane>(std::move(lane), stalls);
    };
  }
  Decode decode({relay.endpoint()}, options);
  Pool pool(decode.mailbox, kBytes);
  std::counting_semaphore<> begun{0};
  pool.before = [&] { begun.release(); };
  const auto link = ordered(server, decode, pool.order());
  EXPECT_TRUE(link->receiver->put(make_piece(pool.ticket(), 0), lent(rows)));
  begun.acquire();
  // Either, on a machine that takes longer for half a page than the limit.
  wait_for([&] {
    return by_lane || relay.num_halted() == 1 || decode.links->stats().stalled_pieces > 0;
  });
  pool.close();
  EXPECT_EQ(pool.pages().quarantined(), 1);
  EXPECT_EQ(pool.pages().free(), Pool::kNumPages - 1);
  relay.open();
  EXPECT_EQ(pool.ends(decode, 1), std::vector{Landed::kBroken});
  ASSERT_FALSE(HasFatalFailure()) << "it is landing still";
  EXPECT_EQ(pool.pages().free(), Pool::kNumPages);
  pool.pages().check_invariant();
  decode.collect(0, 1);
  EXPECT_NE(decode.failures[0].why.message.find("the rest of a page has not come in 0.3 s"),
            std::string::npos)
      << decode.failures[0].why.message;
  EXPECT_EQ(decode.links->stats().stalled_pieces, 1);
  stalls = false;

  // The next request, as often as a machine that is slow lets a page miss the limit.
  for (bool is_whole = false; !is_whole; pool.close()) {
    wait_for([&] { return pool.ends(decode, 0), pool.pages().free() == Pool::kNumPages; });
    pool.open();
    wait_for([&] { return decode.links->order(pool.order()).has_value(); });
    std::shared_ptr<ScriptedLink> next;
    wait_for([&] {
      const std::lock_guard lock(server.mutex);
      next = server.links.back();
      return next->num_orders() > 0;
    });
    for (int64_t page = 0; page < Pool::kNumPages; ++page) {
      (void)next->receiver->put(make_piece(pool.ticket(), page), lent(rows));
    }
    decode.failures.clear();
    wait_for([&] {
      pool.ends(decode, 0);
      is_whole = pool.arrivals().is_complete(pool.ticket().id.number);
      return is_whole || !decode.failures.empty();
    });
    EXPECT_TRUE(!is_whole || pool.rows(0) == rows);
  }
  EXPECT_EQ(pool.pages().free(), Pool::kNumPages);
  EXPECT_EQ(decode.links->stats().lane_pieces_received, 0) << "the lane has not brought any page";
}

// The sender waits in the middle of a piece: the engine's end does not wait for it.
TEST(LandingsByTcp, AnEngineThatGoesBreaksOffWhatLands) {
  by = By::kTcp;
  constexpr int64_t kBytes = 32 << 20;
  const std::vector<std::byte> rows(kBytes, std::byte{1});  // lent as long as the server lives
  Server server({.page_bytes = kBytes, .window_bytes = 256 << 20});
  PrefillPeersOptions options;
  options.page_bytes = kBytes;
  Decode decode({server.server->endpoint()}, options);
  std::optional<Pool> pool(std::in_place, decode.mailbox, kBytes);
  const auto link = ordered(server, decode, pool->order());
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
