// Pieces between two lanes, both of this process and thread.
#include "transfer/ucx/ucx_lane.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <map>

namespace fathom {
namespace {

constexpr int64_t kPageBytes = 1 << 20;
constexpr uint64_t kKey = 77;

using Header = std::array<std::byte, kPieceHeaderBytes>;

Header header_of(uint8_t number) {
  Header header;
  header.fill(static_cast<std::byte>(number));
  return header;
}

std::vector<std::byte> rows_of(size_t bytes, uint8_t number) {
  std::vector<std::byte> rows(bytes);
  for (size_t i = 0; i < bytes; ++i) rows[i] = static_cast<std::byte>(i / 4096 * 7 + i + number);
  return rows;
}

// Handlers of signals that the library takes over. A sanitizer has some of them.
std::map<int, void (*)(int)> signal_handlers() {
  std::map<int, void (*)(int)> handlers;
  for (const int number : {SIGHUP, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    struct sigaction action {};
    EXPECT_EQ(sigaction(number, nullptr, &action), 0);
    handlers[number] = action.sa_handler;
  }
  return handlers;
}
// Before the library is loaded.
const auto kHandlersBefore = signal_handlers();

class UcxLanes : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto usable = check_ucx(); !usable) GTEST_SKIP() << usable.error().message;
    connect(kKey, kKey);
  }
  void connect(uint64_t one, uint64_t other) {
    sender = *make_ucx_lane(kPageBytes, one);
    receiver = *make_ucx_lane(kPageBytes, other);
    ASSERT_TRUE(receiver->connect(sender->address()).has_value());
    ASSERT_TRUE(sender->connect(receiver->address()).has_value());
  }
  // Both make progress until it is so; an error of the receiver ends it.
  Result<> run_until(const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) {
        return error(Code::kInternal, "nothing happens any more");
      }
      if (sender) {
        EXPECT_TRUE(sender->progress().has_value());
      }
      FATHOM_TRY(const bool has_more, receiver->progress());
      (void)has_more;
    }
    return {};
  }
  void send(uint8_t number, size_t bytes) {
    EXPECT_TRUE(sender->send(header_of(number), rows_of(bytes, number)).has_value());
  }

  Result<> receive() {
    rows.resize(receiver->offer()->bytes);
    return receiver->receive(rows);
  }

  std::unique_ptr<PieceLane> sender, receiver;
  std::vector<std::byte> rows;
};

TEST_F(UcxLanes, PiecesComeAsTheyWere) {
  uint8_t number = 0;
  EXPECT_FALSE(sender->send(header_of(1), {}).has_value()) << "a piece without rows";
  for (const size_t bytes : {size_t{1}, size_t{9}, size_t{4096}, size_t{589'824},
                             static_cast<size_t>(kPageBytes), size_t{100}}) {
    send(++number, bytes);
    ASSERT_TRUE(run_until([&] { return receiver->offer().has_value(); }).has_value());
    EXPECT_TRUE(sender->is_sending()) << "nobody has taken it";
    EXPECT_EQ(receiver->offer()->header, header_of(number));
    EXPECT_EQ(receiver->offer()->bytes, bytes);
    EXPECT_FALSE(receiver->has_received());
    ASSERT_TRUE(receive().has_value());
    EXPECT_FALSE(receiver->offer().has_value());
    ASSERT_TRUE(run_until([&] { return receiver->has_received(); }).has_value());
    EXPECT_EQ(rows, rows_of(bytes, number));
    EXPECT_FALSE(receiver->has_received()) << "once";
    ASSERT_TRUE(run_until([&] { return !sender->is_sending(); }).has_value());
  }
}

// After progress() has said that nothing is left, its descriptor tells when a piece has come.
TEST_F(UcxLanes, TheDescriptorTellsOfAPiece) {
  for (uint8_t number = 1; number < 10; ++number) {
    pollfd wait{.fd = receiver->event_fd(), .events = POLLIN, .revents = 0};
    // By UCX's TCP what the sender has sent may come a moment later.
    const auto is_silent = [&] {
      while (*receiver->progress() || *sender->progress()) {
      }
      return poll(&wait, 1, 0) == 0;
    };
    ASSERT_TRUE(run_until(is_silent).has_value());
    send(number, 10'000);
    while (!receiver->offer()) {
      while (*sender->progress()) {
      }
      // Behind what the receiver answers the sender has more to send.
      pollfd either[] = {wait, {.fd = sender->event_fd(), .events = POLLIN, .revents = 0}};
      ASSERT_GE(poll(either, 2, 120'000), 1);
      while (*receiver->progress()) {
      }
    }
    ASSERT_TRUE(receive().has_value());
    ASSERT_TRUE(run_until([&] { return receiver->has_received(); }).has_value());
    ASSERT_TRUE(run_until([&] { return !sender->is_sending(); }).has_value());
  }
}

TEST_F(UcxLanes, AnotherKeyIsRefused) {
  connect(kKey, kKey + 1);
  send(1, 1000);
  const auto ran = run_until([&] { return receiver->offer().has_value(); });
  ASSERT_FALSE(ran.has_value());
  EXPECT_NE(ran.error().message.find("not the other end's"), std::string::npos)
      << ran.error().message;
}

TEST_F(UcxLanes, MoreThanAPageIsRefused) {
  const auto large = *make_ucx_lane(2 * kPageBytes, kKey);
  ASSERT_TRUE(large->connect(receiver->address()).has_value());
  EXPECT_FALSE(large->send(header_of(1), rows_of(2 * kPageBytes + 1, 1)).has_value());
  EXPECT_TRUE(large->send(header_of(1), rows_of(kPageBytes + 1, 1)).has_value());
  const auto ran = run_until([&] {
    (void)*large->progress();
    return receiver->offer().has_value();
  });
  ASSERT_FALSE(ran.has_value());
  EXPECT_NE(ran.error().message.find("larger than a page"), std::string::npos)
      << ran.error().message;
}

TEST_F(UcxLanes, ASecondPieceIsRefused) {
  const auto second = *make_ucx_lane(kPageBytes, kKey);
  ASSERT_TRUE(second->connect(receiver->address()).has_value());
  send(1, 1000);
  ASSERT_TRUE(run_until([&] { return receiver->offer().has_value(); }).has_value());
  EXPECT_TRUE(second->send(header_of(2), rows_of(1000, 2)).has_value());
  const auto ran = run_until([&] {
    (void)*second->progress();
    return false;
  });
  ASSERT_FALSE(ran.has_value());
  EXPECT_NE(ran.error().message.find("before the one before it was taken"), std::string::npos)
      << ran.error().message;
}

// The sender goes when its piece is known and not read, and something else comes to lie where its
// rows were: the receiver never takes that. Its memory may be known from a piece before.
class UcxLanesAfter : public UcxLanes, public testing::WithParamInterface<uint8_t> {};
INSTANTIATE_TEST_SUITE_P(Pieces, UcxLanesAfter, testing::Values(0, 1));

TEST_P(UcxLanesAfter, ASenderThatHasGoneIsAnError) {
  for (uint8_t piece = 0; piece < GetParam(); ++piece) {
    send(2, kPageBytes);
    ASSERT_TRUE(run_until([&] { return receiver->offer().has_value(); }).has_value());
    ASSERT_TRUE(receive().has_value());
    ASSERT_TRUE(run_until([&] { return receiver->has_received(); }).has_value());
    ASSERT_TRUE(run_until([&] { return !sender->is_sending(); }).has_value());
  }
  send(1, kPageBytes);
  ASSERT_TRUE(run_until([&] { return receiver->offer().has_value(); }).has_value());
  sender = nullptr;
  std::vector<void*> others;
  for (int i = 0; i < 16; ++i) {
    void* const other =
        mmap(nullptr, kPageBytes + 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(other, MAP_FAILED);
    std::memset(other, 0x5A, kPageBytes + 8);
    others.push_back(other);
  }
  auto received = receive();
  if (received) received = run_until([&] { return receiver->has_received(); });
  EXPECT_FALSE(received.has_value());
  for (void* const other : others) munmap(other, kPageBytes + 8);
}

TEST_F(UcxLanes, AReceiverThatHasGoneIsNoHarm) {
  send(1, kPageBytes);
  ASSERT_TRUE(run_until([&] { return receiver->offer().has_value(); }).has_value());
  receiver = nullptr;
  for (int i = 0; i < 100; ++i) (void)sender->progress();
  sender = nullptr;
  connect(kKey, kKey);
  send(2, 1000);
  ASSERT_TRUE(run_until([&] { return receiver->offer().has_value(); }).has_value());
}

// The library's own handlers of signals are not left behind.
TEST_F(UcxLanes, SignalsAreAsBefore) { EXPECT_EQ(signal_handlers(), kHandlersBefore); }

}  // namespace
}  // namespace fathom
