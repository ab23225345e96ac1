// A transfer server and decode sides over loopback: orders and pieces, refusals, losses. The engine
// behind the server is a link of the test. What strangers can do: strangers_test.cc.
#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "transfer/tcp/fake_prefill.h"

namespace fathom {
namespace {

class Transfer : public OverEach {};
INSTANTIATE_TEST_SUITE_P(Each, Transfer, testing::Values(By::kTcp, By::kUcx), name_of_by);

TEST_P(Transfer, OrdersGoAndPiecesCome) {
  Server server;
  Decode decode({server.server->endpoint()});
  ASSERT_TRUE(decode.links->wait_until_tried(2min).has_value());
  decode.wait_ready();
  const PromptOrder order = Decode::order_of(1);
  ASSERT_TRUE(decode.links->order(order).has_value());
  EXPECT_TRUE(decode.links->holds(order.ticket.id));
  const auto link = server.link();
  wait_for([&] { return link->num_orders() == 1; });
  EXPECT_EQ(link->orders[0].tokens, order.tokens);
  for (int64_t page = 0; page < 3; ++page) {
    const auto rows = rows_of(page);
    EXPECT_TRUE(link->receiver->put(make_piece(order.ticket, page, rows, 64), lent(rows)));
  }
  link->receiver->done(order.ticket.id);
  decode.collect(3);
  std::map<int64_t, std::vector<std::byte>> by_page;
  for (const PagePiece& piece : decode.pieces) {
    EXPECT_EQ(piece.header.ticket, order.ticket.id);
    EXPECT_EQ(piece.header.cached_tokens, 64);
    by_page[piece.header.page] = piece.rows;
  }
  ASSERT_EQ(by_page.size(), 3u);
  for (const auto& [page, rows] : by_page) EXPECT_EQ(rows, rows_of(page));
  wait_for([&] { return !decode.links->holds(order.ticket.id); });
  decode.links->cancel(order.ticket.id);
  EXPECT_EQ(decode.links->stats().pieces_received, 3);
  EXPECT_EQ(decode.links->stats().lane_pieces_received, by == By::kUcx ? 3 : 0);
  EXPECT_EQ(decode.links->stats().bytes_received, 3 * kPageBytes);
  wait_for([&] { return server.server->stats().pieces_sent == 3; });
  EXPECT_EQ(link->num_cancelled(), 0u) << "it had ended";
}

TEST_P(Transfer, CancelsAndFailuresArrive) {
  Server server;
  Decode decode({server.server->endpoint()});
  decode.wait_ready();
  ASSERT_TRUE(decode.links->order(Decode::order_of(1)).has_value());
  ASSERT_TRUE(decode.links->order(Decode::order_of(2)).has_value());
  const auto link = server.link();
  wait_for([&] { return link->num_orders() == 2; });
  decode.links->cancel({1, 2, 1});
  wait_for([&] { return link->num_cancelled() == 1; });
  EXPECT_EQ(link->cancelled[0], (TicketId{1, 2, 1}));
  link->receiver->fail({{1, 2, 2}, {Code::kInternal, "a step failed"}});
  decode.collect(0, 1);
  EXPECT_EQ(decode.failures[0].ticket, (TicketId{1, 2, 2}));
  EXPECT_EQ(decode.failures[0].why.code, Code::kInternal);
  EXPECT_NE(decode.failures[0].why.message.find("a step failed"), std::string::npos);
  EXPECT_FALSE(decode.links->holds({1, 2, 2}));
}

// A full queue there is told, and for a while nothing more is sent there.
TEST_P(Transfer, AFullQueueIsPassedBy) {
  Server server;
  server.refusal = Status{Code::kResourceExhausted, "the queue is full"};
  Decode decode({server.server->endpoint()}, {.pause = 1h});
  decode.wait_ready();
  ASSERT_TRUE(decode.links->order(Decode::order_of(1)).has_value());
  decode.collect(0, 1);
  EXPECT_EQ(decode.failures[0].why.code, Code::kUnavailable) << "nobody else is there";
  const auto second = decode.links->order(Decode::order_of(2));
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, Code::kUnavailable);
}

// While the mailbox is full nothing is read, and while the window is full nothing is taken.
TEST_P(Transfer, BothWindowsAreBounded) {
  Server server({.window_bytes = 4 * kPageBytes});
  Decode decode({server.server->endpoint()}, {}, 2 * kPageBytes);
  decode.wait_ready();
  constexpr int64_t kPages = 6000;  // more than the kernel's buffers hold
  const PromptOrder order = Decode::order_of(1, 900);
  ASSERT_TRUE(decode.links->order(order).has_value());
  const auto link = server.link();
  wait_for([&] { return link->num_orders() == 1; });
  int64_t sent = 0, refusals = 0;
  std::thread sender([&] {
    while (sent < kPages) {
      const auto rows = rows_of(sent % 100);
      if (link->receiver->put(make_piece(order.ticket, sent, rows), lent(rows))) {
        ++sent;
      } else {
        ++refusals;
        std::this_thread::sleep_for(100us);
      }
    }
  });
  std::vector<bool> seen(kPages);
  int64_t came = 0;
  wait_for([&] {
    decode.mailbox->take(decode.news);
    EXPECT_LE(decode.news.pieces.size(), 2u);
    for (const PagePiece& piece : decode.news.pieces) {
      const int64_t page = piece.header.page;
      EXPECT_EQ(piece.rows, rows_of(page % 100));
      EXPECT_FALSE(seen[static_cast<size_t>(page)]);
      seen[static_cast<size_t>(page)] = true;
      ++came;
    }
    return came == kPages;
  });
  sender.join();
  EXPECT_GT(refusals, 0);
}

// Pages of 6 MiB, of which a socket takes a part at a time, lent from the test's memory.
struct LargePages {
  static constexpr int64_t kBytes = 6 << 20;

  LargePages()
      : server({.page_bytes = kBytes, .window_bytes = 256 << 20}),
        decode({server.server->endpoint()}, options(), 1) {
    decode.wait_ready();
    order.ticket.page_bytes = kBytes;
    EXPECT_TRUE(decode.links->order(order).has_value());
    link = server.link();
    wait_for([&] { return link->num_orders() == 1; });
    for (int64_t page = 0; page < order.ticket.num_pages; ++page) {
      pages.push_back(contents(page));
      loans.push_back(std::make_shared<LentRows>(std::span<const std::byte>(pages.back())));
      EXPECT_TRUE(
          link->receiver->put(make_piece(order.ticket, page, pages.back()), lend(loans.back())));
    }
  }
  static PrefillPeersOptions options() {
    PrefillPeersOptions options;
    options.page_bytes = kBytes;
    return options;
  }
  static std::vector<std::byte> contents(int64_t page) {
    std::vector<std::byte> bytes(kBytes);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(i / 8 * 31 + static_cast<size_t>(page));
    }
    return bytes;
  }
  bool all_are_back() const {
    return std::none_of(loans.begin(), loans.end(),
                        [](const auto& rows) { return rows->is_lent(); });
  }

  Server server;
  Decode decode;
  PromptOrder order = Decode::order_of(1, 900);  // 15 pages, more than the kernel's buffers hold
  std::shared_ptr<ScriptedLink> link;
  std::vector<std::vector<std::byte>> pages;
  std::vector<std::shared_ptr<LentRows>> loans;
};

TEST_P(Transfer, PagesThatNoSocketTakesAtOnce) {
  LargePages large;
  large.decode.collect(15);
  for (const PagePiece& piece : large.decode.pieces) {
    EXPECT_EQ(piece.rows, LargePages::contents(piece.header.page));
  }
  wait_for([&] { return large.all_are_back(); });
}

// Some are being sent, others wait: the decode side takes nothing yet.
TEST_P(Transfer, RowsThatAreRecalledArriveAsTheyWere) {
  LargePages large;
  for (const auto& rows : large.loans) rows->recall();
  for (auto& page : large.pages) std::fill(page.begin(), page.end(), std::byte{0xEE});
  EXPECT_FALSE(large.all_are_back());
  large.decode.collect(15);
  for (const PagePiece& piece : large.decode.pieces) {
    EXPECT_EQ(piece.rows, LargePages::contents(piece.header.page));
  }
}

TEST_P(Transfer, WhatIsLentGoesBackWhenTheSessionEnds) {
  LargePages large;
  EXPECT_FALSE(large.all_are_back());
  large.decode.links.reset();
  wait_for([&] { return large.all_are_back(); });
}

TEST_P(Transfer, AnOrderGoesToTheOneItPrefers) {
  Server first({.engine = 11}), second({.engine = 12});
  Decode decode({first.server->endpoint(), second.server->endpoint()});
  decode.wait_ready(2);
  const std::string ids[] = {"000000000000000b", "000000000000000c"};
  for (uint64_t number = 1; number <= 20; ++number) {
    PromptOrder order = Decode::order_of(number);
    order.prefer = ids[number % 2];
    if (number > 10) order.prefer = to_string((number % 2 ? second : first).server->endpoint());
    ASSERT_TRUE(decode.links->order(order).has_value());
  }
  wait_for([&] { return first.link()->num_orders() + second.link()->num_orders() == 20; });
  EXPECT_EQ(first.link()->num_orders(), 10u);
  for (const PromptOrder& order : first.link()->orders) EXPECT_EQ(order.ticket.id.number % 2, 0u);
  PromptOrder order = Decode::order_of(21);
  order.prefer = "one that is not there";
  EXPECT_TRUE(decode.links->order(order).has_value());
}

TEST_P(Transfer, OrdersOfALostSessionFailAndOthersTakeOver) {
  auto first = std::make_unique<Server>();
  Server second;
  Decode decode({first->server->endpoint(), second.server->endpoint()});
  decode.wait_ready(2);
  for (uint64_t number = 1; number <= 40; ++number) {
    PromptOrder order = Decode::order_of(number);
    order.tokens[0] = static_cast<int32_t>(number);  // so that both have some
    ASSERT_TRUE(decode.links->order(order).has_value());
  }
  const auto link = first->link();
  wait_for([&] { return link->num_orders() + second.link()->num_orders() == 40; });
  const size_t lost = link->num_orders();
  EXPECT_GT(lost, 5u);
  EXPECT_LT(lost, 35u);
  const Endpoint port = first->server->endpoint();
  first.reset();
  decode.collect(0, lost);
  for (const FailedOrder& failed : decode.failures) {
    EXPECT_EQ(failed.why.code, Code::kInternal) << "another one is there: " << failed.why.message;
    EXPECT_FALSE(decode.links->holds(failed.ticket));
  }
  decode.wait_ready(1);
  for (uint64_t number = 101; number <= 110; ++number) {
    PromptOrder order = Decode::order_of(number);
    order.tokens[0] = static_cast<int32_t>(number);
    ASSERT_TRUE(decode.links->order(order).has_value());
  }
  wait_for([&] { return second.link()->num_orders() == 40 - lost + 10; });
  TransferServerOptions again;
  again.listen.port = port.port;
  Server third(again);  // as the first one restarted
  decode.wait_ready(2);
  EXPECT_EQ(decode.links->stats().sessions_lost, 1);
}

// Prompts that begin alike come to the same server.
TEST_P(Transfer, BeginningsStayTogether) {
  Server one, other;
  Decode decode({one.server->endpoint(), other.server->endpoint()});
  decode.wait_ready(2);
  for (uint64_t number = 1; number <= 20; ++number) {
    PromptOrder order = Decode::order_of(number, 70 + static_cast<int64_t>(number) * 10);
    ASSERT_TRUE(decode.links->order(order).has_value());
  }
  wait_for([&] { return one.link()->num_orders() + other.link()->num_orders() == 20; });
  EXPECT_EQ(std::min(one.link()->num_orders(), other.link()->num_orders()), 0u);
}

TEST_P(Transfer, OtherModelsAreRefusedWithBothValues) {
  Server server;
  Decode decode({server.server->endpoint()},
                {.facts = {{"model files", "m"}, {"--kv-cache-dtype", "fp8"}}});
  const auto tried = decode.links->wait_until_tried(2min);
  ASSERT_FALSE(tried.has_value());
  EXPECT_NE(tried.error().message.find(
                "--kv-cache-dtype is 'fp8' on the decode side and 'bf16' on the prefill side"),
            std::string::npos)
      << tried.error().message;
  EXPECT_FALSE(decode.links->order(Decode::order_of(1)).has_value());
  EXPECT_GE(server.refused(ConnectionRefusal::kFacts), 1);
  EXPECT_EQ(server.server->stats().sessions, 0);
}

TEST_P(Transfer, AnotherSecretIsRefused) {
  Server server;
  Decode decode({server.server->endpoint()}, {.secret = "another of sixteen"});
  const auto tried = decode.links->wait_until_tried(2min);
  ASSERT_FALSE(tried.has_value());
  EXPECT_NE(tried.error().message.find("secrets"), std::string::npos) << tried.error().message;
  EXPECT_GE(server.refused(ConnectionRefusal::kSecret), 1);
}

// A lane that connects to anything, and fails before a piece has come.
class BrokenLane : public PieceLane {
 public:
  std::span<const std::byte> address() const override { return address_; }
  Result<> connect(std::span<const std::byte>) override { return {}; }
  int event_fd() const override { return event_.get(); }
  Result<bool> progress() override { return error(Code::kUnavailable, "it is broken"); }
  Result<> send(std::span<const std::byte, kPieceHeaderBytes>,
                std::span<const std::byte>) override {
    return {};
  }
  bool is_sending() const override { return false; }
  std::optional<Offer> offer() const override { return {}; }
  Result<> receive(std::span<std::byte>) override { return {}; }
  bool has_received() override { return false; }

 private:
  std::vector<std::byte> address_ = {std::byte{1}};
  Fd event_{eventfd(0, EFD_CLOEXEC)};
};

Result<std::unique_ptr<PieceLane>> make_broken_lane(int64_t, uint64_t) {
  return std::make_unique<BrokenLane>();
}

Result<std::unique_ptr<PieceLane>> make_no_lane(int64_t, uint64_t) {
  return error(Code::kUnavailable, "there is none");
}

class Lanes : public testing::Test {
 protected:
  void SetUp() override { by = By::kTcp; }
  static void expect_a_piece_by_tcp(Server& server, Decode& decode) {
    const PromptOrder order = Decode::order_of(1, 60);
    wait_for([&] { return decode.links->order(order).has_value(); });
    std::shared_ptr<ScriptedLink> link;
    wait_for([&] {
      const std::lock_guard lock(server.mutex);
      link = server.links.back();
      return link->num_orders() == 1;
    });
    const auto rows = rows_of(1);
    EXPECT_TRUE(link->receiver->put(make_piece(order.ticket, 0, rows), lent(rows)));
    decode.collect(1);
    EXPECT_EQ(decode.links->stats().lane_pieces_received, 0);
  }
};

TEST_F(Lanes, WithoutOneOnEitherSidePiecesGoByTcp) {
  const std::vector<std::pair<MakeLane, MakeLane>> sides = {{make_broken_lane, nullptr},
                                                            {nullptr, make_broken_lane},
                                                            {make_no_lane, make_broken_lane},
                                                            {make_broken_lane, make_no_lane}};
  for (const auto& [theirs, ours] : sides) {
    Server server({.make_lane = theirs});
    Decode decode({server.server->endpoint()}, {.make_lane = ours});
    decode.wait_ready();
    expect_a_piece_by_tcp(server, decode);
  }
}

TEST_F(Lanes, AfterOneThatFailsPiecesGoByTcp) {
  Server server({.make_lane = make_broken_lane});
  Decode decode({server.server->endpoint()}, {.make_lane = make_broken_lane});
  wait_for([&] {
    const std::lock_guard lock(server.mutex);
    return server.links.size() == 2;
  });
  decode.wait_ready();
  expect_a_piece_by_tcp(server, decode);
}

TEST_F(Lanes, OneThatIsDemandedIsNoneOrRefused) {
  {
    Server server;
    Decode decode({server.server->endpoint()}, {.make_lane = make_broken_lane, .needs_lane = true});
    const auto tried = decode.links->wait_until_tried(2min);
    ASSERT_FALSE(tried.has_value());
    EXPECT_NE(tried.error().message.find("'ucx' on the decode side"), std::string::npos)
        << tried.error().message;
  }
  Server server({.make_lane = make_broken_lane, .needs_lane = true});
  Decode decode({server.server->endpoint()});
  wait_for([&] { return server.refused(ConnectionRefusal::kFacts) > 0; });
  wait_for([&] { return decode.links->stats().refused > 0; });
}

}  // namespace
}  // namespace fathom
