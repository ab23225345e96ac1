#include "server/http/exchange.h"

#include <new>
#include <utility>

#include "base/check.h"
#include "server/http/error_body.h"

namespace fathom::http {

void Outbox::push(std::shared_ptr<Exchange> exchange, bool at_once) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  waiting_.push_back(std::move(exchange));
  if (woken_ || (awake_ && !at_once)) return;
  wake_();
  woken_ = true;
}

void Outbox::take(std::vector<std::shared_ptr<Exchange>>& into, bool stay_awake) {
  into.clear();
  const std::lock_guard lock(mutex_);
  std::swap(into, waiting_);
  woken_ = false;
  awake_ = stay_awake && !into.empty();
}

void Outbox::close() {
  std::vector<std::shared_ptr<Exchange>> dropped;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  closed_ = true;
  std::swap(dropped, waiting_);
}

void Exchange::announce(std::unique_lock<std::mutex>& lock, bool at_once) {
  const bool first = !std::exchange(announced_, true);
  lock.unlock();
  if (!first) return;
  try {
    outbox_->push(shared_from_this(), at_once);
  } catch (const std::bad_alloc&) {  // Connection::check() will find the news
  }
}

bool Exchange::send(Response response) {
  std::unique_lock lock(mutex_);
  if (stage_ != Stage::kOpen) return false;
  stage_ = Stage::kEnded;
  news_.head = std::move(response);
  news_.ended = true;
  announce(lock, true);
  return true;
}

bool Exchange::start_stream(StreamHead head) {
  std::unique_lock lock(mutex_);
  if (stage_ != Stage::kOpen) return false;
  stage_ = Stage::kStreaming;
  news_.head = std::move(head);
  announce(lock);
  return true;
}

void Exchange::write(std::string_view bytes) {
  std::unique_lock lock(mutex_);
  FATHOM_CHECK(stage_ != Stage::kOpen, "write() before start_stream()");
  if (stage_ != Stage::kStreaming || bytes.empty()) return;
  try {
    news_.bytes.append(bytes);
  } catch (const std::bad_alloc&) {  // fails this client, not the writing thread
    news_.failed = true;
  }
  announce(lock);
}

void Exchange::end() {
  std::unique_lock lock(mutex_);
  FATHOM_CHECK(stage_ != Stage::kOpen, "end() before start_stream()");
  if (stage_ != Stage::kStreaming) return;
  stage_ = Stage::kEnded;
  news_.ended = true;
  announce(lock);
}

void Exchange::on_closed(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    FATHOM_CHECK(callback_ == nullptr, "on_closed() a second time");
    if (stage_ != Stage::kClosed) {
      if (stage_ != Stage::kDelivered) callback_ = std::move(callback);
      return;
    }
  }
  callback();
}

bool Exchange::closed() const {
  const std::lock_guard lock(mutex_);
  return stage_ == Stage::kClosed;
}

int64_t Exchange::unsent() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(news_.bytes) + left_;
}

void Exchange::when_sent(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    FATHOM_CHECK(when_sent_ == nullptr, "when_sent() while another waits");
    if (stage_ == Stage::kDelivered || stage_ == Stage::kClosed) return;
    waits_for_sent_ = true;  // before left_ is read: sent() does the opposite
    if (left_ > 0 || !news_.bytes.empty()) {
      when_sent_ = std::move(callback);
      return;
    }
    waits_for_sent_ = false;
  }
  callback();
}

void Exchange::sent(int64_t left) {
  left_ = left;
  if (left > 0 || !waits_for_sent_) return;
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    if (!news_.bytes.empty()) return;  // sent() will be called again
    waits_for_sent_ = false;
    std::swap(callback, when_sent_);
  }
  if (callback) callback();
}

void Exchange::abandon() {
  {
    std::unique_lock lock(mutex_);
    if (stage_ == Stage::kStreaming) {
      stage_ = Stage::kEnded;
      news_.failed = true;
      announce(lock);
      return;
    }
  }
  try {
    send(error_response(500, "the request was dropped without an answer", "internal_error"));
  } catch (const std::bad_alloc&) {
    give_up();
  }
}

void Exchange::give_up() {
  std::unique_lock lock(mutex_);
  if (stage_ == Stage::kClosed || stage_ == Stage::kDelivered) return;
  stage_ = Stage::kEnded;
  news_.failed = true;
  announce(lock);
}

void Exchange::take(News& news) {
  news.bytes.clear();
  const std::lock_guard lock(mutex_);
  announced_ = false;
  news.head = std::exchange(news_.head, std::monostate());
  std::swap(news.bytes, news_.bytes);
  left_ += std::ssize(news.bytes);
  news.ended = news_.ended;
  news.failed = news_.failed;
}

void Exchange::delivered() {
  std::function<void()> dropped, dropped_too;  // destroyed after the lock is released
  connection_ = nullptr;
  const std::lock_guard lock(mutex_);
  stage_ = Stage::kDelivered;
  std::swap(dropped, callback_);
  std::swap(dropped_too, when_sent_);
}

void Exchange::close() {
  std::function<void()> callback, dropped;
  connection_ = nullptr;
  {
    const std::lock_guard lock(mutex_);
    stage_ = Stage::kClosed;
    std::swap(dropped, when_sent_);
    news_ = {};
    std::swap(callback, callback_);
  }
  if (callback) callback();
}

}  // namespace fathom::http
