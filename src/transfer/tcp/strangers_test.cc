// What strangers at a transfer server's port can do, before and behind the handshake.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>

#include "transfer/tcp/fake_prefill.h"
#include "transfer/tcp/records.h"

namespace fathom {
namespace {

class Strangers : public OverEach {};
INSTANTIATE_TEST_SUITE_P(Each, Strangers, testing::Values(By::kTcp, By::kUcx), name_of_by);

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
        header_only(FrameType::kPiece, 72 + kPageBytes), proof_frame({}), facts_frame(kSharedFacts),
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
    right.send(facts_frame(kSharedFacts));
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
    connection.send(facts_frame(kSharedFacts));
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
