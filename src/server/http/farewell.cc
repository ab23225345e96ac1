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

Farewell::Time Farewell::deadline() const { return Clock::now() + state_.options.linger_timeout; }

void Farewell::tell(boost::asio::ip::tcp::socket socket) {
  boost::system::error_code failure;
  socket.native_non_blocking(true, failure);
  if (failure) return;
  const int descriptor = socket.native_handle();
  if (state_.tls == nullptr) {
    return answer({std::move(socket), make_plain_stream(descriptor), deadline()});
  }
  schedule();  // first: a sweep that threw has left handshakes behind
  if (handshaking_.size() >= kMostHandshakes) return;
  handshaking_.push_back({std::move(socket), state_.tls->make_stream(descriptor), deadline()});
}

void Farewell::answer(Leaving one) {
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
  const std::string_view part = text;
  const IoResult written = one.stream->write({&part, 1});
  if (written.status != IoStatus::kDone) return;
  ++state_.responses[5];  // before the client sees the end and asks for figures
  state_.bytes_sent += static_cast<int64_t>(written.bytes);
  one.stream->finish();
  if (leaving_.size() == kMostLeaving) {
    has_ended(leaving_.front());
    leaving_.pop_front();
  }
  one.until = deadline();
  leaving_.push_back(std::move(one));
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
  if (scheduled_) return;
  timer_.expires_after(kSweepInterval);
  timer_.async_wait([this](const boost::system::error_code& failure) {
    scheduled_ = false;
    if (!failure) sweep();
  });
  scheduled_ = true;
}

void Farewell::sweep() {
  const Time now = Clock::now();
  sweep_handshakes(now);
  std::erase_if(leaving_, [&](Leaving& one) { return has_ended(one) || now >= one.until; });
  if (!handshaking_.empty() || !leaving_.empty()) schedule();
}

void Farewell::sweep_handshakes(Time now) {
  for (auto one = handshaking_.begin(); one != handshaking_.end();) {
    const IoStatus status = one->stream->handshake().status;
    const bool waits = status == IoStatus::kWantRead || status == IoStatus::kWantWrite;
    if (waits && now < one->until) {
      ++one;
      continue;
    }
    Leaving ended = std::move(*one);
    one = handshaking_.erase(one);
    if (status == IoStatus::kDone) answer(std::move(ended));
  }
}

}  // namespace fathom::http
