#include "router/forward.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "base/log.h"
#include "router/request_head.h"
#include "server/http/host.h"
#include "server/http/log_text.h"

namespace fathom::router {
namespace {

using Clock = std::chrono::steady_clock;

// A complete reply up to this size gets a Content-Length; a longer one is streamed.
constexpr int64_t kMostCollected = 1 << 20;
// Reading from the replica stops while this much has not been sent to the client.
constexpr int64_t kMostUnsent = 256 << 10;
// A request that was lost with its replica is asked once more: one that kills replicas must not
// kill all of them.
constexpr int64_t kMostLost = 1;

double seconds_since(Time begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::string value_or_empty(const std::string* value) {
  return value == nullptr ? std::string() : *value;
}

}  // namespace

Forward::Forward(ForwardContext& context, http::Request request, std::string prompt,
                 std::shared_ptr<http::Responder> responder)
    : context_(context),
      request_(std::move(request)),
      prompt_(std::move(prompt)),
      session_(value_or_empty(request_.headers.find(context.options.session_header))),
      form_(error_form(request_.path)),
      responder_(std::move(responder)) {}

void Forward::start() {
  context_.active.insert(shared_from_this());
  responder_->on_closed([&io = context_.io, weak = weak_from_this()] {
    boost::asio::post(io, [weak] {
      if (const auto self = weak.lock()) self->client_left();
    });
  });
  attempt();
}

void Forward::attempt() {
  const Time now = Clock::now();
  pick_ = context_.replicas.pick(prompt_, session_, tried_, now);
  if (!pick_) {
    if (tried_.empty()) {
      ++context_.metrics.refused;
      return refuse(503, "no replica is available; try again", "no_replica");
    }
    return refuse(503, "no replica could answer: " + last_failure_, "no_replica");
  }
  Replica& replica = *pick_->replica;
  if (tried_.empty()) {
    context_.metrics.dispatch.observe(seconds_since(request_.received));
    context_.metrics.prompt_bytes += std::ssize(prompt_);
    context_.metrics.prefix_bytes += pick_->prefix_bytes;
    prefix_bytes_ = pick_->prefix_bytes;
    reason_ = name_of(pick_->reason);
    ++replica.reasons[static_cast<size_t>(pick_->reason)];
  } else {
    ++replica.reasons[kNumReasons];
  }
  tried_.push_back(replica.number);
  url_ = replica.url;
  const client::Endpoint& endpoint = replica.connections->endpoint();
  // The body lives as long as the call: it is this object's.
  call_ = std::make_shared<ReplicaCall>(
      replica.connections,
      CallLimits{.connect = context_.options.connect_timeout,
                 .silence = context_.options.stream_timeout},
      request_head(request_, http::address_text(endpoint.host, endpoint.port),
                   context_.options.replica_api_key),
      std::shared_ptr<const std::string>(shared_from_this(), &request_.body), *this);
  call_->start();
}

void Forward::on_head(ReplyHead head) {
  Replica& replica = *pick_->replica;
  const Time now = Clock::now();
  ++replica.replies[std::clamp(head.status / 100, 2, 5)];
  // 429 and 503 say that a replica is busy or goes down in order, not that it is broken.
  const bool busy = head.status == 429 || head.status == 503;
  if (busy) {
    replica.breaker.forgotten(pick_->pass);
  } else if (head.status >= 500) {
    replica.breaker.failed(pick_->pass, now);
  } else {
    replica.breaker.succeeded(pick_->pass);
  }
  const bool may_retry = busy || head.status == 502 || head.status == 504;
  if (may_retry && std::ssize(tried_) <= context_.options.max_retries &&
      context_.replicas.has_other(tried_, now)) {
    last_failure_ = fmt::format("{} replied {}", replica.url, head.status);
    call_->cancel();
    leave_replica();
    return attempt();
  }
  context_.metrics.reply.observe(seconds_since(request_.received));
  head_ = std::move(head);
  stage_ = Stage::kCollecting;
  if (head_.is_event_stream || head_.content_length.value_or(0) > kMostCollected) start_stream();
}

void Forward::start_stream() {
  stage_ = Stage::kStreaming;
  responder_->start_stream({.status = head_.status,
                            .content_type = value_or_empty(head_.headers.find("Content-Type")),
                            .headers = reply_headers(head_.headers)});
  write(std::exchange(collected_, {}));
}

void Forward::on_body(std::string_view bytes) {
  if (stage_ == Stage::kCollecting) {
    collected_.append(bytes);
    if (std::ssize(collected_) > kMostCollected) start_stream();
  } else if (head_.is_event_stream) {
    std::string whole;
    boundary_.feed(bytes, whole);
    write(whole);
  } else {
    write(bytes);
  }
}

void Forward::write(std::string_view bytes) {
  if (bytes.empty()) return;
  responder_->write(bytes);
  if (paused_ || responder_->unsent() <= kMostUnsent) return;
  paused_ = true;
  call_->pause();
  responder_->when_sent([&io = context_.io, weak = weak_from_this()] {
    boost::asio::post(io, [weak] {
      if (const auto self = weak.lock()) self->resume();
    });
  });
}

void Forward::resume() {
  paused_ = false;
  if (call_ != nullptr) call_->resume();
}

void Forward::on_end() {
  if (stage_ == Stage::kStreaming) {
    responder_->write(boundary_.take_rest());
    responder_->end();
  } else {
    responder_->send({.status = head_.status,
                      .content_type = value_or_empty(head_.headers.find("Content-Type")),
                      .headers = reply_headers(head_.headers),
                      .body = std::move(collected_)});
  }
  leave_replica();
  end("");
}

void Forward::on_failure(CallFailure failure, std::string_view what) {
  Replica& replica = *pick_->replica;
  replica.call_failed(failure, pick_->pass, Clock::now());
  last_failure_ = fmt::format("{}: {}", replica.url, what);
  if (failure != CallFailure::kNotConnected) ++lost_;
  if (stage_ == Stage::kWaiting) {
    leave_replica();
    const bool may_retry = failure == CallFailure::kNotConnected ||
                           (failure == CallFailure::kLost && lost_ <= kMostLost);
    if (may_retry && std::ssize(tried_) <= context_.options.max_retries) return attempt();
    if (failure == CallFailure::kTooSlow) return refuse(504, last_failure_, "replica_too_slow");
    return refuse(502, "the replica was lost before its reply: " + last_failure_, "replica_lost");
  }
  const bool streaming = stage_ == Stage::kStreaming;
  leave_replica();
  if (!streaming) {
    return refuse(502, "the replica was lost within its reply: " + last_failure_, "replica_lost");
  }
  ++replica.broken_streams;
  if (head_.is_event_stream && boundary_.is_between_events()) {
    responder_->write(
        error_event(form_, "the replica was lost within its reply: " + last_failure_));
    responder_->end();
  }
  // Otherwise nothing can be said within the body: destroying the responder cuts the connection.
  end(" ended=replica_lost");
}

void Forward::client_left() {
  if (stage_ == Stage::kEnded) return;
  ++context_.metrics.disconnects;
  call_->cancel();
  pick_->replica->breaker.forgotten(pick_->pass);
  leave_replica();
  end(" ended=client_left");
}

void Forward::check(Time now) {
  if (stage_ == Stage::kEnded) return;
  const auto self = shared_from_this();
  const auto call = call_;  // its end drops it
  const auto limit = context_.options.request_timeout;
  if (limit.count() > 0 && now - request_.received >= limit) {
    call->cancel();
    return on_failure(CallFailure::kTooSlow, "the request took too long");
  }
  call->check(now);
}

void Forward::refuse(int status, std::string_view message, std::string_view code) {
  http::Response response = error_reply(form_, status, message, code);
  if (status == 503) {
    const auto seconds =
        std::chrono::ceil<std::chrono::seconds>(context_.options.poll_interval).count();
    response.headers.add("Retry-After", std::to_string(seconds));
  }
  head_.status = status;
  responder_->send(std::move(response));
  end(" ended=refused");
}

void Forward::leave_replica() {
  if (!pick_) return;
  --pick_->replica->outstanding;
  pick_.reset();
}

void Forward::end(std::string_view how) {
  const auto self = shared_from_this();
  stage_ = Stage::kEnded;
  responder_.reset();
  call_.reset();  // it holds this object, for the request's body
  context_.active.erase(self);
  if (!context_.options.log_requests) return;
  log_info(
      "route id={} replica={} reason={} prompt_bytes={} prefix_bytes={} attempts={} status={} "
      "ms={:.1f}{}",
      request_.id, url_.empty() ? "none" : url_, reason_, prompt_.size(), prefix_bytes_,
      tried_.size(), head_.status, seconds_since(request_.received) * 1000, how);
}

}  // namespace fathom::router
