#include "server/http/io_loop.h"

#include <boost/asio/post.hpp>
#include <utility>

#include "base/log.h"
#include "server/http/connection.h"

namespace fathom::http {
namespace {

namespace asio = boost::asio;

constexpr size_t kScratchBytes = 64 << 10;
constexpr size_t kCheckedAtOnce = 256;  // 0.4 ms where they are in no cache
// Without memory the next attempt would fail just as fast.
constexpr std::chrono::milliseconds kPauseAfterFailure{10};

}  // namespace

IoLoop::IoLoop(ServerState& state)
    : state_(state),
      work_(asio::make_work_guard(context_)),
      flush_timer_(context_),
      check_timer_(context_),
      outbox_(std::make_shared<Outbox>([this] { asio::post(context_, [this] { flush(); }); })),
      scratch_(kScratchBytes) {}

IoLoop::~IoLoop() { stop(); }

void IoLoop::start(std::function<void()> also_resume) {
  thread_ = std::thread([this, also_resume = std::move(also_resume)] {
    for (;;) {
      try {
        schedule_check();
        flush();
        if (also_resume) also_resume();
        context_.run();
        return;
      } catch (const std::exception& failure) {  // connections catch their own exceptions
        log_error("http: I/O thread: {}", failure.what());
        std::this_thread::sleep_for(kPauseAfterFailure);
      }
    }
  });
}

void IoLoop::adopt(asio::ip::tcp::socket socket, ConnectionCount count) {
  asio::post(context_, [this, socket = std::move(socket), count = std::move(count)]() mutable {
    add(std::move(socket), std::move(count));
  });
}

void IoLoop::add(asio::ip::tcp::socket socket, ConnectionCount count) {
  const auto connection = std::make_shared<Connection>(*this, std::move(socket), std::move(count));
  connection->place = connections_.size();
  connections_.push_back(connection);
  connection->start();
}

void IoLoop::remove(Connection& connection) {
  const size_t place = connection.place;
  const auto removed = std::exchange(connections_[place], std::move(connections_.back()));
  connections_.pop_back();
  if (place < connections_.size()) connections_[place]->place = place;
}

// Drains the outbox. After news the loop drains again write_delay later without being woken: writes
// in between are sent together and cost the writing threads no wake-up.
void IoLoop::flush() {
  const bool linger = state_.options.write_delay.count() > 0;
  outbox_->take(flushing_, linger);
  for (const auto& exchange : flushing_) {
    if (Connection* connection = exchange->connection()) connection->flush();
  }
  if (!linger || flushing_.empty()) return;
  flushing_.clear();
  flush_timer_.expires_after(state_.options.write_delay);
  flush_timer_.async_wait([this](const boost::system::error_code& failure) {
    if (!failure) flush();
  });
}

void IoLoop::flush(std::function<void()> then) {
  asio::post(context_, [this, then = std::move(then)] {
    flush_or_leave();
    then();
  });
}

void IoLoop::flush_or_leave() noexcept {
  try {
    flush();
  } catch (const std::exception&) {  // no memory for the timer
  }
}

// Checks each connection about once per check_interval, in parts: checking thousands at once takes
// milliseconds, in which the thread sends nothing.
void IoLoop::schedule_check() {
  const auto parts = static_cast<int64_t>(connections_.size() / kCheckedAtOnce + 1);
  check_timer_.expires_after(std::chrono::nanoseconds(state_.options.check_interval) / parts);
  check_timer_.async_wait([this](const boost::system::error_code& failure) {
    if (failure) return;
    check_some();
    schedule_check();
  });
}

void IoLoop::check_some() {
  const auto now = std::chrono::steady_clock::now();
  if (unchecked_ == 0) unchecked_ = connections_.size();
  // Backwards, because a connection that closes is replaced by the last one of the list, which is
  // checked by then.
  for (size_t i = 0; unchecked_ > 0 && i < kCheckedAtOnce; ++i) {
    --unchecked_;
    if (unchecked_ < connections_.size()) std::shared_ptr(connections_[unchecked_])->check(now);
  }
}

void IoLoop::stop() {
  if (!thread_.joinable()) return;
  asio::post(context_, [this] {
    flush_or_leave();
    while (!connections_.empty()) std::shared_ptr(connections_.back())->stop();
    context_.stop();
  });
  thread_.join();
  outbox_->close();
}

}  // namespace fathom::http
