// Pieces and failures on their way to a decoding engine's thread, in a bounded window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "transfer/ticket.h"

namespace fathom {

struct PagePiece {
  PieceHeader header;
  std::vector<std::byte> rows;
};
struct FailedOrder {
  TicketId ticket;
  Status why;
};

// Any thread may call every method; take() is for the engine's.
class PieceMailbox {
 public:
  // Takes at least one piece, whatever its size.
  explicit PieceMailbox(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // False, and nothing has changed: the window is full.
  bool put(PagePiece piece);
  void fail(FailedOrder failed);

  struct News {
    std::vector<PagePiece> pieces;
    std::vector<FailedOrder> failures;
  };
  // Replaces `news` by what has come.
  void take(News& news);
  // `wake` is called when something comes. Null: no more calls, and none is going on.
  void watch(std::function<void()> wake);

 private:
  const int64_t max_bytes_;
  std::mutex mutex_;
  News news_;
  int64_t bytes_ = 0;
  std::function<void()> wake_;
};

}  // namespace fathom
