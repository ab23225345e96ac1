// The records that frames carry, as bytes. What is malformed is an error, never read past its end,
// and costs no more memory than the frame had.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "transfer/piece_lane.h"
#include "transfer/piece_receiver.h"
#include "transfer/prompt_link.h"
#include "transfer/tcp/facts.h"
#include "transfer/tcp/frame.h"
#include "transfer/tcp/proof.h"

namespace fathom {

inline constexpr uint32_t kTransferProtocol = 4;

enum class StreamKind : uint32_t { kControl = 0, kData = 1 };

struct Hello {
  uint32_t protocol = kTransferProtocol;
  StreamKind kind = StreamKind::kControl;
  uint64_t session = 0;  // of a data connection: as the control connection's Welcome said
  Nonce nonce{};
};
struct Welcome {
  uint64_t session = 0;
  uint64_t engine = 0;  // the prefill server's
  // Address of the data connection's lane, on which pieces may pass beside it; empty: no lane.
  std::vector<std::byte> lane = {};
};

// Limits of the fields, in bytes and entries.
inline constexpr size_t kHelloBytes = 48, kMaxWelcomeBytes = 32 + kMaxLaneAddressBytes;
inline constexpr size_t kMaxFactsBytes = 16 << 10, kMaxFacts = 64;
inline constexpr size_t kMaxSentenceBytes = 1 << 10;
inline constexpr size_t kMaxSaltBytes = 256;
inline constexpr size_t kTicketIdBytes = 24;
// An order without its tokens; each token adds four bytes.
inline constexpr size_t kMaxOrderBytes = 512 + kMaxSaltBytes;
inline constexpr size_t kMaxFailedBytes = 64 + kMaxSentenceBytes;

// Each returns a whole frame.
using Frame = std::vector<std::byte>;
Frame hello_frame(const Hello& hello);
Frame challenge_frame(const Nonce& nonce);
Frame proof_frame(const Proof& proof);
Frame refused_frame(std::string_view why);
Frame facts_frame(const Facts& facts);
Frame welcome_frame(const Welcome& welcome);
Frame lane_frame(std::span<const std::byte> address);
Frame order_frame(const PromptOrder& order);
Frame cancel_frame(const TicketId& id);
Frame done_frame(const TicketId& id);
Frame failed_frame(const FailedOrder& failed);
Frame heartbeat_frame();

// Each reads what is behind a frame's header. kInvalidArgument: malformed, or a field is out of
// range.
using Payload = std::span<const std::byte>;
Result<Hello> read_hello(Payload payload);
Result<Nonce> read_challenge(Payload payload);
Result<Proof> read_proof(Payload payload);
Result<std::string> read_refused(Payload payload);
Result<Facts> read_facts(Payload payload);
Result<Welcome> read_welcome(Payload payload);
// An order whose ticket and tokens belong together: as many pages as the tokens have from the
// ticket's first one on.
Result<PromptOrder> read_order(Payload payload);
Result<TicketId> read_ticket_id(Payload payload);
Result<FailedOrder> read_failed(Payload payload);

}  // namespace fathom
