#include "transfer/tcp/frame.h"

#include <cstring>

namespace fathom {
namespace {

constexpr uint32_t kFrameMagic = 0x4654'6846;  // "FhTF"

struct WireFrame {
  uint32_t magic = kFrameMagic;
  uint32_t type = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(WireFrame) == kFrameHeaderBytes);

}  // namespace

void write_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> to) {
  const WireFrame wire{.type = static_cast<uint32_t>(header.type), .bytes = header.bytes};
  std::memcpy(to.data(), &wire, sizeof wire);
}

Result<FrameHeader> read_frame_header(std::span<const std::byte, kFrameHeaderBytes> from) {
  WireFrame wire;
  std::memcpy(&wire, from.data(), sizeof wire);
  if (wire.magic != kFrameMagic) return invalid("what came is no frame of this protocol");
  if (wire.type < static_cast<uint32_t>(FrameType::kHello) ||
      wire.type > static_cast<uint32_t>(FrameType::kLane)) {
    return invalid("a frame has type {}, known are {} to {}", wire.type,
                   static_cast<uint32_t>(FrameType::kHello),
                   static_cast<uint32_t>(FrameType::kLane));
  }
  return FrameHeader{static_cast<FrameType>(wire.type), wire.bytes};
}

}  // namespace fathom
