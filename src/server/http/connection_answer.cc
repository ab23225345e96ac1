// The sending half of Connection; connection.cc has the receiving half.
#include <fmt/format.h>

#include <array>
#include <new>
#include <optional>
#include <span>
#include <utility>

#include "base/log.h"
#include "server/http/connection.h"
#include "server/http/io_loop.h"
#include "server/http/log_text.h"
#include "server/http/request_id.h"
#include "server/http/response_head.h"

namespace fathom::http {
namespace {

using Clock = std::chrono::steady_clock;

bool has_no_body(int status) { return status < 200 || status == 204 || status == 304; }

}  // namespace

// Starts the response to what the reader holds, a complete request or the beginning of an invalid
// one. Exactly one response is sent from here on.
void Connection::begin_answer() {
  auto answer = std::make_unique<Answer>();
  answer->exchange = std::make_shared<Exchange>(loop_.outbox(), this);
  answer->received = Clock::now();
  answer->last_queued = answer->received;
  if (reader_ != nullptr && !reader_->head().method.empty()) {
    const RequestHead& head = reader_->head();
    const std::string* id = head.headers.find("X-Request-Id");
    if (id != nullptr && is_valid_request_id(*id)) answer->id = *id;
    answer->method = head.method;
    answer->path = head.target.substr(0, head.target.find('?'));
    answer->cors_origin = loop_.state().dispatcher->cors_origin(head.headers);
    answer->http10 = head.minor_version == 0;
    answer->head_only = head.method == "HEAD";
  }
  if (answer->id.empty()) answer->id = make_request_id();
  answer_ = std::move(answer);  // nothing below throws
  state_ = State::kAnswering;
  loop_.state().in_flight.add();
}

void Connection::refuse(Response response, bool close_after) {
  begin_answer();
  answer_->close_after = close_after || loop_.state().draining;
  reader_.reset();
  release_body();
  answer_->exchange->send(std::move(response));
  flush_news();
}

// Drains the exchange, queues its bytes and sends them.
void Connection::flush_news() {
  if (answer_ == nullptr) return;
  Exchange::News& news = answer_->news;
  answer_->exchange->take(news);
  if (news.failed) return cut_off();
  if (auto* response = std::get_if<Response>(&news.head)) {
    queue_head(*response);
    if (!answer_->head_only) queue_.append(std::move(response->body));
  } else if (const auto* stream = std::get_if<StreamHead>(&news.head)) {
    queue_head(*stream);
  }
  if (!news.bytes.empty()) queue_stream(news.bytes);
  if (news.ended && !std::exchange(answer_->ended, true) && answer_->chunked) {
    queue_.append(kLastChunk);
  }
  const ServerOptions& options = loop_.state().options;
  if (answer_->is_stream && queue_.size() > options.max_unsent_bytes) return close(Ending::kCutOff);
  send_queued();
}

void Connection::queue_head(const Response& response) {
  std::string text;
  const bool without_body = has_no_body(response.status);
  append_response_head(
      text,
      {.status = response.status,
       .content_type = response.content_type,
       .headers = response.headers,
       .content_length = without_body ? std::nullopt : std::optional(std::ssize(response.body)),
       .close = answer_->close_after,
       .request_id = answer_->id,
       .cors_origin = answer_->cors_origin});
  answer_->head_only |= without_body;
  queue_.append(without_probe(text));
  count_response(response.status);
}

void Connection::queue_head(const StreamHead& head) {
  answer_->is_stream = true;
  answer_->close_after |= answer_->http10;
  answer_->chunked = !answer_->http10 && !answer_->head_only;
  answer_->keep_alive = head.keep_alive;
  answer_->keep_alive_after = head.keep_alive_after;
  std::string text;
  append_response_head(text, {.status = head.status,
                              .content_type = head.content_type,
                              .headers = head.headers,
                              .content_length = std::nullopt,
                              .chunked = answer_->chunked,
                              .close = answer_->close_after,
                              .request_id = answer_->id,
                              .cors_origin = answer_->cors_origin});
  queue_.append(without_probe(text));
  count_response(head.status);
  answer_->last_queued = Clock::now();
  answer_->ended = answer_->head_only;
}

std::string_view Connection::without_probe(std::string_view head) const {
  if (answer_ != nullptr && answer_->probed) head.remove_prefix(kProbe.size());
  return head;
}

void Connection::count_response(int status) {
  answer_->status = status;
  const int kind = status / 100;
  if (kind >= 1 && kind <= 5) ++loop_.state().responses[kind];
}

void Connection::queue_stream(std::string_view bytes) {
  if (answer_->head_only || bytes.empty()) return;
  std::string begin;
  if (answer_->chunked) append_chunk_begin(begin, std::ssize(bytes));
  queue_.append(std::string_view(begin));
  queue_.append(bytes);
  if (answer_->chunked) queue_.append(kChunkEnd);
  answer_->last_queued = Clock::now();
}

// Sends what the kernel accepts. After the last byte of a response the next request begins.
void Connection::send_queued() {
  while (!queue_.empty()) {
    std::array<std::string_view, 16> parts;
    const IoResult result = stream_->write(std::span(parts).first(queue_.front(parts)));
    switch (result.status) {
      case IoStatus::kDone:
        queue_.remove(result.bytes);
        loop_.state().bytes_sent += static_cast<int64_t>(result.bytes);
        if (answer_ != nullptr) answer_->bytes_sent += static_cast<int64_t>(result.bytes);
        blocked_since_.reset();
        continue;
      case IoStatus::kWantWrite:
        if (!blocked_since_) blocked_since_ = Clock::now();
        if (answer_ != nullptr) answer_->exchange->sent(queue_.size());
        return wait_writable();
      case IoStatus::kWantRead:  // TLS, rare: on_readable() retries
        write_wants_read_ = true;
        return wait_readable();
      default:
        return close(Ending::kClosedByClient);
    }
  }
  if (answer_ == nullptr) return;
  answer_->exchange->sent(0);
  if (answer_->ended) finish_answer();
}

void Connection::finish_answer() {
  const bool last = answer_->close_after || (client_ended_ && !advancing_ && ahead_.empty());
  end_answer(Ending::kDelivered);
  if (last) {
    start_lingering();
  } else {
    answer_next();
  }
}

void Connection::end_answer(Ending ending) {
  const std::unique_ptr<Answer> answer = std::exchange(answer_, nullptr);
  try {
    log_answer(*answer, ending);
  } catch (const std::bad_alloc&) {  // the line is lost
  }
  ServerState& state = loop_.state();
  if (ending == Ending::kClosedByClient) ++state.closed_by_client;
  if (ending == Ending::kCutOff) ++state.cut_off;
  // HEAD needs only the beginning of a stream; its writer may stop.
  const bool unwanted = answer->is_stream && answer->head_only;
  if (ending == Ending::kDelivered && !unwanted) {
    answer->exchange->delivered();
  } else {
    answer->exchange->close();
  }
  // Last: a thread that waits for the count may rely on the callback having been called.
  state.in_flight.remove();
}

void Connection::log_answer(const Answer& answer, Ending ending) const {
  if (!loop_.state().options.access_log) return;
  constexpr std::string_view kEndings[] = {"", " ended=closed_by_client", " ended=cut_off",
                                           " ended=stopped"};
  const double ms =
      std::chrono::duration<double, std::milli>(Clock::now() - answer.received).count();
  log_info("request id={} peer={} method={} path=\"{}\" status={} bytes={} ms={:.1f}{}", answer.id,
           peer_, for_log(answer.method, 32), for_log(answer.path), answer.status,
           answer.bytes_sent, ms, kEndings[static_cast<int>(ending)]);
}

void Connection::check_answering(Time now) {
  // Retries news that could not be announced because memory was exhausted.
  flush_news();
  if (state_ != State::kAnswering) return;
  const ServerOptions& options = loop_.state().options;
  if (queue_.size() <= options.send_buffer_bytes) {
    answer_->full_since.reset();
  } else if (!answer_->full_since) {
    answer_->full_since = now;
  }
  const auto too_long = [&](const std::optional<Time>& since) {
    return since && now - *since >= options.stall_timeout;
  };
  if (too_long(blocked_since_) || too_long(answer_->full_since)) return close(Ending::kCutOff);
  if (answer_->is_stream && !answer_->ended && queue_.empty() && !answer_->keep_alive.empty() &&
      now - answer_->last_queued >= answer_->keep_alive_after) {
    queue_stream(answer_->keep_alive);
    send_queued();
  }
}

}  // namespace fathom::http
