#include "transfer/piece_mailbox.h"

#include <algorithm>
#include <utility>

namespace fathom {

// `mutex_` is held, and there is room.
void PieceMailbox::keep(PagePiece piece) {
  const int64_t bytes = piece.size();
  news_.pieces.push_back(std::move(piece));
  bytes_ += bytes;
  if (wake_) wake_();
}

bool PieceMailbox::put(PagePiece& piece) {
  const std::lock_guard lock(mutex_);
  if (!has_room(piece.size())) return false;
  keep(std::move(piece));
  return true;
}

bool PieceMailbox::put(const PieceHeader& header, std::span<const std::byte> rows) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_room(std::ssize(rows))) return false;
  }
  PagePiece piece{.header = header, .rows = buffer(rows.size())};
  std::copy(rows.begin(), rows.end(), piece.rows.begin());
  return put(piece);
}

bool PieceMailbox::put(const PieceHeader& header, std::shared_ptr<LentRows> rows) {
  PagePiece piece{.header = header, .rows = {}, .lent = std::move(rows)};
  return put(piece);
}

void PieceMailbox::fail(FailedOrder failed) {
  const std::lock_guard lock(mutex_);
  news_.failures.push_back(std::move(failed));
  if (wake_) wake_();
}

std::vector<std::byte> PieceMailbox::buffer(size_t bytes) {
  std::vector<std::byte> rows;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      rows = std::move(spare_.back());
      spare_.pop_back();
      spare_bytes_ -= std::ssize(rows);
    }
  }
  rows.resize(bytes);
  return rows;
}

void PieceMailbox::take(News& news) {
  news.failures.clear();
  news.landed.clear();
  bool made_room = false;
  {
    const std::lock_guard lock(mutex_);
    for (PagePiece& piece : news.pieces) {
      const auto bytes = std::ssize(piece.rows);
      if (bytes == 0 || spare_bytes_ + bytes > max_bytes_) continue;
      spare_.push_back(std::move(piece.rows));
      spare_bytes_ += bytes;
    }
    news.pieces.clear();
    std::swap(news, news_);
    made_room = std::exchange(bytes_, 0) > 0;
  }
  if (!made_room) return;
  const std::lock_guard lock(room_mutex_);
  if (room_) room_();
}

std::unique_ptr<Landing> PieceMailbox::land(const PieceHeader& header) {
  auto landing = std::make_unique<Landing>(shared_from_this(), header);
  const std::lock_guard lock(landing_mutex_);
  if (book_ == nullptr) return nullptr;
  const auto place = book_->begin_landing(header);
  if (!place) return nullptr;
  ++num_landing_;
  landing->begin(*place);
  return landing;
}

void PieceMailbox::landed(std::list<LandedPiece> piece) noexcept {
  {
    const std::lock_guard lock(mutex_);
    news_.landed.splice(news_.landed.end(), piece);
    if (wake_) wake_();
  }
  const std::lock_guard lock(landing_mutex_);
  --num_landing_;
  none_is_landing_.notify_all();
}

void PieceMailbox::set_landings(LandingBook* book) {
  std::unique_lock lock(landing_mutex_);
  book_ = book;
  if (book != nullptr || num_landing_ == 0) return;
  lock.unlock();
  {
    const std::lock_guard calling(breaks_mutex_);
    if (breaks_) breaks_();
  }
  lock.lock();
  none_is_landing_.wait(lock, [this] { return num_landing_ == 0; });
}

void PieceMailbox::watch_breaks(std::function<void()> breaks) {
  const std::lock_guard lock(breaks_mutex_);
  breaks_ = std::move(breaks);
}

void PieceMailbox::watch(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  wake_ = std::move(wake);
}

void PieceMailbox::watch_room(std::function<void()> room) {
  const std::lock_guard lock(room_mutex_);
  room_ = std::move(room);
}

}  // namespace fathom
