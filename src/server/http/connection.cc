#include "server/http/connection.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/post.hpp>
#include <utility>

#include "base/log.h"
#include "server/http/error_body.h"
#include "server/http/io_loop.h"
#include "server/http/log_text.h"
#include "server/http/response_head.h"

namespace fathom::http {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;

// Reads of up to 64 KiB before other connections get their turn.
constexpr int kReadsInARow = 16;
// Limit of unsent bytes that the kernel buffers for one connection. Without it the kernel accepts
// megabytes, and a client that does not read is noticed that much later.
const int kUnsentInKernel = 128 << 10;

std::string address_of(const asio::ip::tcp::socket& socket) {
  boost::system::error_code failure;
  const auto peer = socket.remote_endpoint(failure);
  if (failure) return "unknown";
  const std::string address = peer.address().to_string(failure);
  return peer.address().is_v6() ? fmt::format("[{}]:{}", address, peer.port())
                                : fmt::format("{}:{}", address, peer.port());
}

std::unique_ptr<ByteStream> make_stream(const TlsContext* tls, int descriptor) {
  return tls == nullptr ? make_plain_stream(descriptor) : tls->make_stream(descriptor);
}

// Response when there is no memory to build one.
#define FATHOM_OUT_OF_MEMORY                                                        \
  R"({"error":{"message":"out of memory","type":"unavailable_error","param":null,)" \
  R"("code":"unavailable"}})"
static_assert(sizeof(FATHOM_OUT_OF_MEMORY) - 1 == 98);
constexpr std::string_view kLastWords =
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    "Content-Length: 98\r\nConnection: close\r\nRetry-After: 1\r\n\r\n" FATHOM_OUT_OF_MEMORY;

// Calls the handler; an exception fails only this request.
void run_handler(const Route& route, Request request,
                 const std::shared_ptr<Exchange>& exchange) noexcept {
  // Declared outside `try`: destroying the responder answers the request.
  std::shared_ptr<Responder> responder;
  std::string id;
  const auto fail = [&](int status, std::string_view what) noexcept {
    try {
      log_error("http: request {}: the handler of {} threw: {}", id, route.pattern, for_log(what));
      if (responder->send(error_response(status, "the request failed", "internal_error"))) return;
    } catch (const std::bad_alloc&) {
    }
    exchange->give_up();
  };
  try {
    id = request.id;
    responder = std::make_shared<Responder>(exchange);
    if (responder->closed()) return;  // disconnected while the request waited for a worker
    route.handler(std::move(request), responder);
  } catch (const std::bad_alloc&) {
    exchange->give_up();
    log_error("http: request {}: out of memory in the handler of {}", id, route.pattern);
  } catch (const std::exception& failure) {
    fail(500, failure.what());
  }
}

}  // namespace

Connection::Connection(IoLoop& loop, asio::ip::tcp::socket socket, ConnectionCount count)
    : loop_(loop),
      count_(std::move(count)),
      socket_(std::move(socket)),
      peer_(address_of(socket_)),
      stream_(make_stream(loop.state().tls.get(), socket_.native_handle())) {}

Connection::~Connection() { release_body(); }

template <typename Step>
void Connection::guarded(Step step) {
  const auto self = shared_from_this();  // keeps the connection alive during step()
  if (state_ == State::kClosed) return;
  try {
    step();
  } catch (const std::exception& failure) {
    cut_off();
    log_error("http: connection closed: {}", for_log(failure.what()));
  }
}

void Connection::wait_readable() {
  if (waiting_readable_ || state_ == State::kClosed) return;
  waiting_readable_ = true;
  socket_.async_wait(asio::ip::tcp::socket::wait_read,
                     [self = shared_from_this()](const boost::system::error_code& failure) {
                       self->waiting_readable_ = false;
                       if (!failure) self->guarded([&] { self->on_readable(); });
                     });
}

void Connection::wait_writable() {
  if (waiting_writable_ || state_ == State::kClosed) return;
  waiting_writable_ = true;
  socket_.async_wait(asio::ip::tcp::socket::wait_write,
                     [self = shared_from_this()](const boost::system::error_code& failure) {
                       self->waiting_writable_ = false;
                       if (failure) return;
                       self->guarded([&] {
                         if (std::exchange(self->read_wants_write_, false)) self->on_readable();
                         if (!self->queue_.empty()) self->send_queued();
                       });
                     });
}

void Connection::start() {
  guarded([&] {
    socket_.non_blocking(true);
    // Both options are optimizations; a failure is harmless.
    boost::system::error_code ignored;
    socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
    setsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentInKernel,
               sizeof(kUnsentInKernel));
    const Time now = Clock::now();
    if (loop_.state().tls != nullptr) {
      state_ = State::kHandshake;
      deadline_ = now + loop_.state().options.header_timeout;
      limit_head();
      return on_handshake();
    }
    deadline_ = now + loop_.state().options.idle_timeout;
    wait_readable();
  });
}

void Connection::on_handshake() {
  switch (stream_->handshake().status) {
    case IoStatus::kDone:
      head_timer_.reset();
      state_ = State::kReading;
      deadline_ = Clock::now() + loop_.state().options.idle_timeout;
      return on_readable();
    case IoStatus::kWantRead:
      return wait_readable();
    case IoStatus::kWantWrite:
      read_wants_write_ = true;
      return wait_writable();
    default:
      return close(Ending::kClosedByClient);
  }
}

void Connection::on_readable() {
  if (state_ == State::kHandshake) return on_handshake();
  if (std::exchange(write_wants_read_, false)) send_queued();
  for (int i = 0; i < kReadsInARow; ++i) {
    if (!wants_input()) return;  // answer_next() resumes reading
    const std::span<char> scratch = loop_.scratch();
    const IoResult result = stream_->read(scratch);
    switch (result.status) {
      case IoStatus::kDone:
        loop_.state().bytes_received += static_cast<int64_t>(result.bytes);
        received({scratch.data(), result.bytes});
        break;
      case IoStatus::kWantRead:
        return wait_readable();
      case IoStatus::kWantWrite:
        read_wants_write_ = true;
        return wait_writable();
      case IoStatus::kEnd:
        return on_end();
      case IoStatus::kFailed:
        return close(Ending::kClosedByClient);
    }
  }
  asio::post(loop_.context(),
             [self = shared_from_this()] { self->guarded([&] { self->on_readable(); }); });
}

bool Connection::wants_input() const {
  if (state_ == State::kClosed || client_ended_) return false;
  return state_ != State::kAnswering || std::ssize(ahead_) < loop_.state().options.max_header_bytes;
}

void Connection::received(std::string_view bytes) {
  if (state_ == State::kReading) {
    advance(bytes);
  } else if (state_ == State::kAnswering) {
    ahead_.append(bytes);
  }
}

void Connection::on_end() {
  client_ended_ = true;
  if (state_ != State::kAnswering) return close(Ending::kClosedByClient);
  flush_news();  // may complete the response
  watch_half_closed();
}

// Detects whether a client that sent FIN has closed completely: sends the response's first bytes,
// or a keep-alive within a stream, and a closed client answers with RST.
void Connection::watch_half_closed() {
  if (state_ != State::kAnswering || answer_->ended) return;  // the rest is being sent
  socket_.async_wait(asio::ip::tcp::socket::wait_error,
                     [self = shared_from_this()](const boost::system::error_code& failure) {
                       if (failure) return;
                       self->guarded([&] { self->close(Ending::kClosedByClient); });
                     });
  if (answer_->is_stream) {
    queue_stream(answer_->keep_alive);
  } else if (!std::exchange(answer_->probed, true)) {
    queue_.append(kProbe);
  }
  send_queued();
}

// Continues with the next request after a response, first from pipelined input.
void Connection::answer_next() {
  state_ = State::kReading;
  deadline_ = Clock::now() + loop_.state().options.idle_timeout;
  if (advancing_) return;  // advance() continues
  if (!ahead_.empty()) advance(std::exchange(ahead_, {}));
  if (client_ended_ && state_ == State::kReading) return close(Ending::kClosedByClient);
  if (!waiting_readable_) on_readable();
}

// Parses requests from `bytes` until they are used up or a request is being answered.
void Connection::advance(std::string_view bytes) {
  advancing_ = true;
  while (state_ == State::kReading && !bytes.empty()) {
    if (reader_ == nullptr) {
      const ServerOptions& options = loop_.state().options;
      reader_ = std::make_unique<RequestReader>(RequestReader::Limits{
          options.max_header_bytes, options.max_headers, options.max_body_bytes});
    }
    const bool had_started = reader_->started();
    bytes.remove_prefix(reader_->feed(bytes));
    if (!had_started && reader_->started()) {
      deadline_ = Clock::now() + loop_.state().options.header_timeout;
    }
    if (reader_->stage() == RequestReader::Stage::kHeadDone) on_head(!bytes.empty());
    if (state_ != State::kReading || reader_ == nullptr) continue;  // refused
    if (reader_->stage() == RequestReader::Stage::kFailed) {
      refuse(error_response(reader_->failure().status, reader_->failure().message), true);
    } else if (reader_->stage() == RequestReader::Stage::kDone) {
      on_request();
    } else {
      account_body();
    }
  }
  advancing_ = false;
  if (state_ == State::kAnswering) ahead_.append(bytes);
  if (state_ == State::kReading && reader_ != nullptr && !reader_->started()) reader_.reset();
  const bool in_head = state_ == State::kReading && reader_ != nullptr &&
                       reader_->stage() == RequestReader::Stage::kHead;
  if (!in_head) {
    head_timer_.reset();
  } else if (head_timer_ == nullptr || head_timer_->expiry() != deadline_) {
    limit_head();
  }
}

// Sets the head's deadline as a timer of its own, because check_interval is too coarse. Few heads
// come in pieces.
void Connection::limit_head() {
  head_timer_ = std::make_unique<asio::steady_timer>(loop_.context(), deadline_);
  head_timer_->async_wait([self = weak_from_this()](const boost::system::error_code& failure) {
    const auto connection = self.lock();
    if (failure || connection == nullptr) return;
    connection->guarded([&] { connection->on_head_timeout(); });
  });
}

void Connection::on_head_timeout() {
  // A timer that had expired before it was destroyed still calls this.
  if (head_timer_ == nullptr || Clock::now() < deadline_) return;
  if (state_ == State::kHandshake) return close(Ending::kCutOff);
  refuse(error_response(408, fmt::format("the request's head took longer than {} ms",
                                         loop_.state().options.header_timeout.count())),
         true);
}

void Connection::on_head(bool more_bytes_are_here) {
  const RequestHead& head = reader_->head();
  ServerState& state = loop_.state();
  decision_ = state.dispatcher->decide(head, state.draining);
  if (decision_.refusal) {
    // The body is unread, so the connection cannot be reused.
    return refuse(std::move(*decision_.refusal), head.has_body || !head.keep_alive);
  }
  if (head.expects_continue && !more_bytes_are_here) {
    queue_.append(std::string_view("HTTP/1.1 100 Continue\r\n\r\n"));
    send_queued();
    if (state_ != State::kReading) return;
  }
  window_began_ = Clock::now();
  window_bytes_ = 0;
  reader_->read_body();
}

// Keeps the sum of all bodies being received within its limit.
void Connection::account_body() {
  ServerState& state = loop_.state();
  const int64_t more = std::ssize(reader_->body()) - counted_body_bytes_;
  counted_body_bytes_ += more;
  window_bytes_ += more;
  if ((state.body_bytes += more) > state.options.max_total_body_bytes) {
    Response response = error_response(
        503, "too many requests are being received at once; try again", "too_many_bytes");
    response.headers.add("Retry-After", "1");
    refuse(std::move(response), true);
  }
}

void Connection::release_body() {
  loop_.state().body_bytes -= std::exchange(counted_body_bytes_, 0);
}

void Connection::on_request() {
  if (const Gate& gate = decision_.route->gate) {
    if (auto refusal = gate()) return refuse(std::move(*refusal), !reader_->head().keep_alive);
  }
  begin_answer();
  RequestHead& head = reader_->head();
  answer_->close_after = !head.keep_alive || loop_.state().draining;
  Request request;
  request.id = answer_->id;
  request.method = std::move(head.method);
  request.path = std::move(decision_.target.path);
  request.path_parameters = std::move(decision_.path_parameters);
  request.query = std::move(decision_.target.query);
  request.headers = std::move(head.headers);
  request.body = std::move(reader_->body());
  request.caller = decision_.caller;
  request.peer = peer_;
  request.received = answer_->received;
  const Route& route = *decision_.route;
  reader_.reset();
  release_body();
  if (route.options.run_on == RunOn::kIoThread) {
    run_handler(route, std::move(request), answer_->exchange);
    flush_news();
  } else {
    // std::function needs a copyable callable.
    auto shared = std::make_shared<Request>(std::move(request));
    loop_.state().run_on_worker([&route, shared, exchange = answer_->exchange] {
      run_handler(route, std::move(*shared), exchange);
    });
  }
  if (client_ended_) watch_half_closed();
}

void Connection::check(Time now) {
  guarded([&] {
    switch (state_) {
      case State::kReading:
        return check_reading(now);
      case State::kAnswering:
        return check_answering(now);
      case State::kLingering:
        if (now >= deadline_) close(Ending::kCutOff);
        return;
      case State::kHandshake:  // limited by its own timer
      case State::kClosed:
        return;
    }
  });
}

void Connection::check_reading(Time now) {
  const ServerOptions& options = loop_.state().options;
  if (reader_ == nullptr || !reader_->started()) {
    if (now >= deadline_) close(Ending::kCutOff);
    return;
  }
  if (reader_->stage() == RequestReader::Stage::kHead) return;  // limited by its own timer
  if (now - window_began_ < options.body_timeout) return;
  const int64_t wanted = options.min_body_bytes_per_second * options.body_timeout.count() / 1000;
  if (window_bytes_ < wanted) {
    return refuse(
        error_response(408, fmt::format("only {} bytes of the request's body came in {} ms, the "
                                        "least is {}",
                                        window_bytes_, options.body_timeout.count(), wanted)),
        true);
  }
  window_began_ = now;
  window_bytes_ = 0;
}

void Connection::flush() {
  guarded([&] { flush_news(); });
}

void Connection::stop() {
  guarded([&] { close(Ending::kStopped); });
}

void Connection::start_lingering() {
  if (client_ended_) return close(Ending::kDelivered);
  stream_->finish();
  state_ = State::kLingering;
  deadline_ = Clock::now() + loop_.state().options.linger_timeout;
  ahead_.clear();
  wait_readable();
}

// Closes without allocating memory. A client that waits for a response, or is in the middle of a
// request, and was sent nothing gets a 503. Unread input may prevent it from arriving.
void Connection::cut_off() {
  const bool is_owed =
      state_ == State::kAnswering ? answer_->status == 0 : state_ == State::kReading && advancing_;
  if (is_owed && queue_.empty()) {
    const std::string_view words = without_probe(kLastWords);
    const IoResult result = stream_->write(std::span(&words, 1));
    if (answer_ != nullptr) answer_->status = 503;
    if (result.status == IoStatus::kDone) ++loop_.state().responses[5];
    stream_->finish();
  }
  close(Ending::kCutOff);
}

void Connection::close(Ending ending) {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  head_timer_.reset();
  if (answer_ != nullptr) end_answer(ending);
  boost::system::error_code ignored;
  socket_.close(ignored);
  loop_.remove(*this);
}

}  // namespace fathom::http
