#include "server/http/farewell.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "server/http/error_body.h"
#include "server/http/request_id.h"
#include "server/http/response_head.h"

namespace fathom::http {
namespace {

using Clock = std::chrono::steady_clock;

// Limit of lingering sockets, in addition to max_connections. Beyond it the oldest is closed early.
constexpr size_t kMostLeaving = 1024;
constexpr std::chrono::milliseconds kSweepInterval{20};
constexpr size_t kDroppedAtOnce = 64 << 10;
constexpr int kDropsInARow = 16;

}  // namespace

Farewell::Farewell(boost::asio::io_context& context, ServerState& state)
    : state_(state), timer_(context), scratch_(kDroppedAtOnce) {}

void Farewell::tell(boost::asio::ip::tcp::socket socket) {
  if (state_.tls != nullptr) return;
  const Response response = error_response(
      503, fmt::format("there are more than {} connections", state_.options.max_connections),
      "too_many_connections");
  const Headers headers{{"Retry-After", "1"}};
  const std::string id = make_request_id();
  std::string text;
  append_response_head(text, {.status = response.status,
                              .content_type = response.content_type,
                              .headers = headers,
                              .content_length = std::ssize(response.body),
                              .chunked = false,
                              .close = true,
                              .request_id = id,
                              .cors_origin = {}});
  text += response.body;
  // A new connection's send buffer has room for the whole response.
  const ssize_t sent =
      send(socket.native_handle(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return;
  shutdown(socket.native_handle(), SHUT_WR);
  ++state_.responses[5];
  state_.bytes_sent += sent;
  if (leaving_.size() == kMostLeaving) {
    has_ended(leaving_.front());
    leaving_.pop_front();
  }
  leaving_.push_back({std::move(socket), Clock::now() + state_.options.linger_timeout});
  schedule();
}

bool Farewell::has_ended(Leaving& one) {
  for (int i = 0; i < kDropsInARow; ++i) {
    const ssize_t count =
        recv(one.socket.native_handle(), scratch_.data(), scratch_.size(), MSG_DONTWAIT);
    if (count == 0) return true;
    if (count < 0) return errno != EAGAIN && errno != EINTR;
  }
  return false;
}

void Farewell::schedule() {
  if (std::exchange(scheduled_, true)) return;
  timer_.expires_after(kSweepInterval);
  timer_.async_wait([this](const boost::system::error_code& failure) {
    scheduled_ = false;
    if (!failure) sweep();
  });
}

void Farewell::sweep() {
  const auto now = Clock::now();
  std::erase_if(leaving_, [&](Leaving& one) { return has_ended(one) || now >= one.until; });
  if (!leaving_.empty()) schedule();
}

}  // namespace fathom::http
