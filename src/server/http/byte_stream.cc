#include "server/http/byte_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace fathom::http {
namespace {

class PlainStream : public ByteStream {
 public:
  explicit PlainStream(int descriptor) : descriptor_(descriptor) {}

  IoResult handshake() override { return {IoStatus::kDone, 0}; }

  IoResult read(std::span<char> into) override {
    const ssize_t count = recv(descriptor_, into.data(), into.size(), 0);
    if (count == 0) return {IoStatus::kEnd, 0};
    return result(count, IoStatus::kWantRead);
  }

  IoResult write(std::span<const std::string_view> parts) override {
    iovec vectors[16];
    const size_t count = std::min(parts.size(), std::size(vectors));
    for (size_t i = 0; i < count; ++i) {
      vectors[i] = {const_cast<char*>(parts[i].data()), parts[i].size()};  // sendmsg only reads
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    return result(sendmsg(descriptor_, &message, MSG_NOSIGNAL), IoStatus::kWantWrite);
  }

  void finish() override { shutdown(descriptor_, SHUT_WR); }

 private:
  static IoResult result(ssize_t count, IoStatus if_it_would_block) {
    if (count > 0) return {IoStatus::kDone, static_cast<size_t>(count)};
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return {if_it_would_block, 0};
    return {IoStatus::kFailed, 0};
  }

  const int descriptor_;
};

}  // namespace

std::unique_ptr<ByteStream> make_plain_stream(int descriptor) {
  return std::make_unique<PlainStream>(descriptor);
}

}  // namespace fathom::http
