#include "transfer/piece_mailbox.h"

#include <utility>

namespace fathom {

bool PieceMailbox::put(PagePiece piece) {
  const std::lock_guard lock(mutex_);
  const auto bytes = std::ssize(piece.rows);
  if (bytes_ > 0 && bytes > max_bytes_ - bytes_) return false;
  news_.pieces.push_back(std::move(piece));
  bytes_ += bytes;
  if (wake_) wake_();
  return true;
}

void PieceMailbox::fail(FailedOrder failed) {
  const std::lock_guard lock(mutex_);
  news_.failures.push_back(std::move(failed));
  if (wake_) wake_();
}

void PieceMailbox::take(News& news) {
  news.pieces.clear();
  news.failures.clear();
  const std::lock_guard lock(mutex_);
  std::swap(news, news_);
  bytes_ = 0;
}

void PieceMailbox::watch(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  wake_ = std::move(wake);
}

}  // namespace fathom
