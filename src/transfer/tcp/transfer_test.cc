// A transfer server and decode sides over loopback: orders and pieces, what strangers at the port
// can do, losses. The engine behind the server is a link of the test.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "cache/latent_layout.h"
#include "transfer/piece_wire.h"
#include "transfer/tcp/prefill_peers.h"
#include "transfer/tcp/records.h"
#include "transfer/tcp/transfer_server.h"
#include "transfer/ucx/ucx_lane.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kPageBytes = 4096;
const Facts kFacts = {{"model files", "m"}, {"--kv-cache-dtype", "bf16"}};
constexpr char kSecret[] = "a secret of sixteen";

// How pieces go in this test.
enum class By { kTcp, kUcx };
By by = By::kTcp;

std::string name_of_by(const testing::TestParamInfo<By>& info) {
  return info.param == By::kTcp ? "tcp" : "ucx";
}

class OverEach : public testing::TestWithParam<By> {
 protected:
  void SetUp() override {
    by = GetParam();
    if (by == By::kTcp) return;
    if (const auto usable = check_ucx(); !usable) GTEST_SKIP() << usable.error().message;
  }
};
class Transfer : public OverEach {};
class Strangers : public OverEach {};
INSTANTIATE_TEST_SUITE_P(Each, Transfer, testing::Values(By::kTcp, By::kUcx), name_of_by);
INSTANTIATE_TEST_SUITE_P(Each, Strangers, testing::Values(By::kTcp, By::kUcx), name_of_by);

// Waits for what other threads do, however long they take.
void wait_for(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + 2min;
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(1ms);
  }
}

// Takes orders and does with them what the test says.
class ScriptedLink : public PromptLink {
 public:
  explicit ScriptedLink(std::shared_ptr<PieceReceiver> the_receiver)
      : receiver(std::move(the_receiver)) {}

  Result<> order(PromptOrder order) override {
    const std::lock_guard lock(mutex);
    if (refusal) return tl::unexpected(*refusal);
    orders.push_back(std::move(order));
    return {};
  }
  void cancel(const TicketId& id) override {
    const std::lock_guard lock(mutex);
    cancelled.push_back(id);
  }
  bool holds(const TicketId&) override { return true; }

  size_t num_orders() {
    const std::lock_guard lock(mutex);
    return orders.size();
  }
  size_t num_cancelled() {
    const std::lock_guard lock(mutex);
    return cancelled.size();
  }

  const std::shared_ptr<PieceReceiver> receiver;
  std::mutex mutex;
  std::vector<PromptOrder> orders;
  std::vector<TicketId> cancelled;
  std::optional<Status> refusal;
};

std::vector<std::byte> rows_of(int64_t page) {
  return std::vector<std::byte>(kPageBytes, static_cast<std::byte>(page));
}

std::shared_ptr<LentRows> lent(const std::vector<std::byte>& rows) {
  return lend(std::make_shared<LentRows>(rows));
}

// A server whose sessions' links the test has.
struct Server {
  explicit Server(TransferServerOptions options = {}) {
    options.listen = {.host = "127.0.0.1", .port = options.listen.port};
    options.secret = kSecret;
    options.facts = kFacts;
    options.form = 7;
    if (options.page_bytes == 0) options.page_bytes = kPageBytes;
    options.max_tokens = 1000;
    if (by == By::kUcx && !options.make_lane) options.make_lane = make_ucx_lane;
    auto created = TransferServer::create(options, [this](std::shared_ptr<PieceReceiver> receiver) {
      const std::lock_guard lock(mutex);
      auto link = std::make_shared<ScriptedLink>(std::move(receiver));
      if (refusal) link->refusal = refusal;
      links.push_back(link);
      return link;
    });
    EXPECT_TRUE(created.has_value()) << created.error().message;
    server = std::move(*created);
  }
  std::shared_ptr<ScriptedLink> link(size_t number = 0) {
    wait_for([&] {
      const std::lock_guard lock(mutex);
      return links.size() > number;
    });
    const std::lock_guard lock(mutex);
    return links[number];
  }
  int64_t refused(ConnectionRefusal reason) const {
    return server->stats().refused[static_cast<size_t>(reason)];
  }

  std::mutex mutex;
  std::vector<std::shared_ptr<ScriptedLink>> links;
  std::optional<Status> refusal;
  std::unique_ptr<TransferServer> server;
};

struct Decode {
  explicit Decode(std::vector<Endpoint> peers, PrefillPeersOptions options = {},
                  int64_t window = 1 << 20)
      : mailbox(std::make_shared<PieceMailbox>(window)) {
    options.peers = std::move(peers);
    if (options.secret.empty()) options.secret = kSecret;
    if (options.facts.empty()) options.facts = kFacts;
    if (options.page_bytes == 0) options.page_bytes = kPageBytes;
    options.retry_most = 200ms;
    if (by == By::kUcx && !options.make_lane) options.make_lane = make_ucx_lane;
    links = std::make_unique<PrefillPeers>(options, mailbox);
  }
  void wait_ready(int64_t count = 1) {
    wait_for([&] { return links->stats().ready == count; });
  }
  static PromptOrder order_of(uint64_t number, int64_t tokens = 130) {
    PromptOrder order;
    order.ticket = {.id = {1, 2, number},
                    .request = number,
                    .num_pages = (tokens + kPageSize - 1) / kPageSize,
                    .page_bytes = kPageBytes,
                    .form = 7};
    for (int64_t i = 0; i < tokens; ++i) order.tokens.push_back(static_cast<int32_t>(i));
    return order;
  }
  // What has come since the last call, after at least so much has.
  void collect(size_t num_pieces, size_t num_failures = 0) {
    wait_for([&] {
      mailbox->take(news);
      for (const PagePiece& piece : news.pieces) pieces.push_back(piece);
      for (const FailedOrder& failed : news.failures) failures.push_back(failed);
      return pieces.size() >= num_pieces && failures.size() >= num_failures;
    });
  }

  std::shared_ptr<PieceMailbox> mailbox;
  std::unique_ptr<PrefillPeers> links;
  PieceMailbox::News news;
  std::vector<PagePiece> pieces;
  std::vector<FailedOrder> failures;
};

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
  Result<> receive(std::vector<std::byte>&) override { return {}; }
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

// Bytes at the server's port, as a stranger may send them.
class Stranger {
 public:
  explicit Stranger(const Endpoint& endpoint) {
    auto connected = connect_to(endpoint, std::chrono::steady_clock::now() + 1min);
    EXPECT_TRUE(connected.has_value());
    fd_ = std::move(*connected);
  }
  void send(Payload bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) {
        bytes = bytes.subspan(static_cast<size_t>(sent));
      } else if (errno == EAGAIN) {
        std::this_thread::sleep_for(1ms);
      } else {
        return;  // it was closed
      }
    }
  }
  // All that comes until so many bytes have, or the end.
  std::vector<std::byte> receive(size_t most) const {
    std::vector<std::byte> all;
    while (all.size() < most) {
      pollfd wait{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      if (poll(&wait, 1, 120'000) != 1) break;
      std::byte buffer[4096];
      const ssize_t got =
          recv(fd_.get(), buffer, std::min(sizeof buffer, most - all.size()), MSG_DONTWAIT);
      if (got <= 0) break;
      all.insert(all.end(), buffer, buffer + got);
    }
    return all;
  }
  bool is_closed() const { return receive(1 << 20).size() < (1 << 20); }

 private:
  Fd fd_;
};

Frame header_only(FrameType type, uint64_t bytes) {
  Frame frame(kFrameHeaderBytes);
  write_frame_header({type, bytes}, std::span(frame).first<kFrameHeaderBytes>());
  return frame;
}

TEST_P(Strangers, GarbageAndHugeLengthsAreClosedAtOnce) {
  Server server;
  Decode decode({server.server->endpoint()});
  decode.wait_ready();
  const Frame garbage(100, std::byte{0x47});
  int64_t count = 0;
  for (const Frame& frame :
       {garbage, header_only(FrameType::kHello, uint64_t{1} << 60),
        header_only(FrameType::kHello, kHelloBytes + 1), header_only(FrameType::kOrder, 100),
        header_only(FrameType::kPiece, 72 + kPageBytes), proof_frame({}), facts_frame(kFacts),
        order_frame(Decode::order_of(1)), welcome_frame({})}) {
    const Stranger stranger(server.server->endpoint());
    stranger.send(frame);
    EXPECT_TRUE(stranger.is_closed());
    ++count;
    wait_for([&] { return server.refused(ConnectionRefusal::kMalformed) == count; });
  }
  EXPECT_EQ(decode.links->stats().ready, 1) << "others are not disturbed";
  EXPECT_EQ(server.link()->num_orders(), 0u);
}

// A recorded handshake of the right decode side, sent once more.
TEST_P(Strangers, ARecordedHandshakeProvesNothing) {
  Server server;
  Handshake handshake{.decode = random_nonce(), .prefill = {}, .kind = 0};
  const Frame hello = hello_frame({.nonce = handshake.decode});
  Frame proof;
  {
    const Stranger right(server.server->endpoint());
    right.send(hello);
    const auto challenge = right.receive(kFrameHeaderBytes + 32);
    ASSERT_EQ(challenge.size(), kFrameHeaderBytes + 32);
    handshake.prefill = *read_challenge(Payload(challenge).subspan(kFrameHeaderBytes));
    proof = proof_frame(make_proof(kSecret, ProofOf::kDecode, handshake));
    right.send(proof);
    const auto theirs = right.receive(kFrameHeaderBytes + 32);
    ASSERT_EQ(theirs.size(), kFrameHeaderBytes + 32);
    EXPECT_TRUE(equal_proofs(*read_proof(Payload(theirs).subspan(kFrameHeaderBytes)),
                             make_proof(kSecret, ProofOf::kPrefill, handshake)));
    right.send(facts_frame(kFacts));
    wait_for([&] { return server.server->stats().sessions == 1; });
  }
  const Stranger stranger(server.server->endpoint());
  stranger.send(hello);
  EXPECT_EQ(stranger.receive(kFrameHeaderBytes + 32).size(), kFrameHeaderBytes + 32);
  stranger.send(proof);
  const auto answer = stranger.receive(1 << 20);
  ASSERT_GE(answer.size(), kFrameHeaderBytes);
  EXPECT_EQ(read_frame_header(std::span(answer).first<kFrameHeaderBytes>())->type,
            FrameType::kRefused);
  EXPECT_EQ(server.refused(ConnectionRefusal::kSecret), 1);
}

TEST_P(Strangers, ManyThatSayNothingAreBounded) {
  Server server({.max_handshakes = 3, .handshake_limit = 1h});
  std::vector<std::unique_ptr<Stranger>> strangers;
  strangers.reserve(8);
  for (int i = 0; i < 8; ++i) {
    strangers.push_back(std::make_unique<Stranger>(server.server->endpoint()));
  }
  wait_for([&] { return server.refused(ConnectionRefusal::kTooMany) == 5; });
  for (size_t i = 3; i < strangers.size(); ++i) EXPECT_TRUE(strangers[i]->is_closed());
  EXPECT_EQ(server.refused(ConnectionRefusal::kTimeout), 0);
}

TEST_P(Strangers, ThoseThatSayNothingTimeOut) {
  Server server({.max_handshakes = 3, .handshake_limit = 300ms});
  std::vector<std::unique_ptr<Stranger>> strangers;
  strangers.reserve(3);
  for (int i = 0; i < 3; ++i) {
    strangers.push_back(std::make_unique<Stranger>(server.server->endpoint()));
  }
  for (const auto& stranger : strangers) EXPECT_TRUE(stranger->is_closed());
  wait_for([&] { return server.refused(ConnectionRefusal::kTimeout) == 3; });
  Decode decode({server.server->endpoint()});
  decode.wait_ready();
}

// One that has the secret, and then breaks the rules.
struct Insider {
  explicit Insider(const Endpoint& endpoint) : connection(endpoint) {
    Handshake handshake{.decode = random_nonce(), .prefill = {}, .kind = 0};
    connection.send(hello_frame({.nonce = handshake.decode}));
    const auto challenge = connection.receive(kFrameHeaderBytes + 32);
    handshake.prefill = *read_challenge(Payload(challenge).subspan(kFrameHeaderBytes));
    connection.send(proof_frame(make_proof(kSecret, ProofOf::kDecode, handshake)));
    connection.receive(kFrameHeaderBytes + 32);
    connection.send(facts_frame(kFacts));
    connection.receive(kFrameHeaderBytes + 8);
  }
  Stranger connection;
};

TEST_P(Strangers, RulesAreKeptBehindTheHandshakeToo) {
  Server server;
  size_t number = 0;
  const auto expect_end = [&](const std::vector<Frame>& frames, size_t orders) {
    const Insider insider(server.server->endpoint());
    const auto link = server.link(number++);
    for (const Frame& frame : frames) insider.connection.send(frame);
    EXPECT_TRUE(insider.connection.is_closed());
    wait_for([&] { return server.server->stats().sessions == 0; });
    EXPECT_EQ(link->num_orders(), orders);
    wait_for([&] { return link->num_cancelled() == orders; });
  };
  const Frame order = order_frame(Decode::order_of(1));
  expect_end({order, order}, 1);  // the ticket is ordered twice
  PromptOrder other = Decode::order_of(1);
  other.ticket.form = 8;
  expect_end({order_frame(other)}, 0);
  other = Decode::order_of(1);
  other.ticket.page_bytes = kPageBytes / 2;
  expect_end({order_frame(other)}, 0);
  other = Decode::order_of(1);
  other.ticket.num_pages = 4;
  expect_end({order_frame(other)}, 0);
  expect_end({header_only(FrameType::kOrder, 1 << 20)}, 0);  // more than 1,000 tokens have
  expect_end({header_only(FrameType::kPiece, 72 + kPageBytes)}, 0);
  expect_end({order, cancel_frame({1, 2, 1}), cancel_frame({1, 2, 1}), hello_frame({})}, 1);
}

// A decode side that orders and then reads nothing: what waits for it is bounded, and it is let go.
TEST_P(Strangers, OneThatDoesNotReadIsLetGo) {
  Server server({.window_bytes = 8 * kPageBytes, .silence_limit = 500ms});
  const Insider insider(server.server->endpoint());
  insider.connection.send(order_frame(Decode::order_of(1)));
  const auto link = server.link();
  wait_for([&] { return link->num_orders() == 1; });
  const auto rows = rows_of(0);
  const Ticket ticket = Decode::order_of(1).ticket;
  int taken = 0;
  while (link->receiver->put(make_piece(ticket, 0, rows), lent(rows))) ++taken;
  EXPECT_LE(taken, 8);
  wait_for([&] { return link->num_cancelled() == 1; });
  EXPECT_EQ(server.server->stats().sessions, 0);
  EXPECT_FALSE(link->receiver->put(make_piece(ticket, 0, rows), lent(rows))) << "nobody is there";
}

// The receiver's side: a server that sends what was not ordered, or another size.
TEST_P(Strangers, PiecesThatNobodyOrderedAreDropped) {
  Server server;
  Decode decode({server.server->endpoint()});
  decode.wait_ready();
  ASSERT_TRUE(decode.links->order(Decode::order_of(1)).has_value());
  const auto link = server.link();
  wait_for([&] { return link->num_orders() == 1; });
  const auto rows = rows_of(0);
  link->receiver->put(make_piece(Decode::order_of(99).ticket, 0, rows), lent(rows));
  link->receiver->put(make_piece(Decode::order_of(1).ticket, 0, rows), lent(rows));
  decode.collect(1);
  EXPECT_EQ(decode.pieces[0].header.ticket, (TicketId{1, 2, 1}));
  wait_for([&] { return decode.links->stats().foreign_pieces == 1; });
  const std::vector<std::byte> longer(kPageBytes + 1);
  Ticket ticket = Decode::order_of(1).ticket;
  ticket.page_bytes = kPageBytes + 1;
  link->receiver->put(make_piece(ticket, 1, longer), lent(longer));
  decode.collect(1, 1);
  EXPECT_EQ(decode.failures[0].ticket, (TicketId{1, 2, 1})) << "the session ended";
}

}  // namespace
}  // namespace fathom
