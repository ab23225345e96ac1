#include "engine/inbox.h"

#include <utility>

namespace fathom {
namespace {

int64_t prompt_tokens(const ActiveRequest& request) {
  return std::ssize(request.request.prompt_ids) * request.request.sampling.n;
}

}  // namespace

// Requires mutex_.
Result<> Inbox::open() const {
  if (death_) return tl::unexpected(*death_);
  if (refusing_) return error(Code::kUnavailable, "the engine is shutting down");
  return {};
}

// Requires mutex_.
Result<> Inbox::room() {
  FATHOM_RETURN_IF_ERROR(open());
  if (counts_.queued_requests >= limits_.max_requests) {
    ++counts_.rejected;
    return error(Code::kResourceExhausted, "the queue is full: {} requests wait, at most {} may",
                 counts_.queued_requests, limits_.max_requests);
  }
  return {};
}

Result<> Inbox::has_room() {
  const std::lock_guard lock(mutex_);
  return room();
}

Result<> Inbox::is_open() const {
  const std::lock_guard lock(mutex_);
  return open();
}

Result<RequestId> Inbox::push(std::unique_ptr<ActiveRequest> request) {
  const int64_t tokens = prompt_tokens(*request);
  const std::lock_guard lock(mutex_);
  FATHOM_RETURN_IF_ERROR(room());
  if (counts_.queued_requests > 0 && tokens > limits_.max_tokens - counts_.queued_tokens) {
    ++counts_.rejected;
    return error(Code::kResourceExhausted,
                 "the queue is full: {} prompt tokens wait and this request has {}, at most {} may",
                 counts_.queued_tokens, tokens, limits_.max_tokens);
  }
  request->id = ++last_id_;
  news_.requests.push_back(std::move(request));  // may throw, so the counters come after it
  ++counts_.queued_requests;
  counts_.queued_tokens += tokens;
  ++alive_;
  announce();
  return last_id_;
}

void Inbox::abort(RequestId request) {
  const std::lock_guard lock(mutex_);
  if (alive_ == 0) return;  // an idle engine would not drain it
  news_.aborts.push_back(request);
  announce();
}

void Inbox::flush() {
  const std::lock_guard lock(mutex_);
  news_.flush = true;
  announce();
}

void Inbox::refuse() {
  const std::lock_guard lock(mutex_);
  refusing_ = true;
}

void Inbox::stop() {
  const std::lock_guard lock(mutex_);
  refusing_ = true;
  news_.stop = true;
  announce();
}

void Inbox::lose() {
  const std::lock_guard lock(mutex_);
  news_.lost = true;
  announce();
}

void Inbox::poke() {
  const std::lock_guard lock(mutex_);
  announce();
}

void Inbox::die(Status why) noexcept {
  const std::lock_guard lock(mutex_);
  refusing_ = true;
  death_ = std::move(why);
  died_.notify_all();
}

bool Inbox::is_dead() const {
  const std::lock_guard lock(mutex_);
  return death_.has_value();
}

bool Inbox::wait_until_dead(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return died_.wait_for(lock, timeout, [&] { return death_.has_value(); });
}

// Requires mutex_.
void Inbox::announce() {
  has_news_.store(true, std::memory_order_relaxed);
  arrived_.notify_one();
}

bool Inbox::wait_until_empty(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return emptied_.wait_for(lock, timeout, [&] { return alive_ == 0; });
}

void Inbox::take(News& news, bool wait) {
  news.requests.clear();
  news.aborts.clear();
  news.flush = news.lost = false;
  if (!wait && !has_news_.load(std::memory_order_relaxed)) return;
  std::unique_lock lock(mutex_);
  if (wait) arrived_.wait(lock, [&] { return has_news_.load(std::memory_order_relaxed); });
  has_news_.store(false, std::memory_order_relaxed);
  std::swap(news, news_);
}

void Inbox::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, timeout, [&] { return has_news_.load(std::memory_order_relaxed); });
}

void Inbox::note_left_queue(const ActiveRequest& request) {
  const std::lock_guard lock(mutex_);
  --counts_.queued_requests;
  counts_.queued_tokens -= prompt_tokens(request);
}

void Inbox::note_ended() {
  const std::lock_guard lock(mutex_);
  if (--alive_ == 0) emptied_.notify_all();
}

Inbox::Counts Inbox::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace fathom
