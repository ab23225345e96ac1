// Pieces and failures on their way to a decoding engine's thread, in a bounded window, and pieces
// that land in its pool beside it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "transfer/landing.h"
#include "transfer/piece_receiver.h"
#include "transfer/ticket.h"

namespace fathom {

struct PagePiece {
  PieceHeader header;
  std::vector<std::byte> rows;
  std::shared_ptr<LentRows> lent = {};  // the rows, if they are still the sender's; else null

  int64_t size() const { return lent ? static_cast<int64_t>(lent->size()) : std::ssize(rows); }
  // Calls use(rows) with the rows.
  template <typename Use>
  auto read(Use&& use) const {
    if (lent != nullptr) return lent->read(use);
    return use(std::span<const std::byte>(rows));
  }
};

// Any thread may call every method; take() is for the engine's. Buffers of pieces that were taken
// are used again, so that pages that come do not cost fresh memory.
class PieceMailbox : public PieceReceiver, public std::enable_shared_from_this<PieceMailbox> {
 public:
  // Takes at least one piece, whatever its size.
  explicit PieceMailbox(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // False, and nothing has changed: the window is full. Lent rows are not copied: they are lent
  // until the piece is destroyed.
  bool put(PagePiece& piece);
  bool put(const PieceHeader& header, std::span<const std::byte> rows);
  bool put(const PieceHeader& header, std::shared_ptr<LentRows> rows) override;
  void done(const TicketId&) override {}
  void fail(FailedOrder failed) override;
  // Memory for a piece's rows; its contents may be anything.
  std::vector<std::byte> buffer(size_t bytes);

  // A piece that may be written to its page while it comes. Null: it comes into a buffer(), to be
  // put(). Only of a mailbox that a shared_ptr holds.
  std::unique_ptr<Landing> land(const PieceHeader& header);
  // Called by the Landing. Does not throw.
  void landed(std::list<LandedPiece> piece) noexcept;
  // Where pieces land from now on. Null: nowhere, and none is landing any more; what lands is
  // broken off for that.
  void set_landings(LandingBook* book);
  // `breaks` is called to have what lands broken off, soon and by whoever receives it. Null: no
  // more calls, and none is going on.
  void watch_breaks(std::function<void()> breaks);

  struct News {
    std::vector<PagePiece> pieces;
    std::list<LandedPiece> landed;
    std::vector<FailedOrder> failures;
  };
  // Replaces `news` by what has come. The pieces that it had are done with.
  void take(News& news);
  // `wake` is called when something comes, `room` when pieces have been taken. Null: no more calls,
  // and none is going on.
  void watch(std::function<void()> wake);
  void watch_room(std::function<void()> room);

 private:
  bool has_room(int64_t bytes) const { return bytes_ == 0 || bytes <= max_bytes_ - bytes_; }
  void keep(PagePiece piece);

  const int64_t max_bytes_;
  std::mutex mutex_;
  News news_;
  int64_t bytes_ = 0;
  std::vector<std::vector<std::byte>> spare_;
  int64_t spare_bytes_ = 0;
  std::function<void()> wake_;
  std::mutex room_mutex_;
  std::function<void()> room_;
  std::mutex landing_mutex_;
  LandingBook* book_ = nullptr;
  int64_t num_landing_ = 0;
  std::condition_variable none_is_landing_;
  std::mutex breaks_mutex_;
  std::function<void()> breaks_;
};

}  // namespace fathom
