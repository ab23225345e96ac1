#include "engine/lossy_link.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "transfer/piece_wire.h"

namespace fathom {

LossyLink::LossyLink(Engine& prefill, std::shared_ptr<PieceMailbox> mailbox, double share,
                     uint32_t seed)
    : share_(share),
      random_(seed),
      sent_(std::make_shared<PieceMailbox>(1 << 20)),
      received_(std::move(mailbox)),
      link_(prefill, sent_),
      carrier_([this] { carry(); }) {}

LossyLink::~LossyLink() {
  stopping_ = true;
  carrier_.join();
}

bool LossyLink::fault() {
  const std::lock_guard lock(random_mutex_);
  return std::uniform_real_distribution<>()(random_) < share_;
}

Result<> LossyLink::order(PromptOrder order) {
  if (fault()) return {};
  return link_.order(std::move(order));
}

void LossyLink::cancel(const TicketId& id) {
  if (!fault()) link_.cancel(id);
}

void LossyLink::carry() {
  PieceMailbox::News news;
  Message message;
  while (!stopping_) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    sent_->take(news);
    for (const PagePiece& piece : news.pieces) {
      piece.read(
          [&](std::span<const std::byte> rows) { write_piece(piece.header, rows, message); });
      spoil(message);
    }
    for (FailedOrder& failed : news.failures) {
      if (!fault()) received_->fail(std::move(failed));
    }
    if (fault() && waiting_.size() > 1) std::reverse(waiting_.begin(), waiting_.end());
    std::erase_if(waiting_, [&](Waiting& waiting) {
      if (waiting.rounds > 0) return --waiting.rounds, false;
      const auto piece = read_piece(waiting.bytes);
      if (!piece) return true;
      return received_->put(piece->header, piece->rows);
    });
  }
}

void LossyLink::spoil(const Message& message) {
  log_.push_back(message);
  if (log_.size() > 64) log_.erase(log_.begin());
  if (fault()) return;
  if (fault()) waiting_.push_back({log_[random_() % log_.size()], 0});  // an old one once more
  const int copies = fault() ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    Message spoilt = message;
    if (fault()) spoilt.resize(random_() % spoilt.size());
    if (fault() && !spoilt.empty()) spoilt[random_() % spoilt.size()] ^= std::byte{0x10};
    waiting_.push_back({std::move(spoilt), fault() ? 50u : 0u});
  }
}

}  // namespace fathom
