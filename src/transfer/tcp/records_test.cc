// Records and frames: what is written is read, what is cut off or altered is an error.
#include "transfer/tcp/records.h"

#include <gtest/gtest.h>

#include "base/random.h"

namespace fathom {
namespace {

Payload payload_of(const Frame& frame) { return Payload(frame).subspan(kFrameHeaderBytes); }

PromptOrder some_order() {
  PromptOrder order;
  order.ticket = {.id = {1, 2, 3},
                  .request = 4,
                  .first_page = 1,
                  .num_pages = 2,
                  .page_bytes = 1000,
                  .form = 5,
                  .digest_seed = 6};
  for (int i = 0; i < 130; ++i) order.tokens.push_back(i);
  order.cache_salt = "salt";
  order.priority = -3;
  return order;
}

TEST(Records, WhatIsWrittenIsRead) {
  Hello hello{.kind = StreamKind::kData, .session = 77};
  hello.nonce[31] = std::byte{9};
  const auto read = read_hello(payload_of(hello_frame(hello)));
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_EQ(read->protocol, kTransferProtocol);
  EXPECT_EQ(read->kind, StreamKind::kData);
  EXPECT_EQ(read->session, 77u);
  EXPECT_EQ(read->nonce, hello.nonce);

  const Facts facts = {{"a", "1"}, {"--b", ""}};
  EXPECT_EQ(*read_facts(payload_of(facts_frame(facts))), facts);
  const auto welcome = read_welcome(payload_of(welcome_frame({.session = 12, .engine = 13})));
  EXPECT_EQ(welcome->session, 12u);
  EXPECT_EQ(welcome->engine, 13u);
  EXPECT_TRUE(welcome->lane.empty());
  const std::vector<std::byte> lane(kMaxLaneAddressBytes, std::byte{5});
  EXPECT_EQ(read_welcome(payload_of(welcome_frame({.lane = lane})))->lane, lane);
  EXPECT_LE(payload_of(welcome_frame({.lane = lane})).size(), kMaxWelcomeBytes);
  const std::vector<std::byte> longer(kMaxLaneAddressBytes + 1);
  EXPECT_FALSE(read_welcome(payload_of(welcome_frame({.lane = longer}))).has_value());
  EXPECT_EQ(*read_refused(payload_of(refused_frame("no"))), "no");
  EXPECT_EQ(*read_ticket_id(payload_of(cancel_frame({1, 2, 3}))), (TicketId{1, 2, 3}));

  const PromptOrder order = some_order();
  const auto got = read_order(payload_of(order_frame(order)));
  ASSERT_TRUE(got.has_value()) << got.error().message;
  EXPECT_EQ(got->ticket.id, order.ticket.id);
  EXPECT_EQ(got->ticket.request, 4u);
  EXPECT_EQ(got->ticket.first_page, 1);
  EXPECT_EQ(got->ticket.num_pages, 2);
  EXPECT_EQ(got->ticket.page_bytes, 1000);
  EXPECT_EQ(got->ticket.form, 5u);
  EXPECT_EQ(got->ticket.digest_seed, 6u);
  EXPECT_EQ(got->tokens, order.tokens);
  EXPECT_EQ(got->cache_salt, "salt");
  EXPECT_EQ(got->priority, -3);

  const auto failed = read_failed(
      payload_of(failed_frame({{7, 8, 9}, {Code::kResourceExhausted, "the queue is full"}})));
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->ticket, (TicketId{7, 8, 9}));
  EXPECT_EQ(failed->why.code, Code::kResourceExhausted);
  EXPECT_EQ(failed->why.message, "the queue is full");
}

TEST(Records, FramesSayWhatFollows) {
  const Frame frame = order_frame(some_order());
  const auto header = read_frame_header(std::span(frame).first<kFrameHeaderBytes>());
  ASSERT_TRUE(header.has_value());
  EXPECT_EQ(header->type, FrameType::kOrder);
  EXPECT_EQ(header->bytes, frame.size() - kFrameHeaderBytes);
  EXPECT_LE(header->bytes, kMaxOrderBytes + 130 * sizeof(int32_t));
  Frame other = frame;
  other[0] ^= std::byte{1};
  EXPECT_FALSE(read_frame_header(std::span(other).first<kFrameHeaderBytes>()).has_value());
  for (const uint8_t type : {0, 14, 255}) {
    other = frame;
    other[4] = static_cast<std::byte>(type);
    EXPECT_FALSE(read_frame_header(std::span(other).first<kFrameHeaderBytes>()).has_value());
  }
}

// Every prefix of every record is malformed, and so is one byte more.
TEST(Records, CutOffRecordsAreErrors) {
  const auto expect_whole_only = [](const Frame& frame, const auto& read) {
    const Payload whole = payload_of(frame);
    for (size_t size = 0; size < whole.size(); ++size) {
      EXPECT_FALSE(read(whole.first(size)).has_value()) << size << " of " << whole.size();
    }
    std::vector<std::byte> longer(whole.begin(), whole.end());
    longer.push_back({});
    EXPECT_FALSE(read(longer).has_value());
  };
  expect_whole_only(hello_frame({}), read_hello);
  expect_whole_only(challenge_frame({}), read_challenge);
  expect_whole_only(proof_frame({}), read_proof);
  expect_whole_only(facts_frame({{"name", "value"}}), read_facts);
  expect_whole_only(welcome_frame({}), read_welcome);
  expect_whole_only(order_frame(some_order()), read_order);
  expect_whole_only(done_frame({1, 2, 3}), read_ticket_id);
  expect_whole_only(failed_frame({{1, 2, 3}, {Code::kInternal, "x"}}), read_failed);
}

// A length in a record is bounded by the record before anything is allocated.
TEST(Records, HugeLengthsAreErrors) {
  Frame frame = order_frame(some_order());
  const size_t tokens_at = frame.size() - 130 * sizeof(int32_t) - sizeof(uint64_t);
  for (size_t i = 0; i < 8; ++i) frame[tokens_at + i] = std::byte{0xff};
  EXPECT_FALSE(read_order(payload_of(frame)).has_value());
  Frame facts = facts_frame({});
  facts[kFrameHeaderBytes + 6] = std::byte{0x7f};
  EXPECT_FALSE(read_facts(payload_of(facts)).has_value());
}

TEST(Records, TicketsAndTokensBelongTogether) {
  const auto message = [](const auto& change) {
    PromptOrder order = some_order();
    change(order);
    const auto read = read_order(payload_of(order_frame(order)));
    return read ? std::string() : read.error().message;
  };
  EXPECT_EQ(message([](PromptOrder& order) { order.ticket.num_pages = 3; }),
            "a ticket for 3 pages from 1 on, its 130 tokens have 3");
  EXPECT_NE(message([](PromptOrder& order) { order.ticket.first_page = -1; }), "");
  EXPECT_NE(message([](PromptOrder& order) { order.ticket.first_page = INT64_MIN; }), "");
  EXPECT_NE(message([](PromptOrder& order) {
              order.ticket.first_page = INT64_MAX, order.ticket.num_pages = 4 - INT64_MAX;
            }),
            "");
  EXPECT_NE(message([](PromptOrder& order) { order.tokens.clear(); }), "");
  EXPECT_NE(message([](PromptOrder& order) { order.cache_salt = std::string(257, 'x'); }), "");
  EXPECT_EQ(message([](PromptOrder&) {}), "");
}

TEST(Proof, EachFieldCounts) {
  const Handshake handshake{.decode = random_nonce(), .prefill = random_nonce(), .kind = 0};
  const Proof proof = make_proof("a secret of the two", ProofOf::kDecode, handshake);
  EXPECT_TRUE(equal_proofs(proof, make_proof("a secret of the two", ProofOf::kDecode, handshake)));
  EXPECT_FALSE(equal_proofs(proof, make_proof("a secret of the tw0", ProofOf::kDecode, handshake)));
  EXPECT_FALSE(
      equal_proofs(proof, make_proof("a secret of the two", ProofOf::kPrefill, handshake)));
  for (int field = 0; field < 4; ++field) {
    Handshake other = handshake;
    if (field == 0) other.decode = random_nonce();
    if (field == 1) other.prefill = random_nonce();
    if (field == 2) other.kind = 1;
    if (field == 3) other.session = 1;
    EXPECT_FALSE(equal_proofs(proof, make_proof("a secret of the two", ProofOf::kDecode, other)));
  }
}

TEST(Facts, TheFirstDifferenceIsToldWithBothValues) {
  const Facts one = {{"model files", "a"}, {"--kv-cache-dtype", "fp8"}};
  EXPECT_FALSE(first_difference(one, one));
  EXPECT_EQ(*first_difference(one, {{"model files", "a"}, {"--kv-cache-dtype", "bf16"}}),
            "--kv-cache-dtype is 'fp8' on the decode side and 'bf16' on the prefill side");
  EXPECT_EQ(*first_difference(one, {{"model files", "a"}}),
            "--kv-cache-dtype is 'fp8' on the decode side and not told on the prefill side");
  EXPECT_EQ(*first_difference({}, one),
            "model files is not told on the decode side and 'a' on the prefill side");
}

}  // namespace
}  // namespace fathom
