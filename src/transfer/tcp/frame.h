// Frames: how records follow each other on a connection. A header of kFrameHeaderBytes, then as
// many bytes as it says. Little-endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace fathom {

// Values are part of the protocol.
enum class FrameType : uint32_t {
  kHello = 1,      // decode to prefill: protocol, kind of connection, nonce
  kChallenge = 2,  // prefill to decode: nonce
  kProof = 3,      // each to the other: it has the secret
  kRefused = 4,    // prefill to decode: one sentence, then the connection ends
  kFacts = 5,      // decode to prefill, control connection
  kWelcome = 6,    // prefill to decode
  kOrder = 7,      // decode to prefill
  kCancel = 8,     // decode to prefill
  kDone = 9,       // prefill to decode: all pieces of an order are sent
  kFailed = 10,    // prefill to decode: an order is given up
  kHeartbeat = 11,
  kPiece = 12,  // prefill to decode, data connection
  kLane =
      13,  // decode to prefill, data connection: pieces go by a lane to this address, or by none
};

struct FrameHeader {
  FrameType type{};
  uint64_t bytes = 0;  // behind the header
};

inline constexpr size_t kFrameHeaderBytes = 16;

void write_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> to);
// kInvalidArgument: no frame of this protocol. Says nothing about the length: the receiver knows
// how long a frame of this type may be.
Result<FrameHeader> read_frame_header(std::span<const std::byte, kFrameHeaderBytes> from);

}  // namespace fathom
