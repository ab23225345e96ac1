#include "router/replica_call.h"

#include <array>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <utility>

namespace fathom::router {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

// A body that is taken away as it comes. Beast's string_body reserves what Content-Length says.
struct PassedBody {
  using value_type = std::string;
  class reader {
   public:
    template <bool isRequest, class Fields>
    reader(beast::http::header<isRequest, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<uint64_t>&, error_code& failure) { failure = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, error_code& failure) {
      failure = {};
      size_t bytes = 0;
      for (const auto buffer : beast::buffers_range_ref(buffers)) {
        body_.append(static_cast<const char*>(buffer.data()), buffer.size());
        bytes += buffer.size();
      }
      return bytes;
    }
    void finish(error_code& failure) { failure = {}; }

   private:
    value_type& body_;
  };
};

constexpr size_t kReadBytes = 16 << 10;
constexpr uint32_t kMostHeadBytes = 64 << 10;

}  // namespace

std::string_view name_of(CallFailure failure) {
  switch (failure) {
    case CallFailure::kNotConnected:
      return "not_connected";
    case CallFailure::kLost:
      return "lost";
    case CallFailure::kBroken:
      return "broken";
    case CallFailure::kBadReply:
      return "bad_reply";
    case CallFailure::kTooSlow:
      return "too_slow";
  }
  return "";
}

struct ReplicaCall::Reading {
  Reading() {
    parser.eager(true);
    parser.body_limit(boost::none);
    parser.header_limit(kMostHeadBytes);
  }
  beast::http::response_parser<PassedBody> parser;
  beast::flat_buffer buffer;
};

ReplicaCall::ReplicaCall(std::shared_ptr<ConnectionPool> pool, const CallLimits& limits,
                         std::string head, std::shared_ptr<const std::string> body, ReplySink& sink)
    : pool_(std::move(pool)),
      limits_(limits),
      head_(std::move(head)),
      body_(std::move(body)),
      sink_(&sink),
      reading_(std::make_unique<Reading>()) {}

ReplicaCall::~ReplicaCall() = default;

void ReplicaCall::start() {
  since_ = Clock::now();
  socket_ = pool_->take();
  if (socket_ != nullptr) {
    exchange();
  } else {
    connect();
  }
}

void ReplicaCall::connect() {
  socket_ = std::make_shared<Socket>(pool_->context());
  connecting_ = true;
  since_ = Clock::now();
  pool_->connect(socket_, [self = shared_from_this()](const error_code& failure) {
    if (self->sink_ == nullptr) {
      self->socket_.reset();  // cancelled while the name was being resolved
      return;
    }
    self->connecting_ = false;
    if (failure) return self->fail(CallFailure::kNotConnected, failure.message());
    self->exchange();
  });
}

// Sends the request, and reads meanwhile: a replica may answer before it has read everything.
void ReplicaCall::exchange() {
  const std::array<asio::const_buffer, 2> parts = {asio::buffer(head_), asio::buffer(*body_)};
  asio::async_write(
      *socket_, parts,
      [self = shared_from_this(), socket = socket_](const error_code& failure, size_t) {
        // What went wrong shows when the reply is read.
        if (!failure && socket == self->socket_) self->sent_ = true;
      });
  read();
}

void ReplicaCall::read() {
  if (read_pending_ || paused_ || sink_ == nullptr) return;
  read_pending_ = true;
  socket_->async_read_some(reading_->buffer.prepare(kReadBytes),
                           [self = shared_from_this()](const error_code& failure, size_t bytes) {
                             self->read_pending_ = false;
                             self->on_read(failure, bytes);
                           });
}

void ReplicaCall::on_read(const error_code& failure, size_t bytes) {
  if (sink_ == nullptr) return;
  if (failure) {
    if (in_reply_) {
      return fail(CallFailure::kBroken, failure == asio::error::eof
                                            ? "the replica closed the connection within its reply"
                                            : failure.message());
    }
    return fail(CallFailure::kLost, failure == asio::error::eof
                                        ? "the replica closed the connection without a reply"
                                        : failure.message());
  }
  in_reply_ = true;
  since_ = Clock::now();
  reading_->buffer.commit(bytes);
  parse();
}

void ReplicaCall::parse() {
  auto& [parser, buffer] = *reading_;
  while (buffer.size() > 0 && !parser.is_done()) {
    error_code failure;
    buffer.consume(parser.put(buffer.data(), failure));
    if (!has_head_ && parser.is_header_done()) {
      give_head();
      if (sink_ == nullptr) return;
    }
    if (!parser.get().body().empty()) {
      sink_->on_body(std::exchange(parser.get().body(), {}));
      if (sink_ == nullptr) return;
    }
    if (failure == beast::http::error::need_more) break;
    if (failure) {
      return fail(has_head_ ? CallFailure::kBroken : CallFailure::kBadReply,
                  "the reply is not valid HTTP: " + failure.message());
    }
  }
  if (parser.is_done()) return finish();
  read();
}

void ReplicaCall::give_head() {
  const auto& parser = reading_->parser;
  const auto& message = parser.get();
  // The end of a body without length is the end of the connection: a break looks the same.
  if (parser.need_eof()) return fail(CallFailure::kBadReply, "the reply has no length");
  if (message.result_int() < 200) {
    return fail(CallFailure::kBadReply,
                fmt::format("the reply has status {}", message.result_int()));
  }
  has_head_ = true;
  ReplyHead head{.status = static_cast<int>(message.result_int())};
  for (const auto& field : message) {
    head.headers.add(std::string(field.name_string()), std::string(field.value()));
  }
  if (const auto length = parser.content_length()) {
    head.content_length = static_cast<int64_t>(*length);
  }
  if (const std::string* type = head.headers.find("Content-Type")) {
    head.is_event_stream =
        http::equal_ignoring_case(std::string_view(*type).substr(0, 17), "text/event-stream");
  }
  sink_->on_head(std::move(head));
}

void ReplicaCall::finish() {
  ReplySink* const sink = std::exchange(sink_, nullptr);
  if (sent_ && reading_->parser.keep_alive() && reading_->buffer.size() == 0) {
    pool_->put(std::move(socket_));
  }
  socket_.reset();
  sink->on_end();
}

void ReplicaCall::fail(CallFailure failure, std::string_view what) {
  ReplySink* const sink = sink_;
  const std::string reason(what);
  cancel();
  sink->on_failure(failure, reason);
}

void ReplicaCall::cancel() {
  sink_ = nullptr;
  error_code ignored;
  if (socket_ != nullptr) socket_->close(ignored);
}

void ReplicaCall::pause() { paused_ = true; }

void ReplicaCall::resume() {
  if (!std::exchange(paused_, false) || sink_ == nullptr) return;
  since_ = Clock::now();
  read();
}

void ReplicaCall::check(std::chrono::steady_clock::time_point now) {
  if (sink_ == nullptr || paused_) return;
  if (connecting_ && now - since_ >= limits_.connect) {
    fail(CallFailure::kNotConnected, "connecting took too long");
  } else if (in_reply_ && now - since_ >= limits_.silence) {
    fail(CallFailure::kTooSlow, "the replica sent nothing for too long within its reply");
  }
}

}  // namespace fathom::router
