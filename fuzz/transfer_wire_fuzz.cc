// What comes at the transfer port: no bytes may do worse than an error, and a record that is read
// is written as the bytes that it was read from.
//
// Input: frames one after the other, as on a connection. A piece has a header and its rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"
#include "transfer/piece_wire.h"
#include "transfer/tcp/records.h"

namespace fathom {
namespace {

// Bytes of the longest order that a server with a context of 4,096 tokens takes.
constexpr uint64_t kMostBytes = kMaxOrderBytes + 4096 * sizeof(int32_t);

void expect_equal(const Frame& written, Payload read) {
  FATHOM_CHECK(written.size() == kFrameHeaderBytes + read.size(), "{} bytes of {}", written.size(),
               read.size());
  FATHOM_CHECK(read.empty() ||
                   std::memcmp(written.data() + kFrameHeaderBytes, read.data(), read.size()) == 0,
               "other bytes");
}

void read_record(FrameType type, Payload payload) {
  switch (type) {
    case FrameType::kHello:
      if (const auto hello = read_hello(payload)) expect_equal(hello_frame(*hello), payload);
      return;
    case FrameType::kChallenge:
      if (const auto nonce = read_challenge(payload)) {
        expect_equal(challenge_frame(*nonce), payload);
      }
      return;
    case FrameType::kProof:
      if (const auto proof = read_proof(payload)) expect_equal(proof_frame(*proof), payload);
      return;
    case FrameType::kRefused:
      if (const auto why = read_refused(payload)) expect_equal(refused_frame(*why), payload);
      return;
    case FrameType::kFacts:
      if (const auto facts = read_facts(payload)) {
        expect_equal(facts_frame(*facts), payload);
        FATHOM_CHECK(!first_difference(*facts, *facts), "facts differ from themselves");
      }
      return;
    case FrameType::kWelcome:
      if (const auto welcome = read_welcome(payload)) {
        expect_equal(welcome_frame(*welcome), payload);
      }
      return;
    case FrameType::kOrder:
      if (const auto order = read_order(payload)) {
        expect_equal(order_frame(*order), payload);
        const Ticket& ticket = order->ticket;
        FATHOM_CHECK(ticket.first_page >= 0 && ticket.num_pages >= 1 &&
                         ticket.first_page + ticket.num_pages ==
                             ceil_div(std::ssize(order->tokens), kPageSize),
                     "{} pages from {} on", ticket.num_pages, ticket.first_page);
      }
      return;
    case FrameType::kCancel:
    case FrameType::kDone:
      if (const auto id = read_ticket_id(payload)) expect_equal(cancel_frame(*id), payload);
      return;
    case FrameType::kFailed:
      if (const auto failed = read_failed(payload)) expect_equal(failed_frame(*failed), payload);
      return;
    case FrameType::kHeartbeat:
    case FrameType::kLane:  // an address of a library's
      return;
    case FrameType::kPiece:
      if (const auto piece = read_piece(payload)) {
        std::vector<std::byte> written;
        write_piece(piece->header, piece->rows, written);
        FATHOM_CHECK(written.size() == payload.size() &&
                         std::memcmp(written.data(), payload.data(), written.size()) == 0,
                     "another piece");
      }
      return;
  }
}

void run(Payload input) {
  while (input.size() >= kFrameHeaderBytes) {
    const auto header = read_frame_header(input.first<kFrameHeaderBytes>());
    if (!header || header->bytes > kMostBytes) return;
    input = input.subspan(kFrameHeaderBytes);
    const size_t bytes = std::min<size_t>(input.size(), header->bytes);
    read_record(header->type, input.first(bytes));
    input = input.subspan(bytes);
  }
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fathom::run(std::as_bytes(std::span(data, size)));
  return 0;
}
