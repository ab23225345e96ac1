#include "server/api/live_reply.h"

#include <new>

#include "base/log.h"
#include "base/out_of_memory.h"
#include "server/api/error_response.h"
#include "server/http/sse.h"

namespace fathom {
namespace {

http::StreamHead stream_head(const ReplyWriter& writer) {
  http::StreamHead head;
  head.content_type = http::kSseContentType;
  head.headers.add("Cache-Control", "no-cache");
  head.headers.add("X-Accel-Buffering", "no");
  head.keep_alive = writer.keep_alive();
  head.keep_alive_after = http::kSseKeepAliveAfter;
  return head;
}

// 500, not 503: nothing is unavailable, and error_response() tells clients not to retry.
ApiError aborted_error() { return ApiError(500, "the request was aborted", {}, "aborted"); }

}  // namespace

LiveReply::LiveReply(std::string id, Engine& engine, Metrics& metrics,
                     std::unique_ptr<ReplyWriter> writer,
                     std::shared_ptr<http::Responder> responder)
    : id_(std::move(id)),
      engine_(engine),
      metrics_(metrics),
      writer_(std::move(writer)),
      responder_(std::move(responder)),
      last_token_(static_cast<size_t>(writer_->spec().num_choices())) {}

void LiveReply::start(std::vector<Request> requests) {
  // The responder keeps the callback until delivery, and this object keeps the responder. A weak
  // reference breaks the cycle.
  responder_->on_closed([self = weak_from_this()] {
    if (const auto reply = self.lock()) reply->client_left();
  });
  const std::lock_guard lock(mutex_);
  if (sent_) return;  // fail() came first
  try {
    submit(std::move(requests));
  } catch (const std::bad_alloc&) {
    give_up();
  }
}

void LiveReply::submit(std::vector<Request> requests) {
  running_.reserve(requests.size());
  for (size_t prompt = 0; prompt < requests.size() && !left_; ++prompt) {
    const auto submitted = engine_.submit(
        std::move(requests[prompt]),
        [self = shared_from_this(), prompt](const Event& event) { self->push(prompt, event); });
    if (!submitted) {
      send_error(ApiError(submitted.error()));
      abort_engine();
      return;
    }
    running_.push_back(*submitted);
  }
  if (left_) {
    abort_engine();
  } else if (writer_->streams()) {
    responder_->start_stream(stream_head(*writer_));
    stream_begun_ = true;
  }
}

void LiveReply::push(size_t prompt, const Event& event) {
  const std::lock_guard lock(mutex_);
  try {
    observe(prompt, event);
    if (sent_ || left_) {
      // An earlier attempt may have failed for lack of memory.
      abort_engine();
    } else {
      write(prompt, event);
    }
  } catch (const std::bad_alloc&) {
    give_up();
  }
}

void LiveReply::write(size_t prompt, const Event& event) {
  if (aborted_ && event.finish == FinishReason::kAbort) return write_failure(aborted_error());
  out_.clear();
  writer_->push(prompt, event, out_);
  deliver(out_);
  if (writer_->ended() && writer_->failure()) abort_engine();
}

void LiveReply::fail(ApiError error) {
  const std::lock_guard lock(mutex_);
  if (sent_ || left_) return;
  try {
    if (writer_->streams() && !stream_begun_) {
      send_error(error);
    } else {
      write_failure(std::move(error));
    }
  } catch (const std::bad_alloc&) {
    give_up();
  }
}

void LiveReply::write_failure(ApiError error) {
  out_.clear();
  writer_->fail(std::move(error), out_);
  deliver(out_);
  abort_engine();
}

// Ends this response when memory is exhausted, with an error if there is memory for one.
void LiveReply::give_up() noexcept {
  if (!sent_ && !writer_->ended() && stream_begun_ == writer_->streams()) {
    try {
      return write_failure(ApiError(out_of_memory()));
    } catch (const std::bad_alloc&) {
    }
  }
  sent_ = true;
  responder_->give_up();
  abort_engine();
}

bool LiveReply::abort() {
  const std::lock_guard lock(mutex_);
  const bool runs = !sent_ && !left_ && !running_.empty();
  aborted_ |= runs;
  abort_engine();
  return runs;
}

void LiveReply::client_left() {
  const std::lock_guard lock(mutex_);
  left_ = true;
  if (!sent_) metrics_.count_disconnect();
  abort_engine();
}

void LiveReply::send_error(const ApiError& error) {
  sent_ = true;
  metrics_.count_rejection(error);
  responder_->send(error_response(error, writer_->error_shape()));
}

void LiveReply::deliver(const std::string& bytes) {
  if (writer_->streams()) {
    if (!bytes.empty()) responder_->write(bytes);
    if (!writer_->ended()) return;
    sent_ = true;
    responder_->end();
    return;
  }
  if (!writer_->ended()) return;
  if (writer_->failure()) {
    send_error(*writer_->failure());
    return;
  }
  sent_ = true;
  responder_->send({.body = bytes});
}

// Aborts the engine's requests. If memory is exhausted the next event tries again.
void LiveReply::abort_engine() noexcept {
  try {
    for (const RequestId request : running_) engine_.abort(request);
    running_.clear();
  } catch (const std::bad_alloc&) {
  }
}

void LiveReply::observe(size_t prompt, const Event& event) {
  const size_t choice =
      prompt * static_cast<size_t>(writer_->spec().n) + static_cast<size_t>(event.index);
  const auto now = std::chrono::steady_clock::now();
  if (!event.ids.empty()) {
    auto& last = last_token_[choice];
    if (last) {
      const std::chrono::duration<double> gap = now - *last;
      metrics_.observe_token_gap(gap.count() / static_cast<double>(event.ids.size()));
    }
    last = now;
  }
  if (event.finish) {
    metrics_.observe_finish(event);
    log_info(
        "finished id={} choice={} reason={} prompt={} cached={} output={} preemptions={} "
        "queue={:.3f} ttft={:.3f} total={:.3f}",
        id_, choice, name_of(*event.finish), event.usage.prompt_tokens, event.usage.cached_tokens,
        event.usage.completion_tokens, event.usage.preemptions, event.timings.queue_seconds(),
        event.timings.ttft_seconds(), event.timings.total_seconds());
  }
}

}  // namespace fathom
