#include "comm/framed_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace fathom {
namespace {

constexpr uint32_t kMagic = 0x4C43'4146;  // "FACL"

struct Header {
  uint32_t magic;
  uint32_t type;
  uint32_t bytes;
};

// Drops what has been used once it is the larger part.
void compact(std::vector<std::byte>& bytes, size_t& begin) {
  if (begin < bytes.size() / 2) return;
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(begin));
  begin = 0;
}

}  // namespace

Fd FramedConnection::release() {
  FATHOM_CHECK(!has_bytes_left(), "a connection with bytes left");
  return std::move(fd_);
}

void FramedConnection::queue(MessageType type, std::span<const std::byte> payload) {
  FATHOM_CHECK(payload.size() <= kMaxPayload, "a message of {} bytes", payload.size());
  const Header header{kMagic, static_cast<uint32_t>(type), static_cast<uint32_t>(payload.size())};
  const auto* begin = reinterpret_cast<const std::byte*>(&header);
  out_.insert(out_.end(), begin, begin + sizeof header);
  out_.insert(out_.end(), payload.begin(), payload.end());
}

bool FramedConnection::flush() {
  while (queued_bytes() > 0) {
    const ssize_t sent =
        send(fd_.get(), out_.data() + out_begin_, queued_bytes(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    out_begin_ += static_cast<size_t>(sent);
    compact(out_, out_begin_);
  }
  return true;
}

bool FramedConnection::fill() {
  constexpr size_t kChunk = 64 << 10;
  for (size_t total = 0; total < (1 << 20);) {
    const size_t before = in_.size();
    in_.resize(before + kChunk);
    const ssize_t got = recv(fd_.get(), in_.data() + before, kChunk, MSG_DONTWAIT);
    const int failed = errno;
    in_.resize(before + static_cast<size_t>(got > 0 ? got : 0));
    if (got == 0) return false;
    if (got < 0 && failed == EINTR) continue;
    if (got < 0) return failed == EAGAIN || failed == EWOULDBLOCK;
    total += static_cast<size_t>(got);
    total_received_ += static_cast<size_t>(got);
  }
  return true;
}

Result<std::optional<ControlMessage>> FramedConnection::next() {
  const std::span<const std::byte> have = std::span(in_).subspan(in_begin_);
  if (have.empty()) return std::nullopt;
  Header header{};
  // What is no message is refused at its first bytes: it may never send as many as a header has.
  std::memcpy(&header, have.data(), std::min(have.size(), sizeof header));
  if (std::memcmp(&header, &kMagic, std::min(have.size(), sizeof kMagic)) != 0) {
    return invalid("what came is no message of this protocol");
  }
  if (have.size() < sizeof header) return std::nullopt;
  if (header.bytes > max_payload_) {
    return error(Code::kTooLarge, "a message of {} bytes is longer than {}", header.bytes,
                 max_payload_);
  }
  if (have.size() < sizeof header + header.bytes) return std::nullopt;
  const auto payload = have.subspan(sizeof header, header.bytes);
  ControlMessage message{static_cast<MessageType>(header.type), {payload.begin(), payload.end()}};
  in_begin_ += sizeof header + header.bytes;
  compact(in_, in_begin_);
  return message;
}

}  // namespace fathom
