// The orders of an engine whose prompts another one computes: a ticket for each sequence that
// arrives, and the pieces that come for them.
//
// Pieces are checked by the lane's Arrivals and then written into the pool: while they come, beside
// the steps, where a page lies in memory of the host (transfer/landing.h), else between two steps.
// An order ends when all its pages are written, when the other side gives it up, when a write has
// failed, when nothing has come for `patience` although nobody holds it any more, or when its
// sequence gives up its pages.
//
// Owns the books of tickets, not the sequences. Engine thread only, but begin_landing().
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "cache/page_transfer.h"
#include "engine/engine.h"
#include "engine/remote_prefill.h"
#include "transfer/arrivals.h"
#include "transfer/piece_mailbox.h"
#include "transfer/prompt_link.h"

namespace fathom {

// Copies between a page and host memory, each over when it returns.
class HostCopies {
 public:
  explicit HostCopies(PageTransfer& transfer) : transfer_(&transfer) {}
  int64_t page_bytes() const { return transfer_->page_bytes(); }
  std::span<const std::byte> rows_in_place(int32_t page) const {
    return transfer_->rows_in_place(page);
  }
  std::span<std::byte> memory_of(int32_t page) const { return transfer_->memory_of(page); }
  // False: the copy has failed.
  bool save(int32_t page, std::span<std::byte> rows);
  bool load(std::span<const std::byte> rows, int32_t page);

 private:
  bool wait();
  PageTransfer* transfer_;
  std::vector<EndedCopy> ended_;
};

class PrefillOrders : public RemotePrefill, private LandingBook {
 public:
  using Clock = std::function<std::chrono::steady_clock::time_point()>;
  PrefillOrders(const PrefillOptions& options, Clock clock);
  // Nothing lands any more.
  ~PrefillOrders() override;

  // The next lane's, from 0; both outlive this.
  void add_lane(PagePool& pool, PageTransfer& transfer);
  // Once, behind the last lane.
  void begin_landings() { options_.mailbox->set_landings(this); }

  bool takes(const Sequence& sequence) const override;
  void begin(Sequence& sequence) override;
  void cancel(Sequence& sequence) override;

  // An order that has ended by itself. Its sequence's pages are out of quarantine.
  struct Ended {
    Sequence* sequence = nullptr;
    bool has_arrived = false;
    int64_t cached_tokens = 0;  // of its text, that the other side had and did not compute
    Status why;                 // if it has not arrived
  };
  // Writes the pieces that have come. Valid until the next call.
  const std::vector<Ended>& take_pieces();

  bool empty() const { return num_orders_ == 0; }
  int64_t num_orders() const { return num_orders_; }
  // Pages of `lane` quarantined for ended orders whose pieces still arrive.
  int64_t pages_draining(int lane) const {
    return lanes_[static_cast<size_t>(lane)].arrivals.pages_draining();
  }
  // Rows of pages that have been ordered and have not arrived.
  int64_t rows_missing() const { return rows_missing_; }
  PrefillStats stats() const;

 private:
  struct Order {
    Sequence* sequence = nullptr;
    std::chrono::steady_clock::time_point last;  // when it began, or its last sign of life
    int64_t cached_tokens = 0;                   // as its pieces say
    int64_t rows_missing = 0;                    // of pages that have not come
  };
  struct Lane {
    Lane(const ArrivalsOptions& options, PagePool& pool, PageTransfer& transfer)
        : arrivals(options, pool), copies(transfer) {}
    Arrivals arrivals;
    HostCopies copies;
    std::unordered_map<uint64_t, Order> orders;  // by their tickets' numbers
  };

  Lane& lane_of(const Sequence& sequence) { return lanes_[static_cast<size_t>(sequence.lane)]; }
  Lane* lane_of(const TicketId& id);
  TicketId id_of(const Sequence& sequence, uint64_t number) const {
    return {engine_ + static_cast<uint64_t>(sequence.lane), epoch_, number};
  }
  std::optional<LandingPlace> begin_landing(const PieceHeader& header) override;
  void take(const PieceHeader& header, std::span<const std::byte> rows);
  void take(const LandedPiece& landed);
  void end_piece(Lane& lane, const PieceHeader& header, bool ok);
  void count_missing(Order& order, int64_t rows);
  void end(Lane& lane, uint64_t number, bool has_arrived, Status why);

  const PrefillOptions options_;
  const Clock clock_;
  const uint64_t engine_, epoch_;  // the first lane's; the others' engines follow
  std::deque<Lane> lanes_;
  PieceMailbox::News news_;
  std::vector<FailedOrder> refused_;
  std::vector<Ended> ended_;
  std::vector<uint64_t> late_;
  int64_t num_orders_ = 0, rows_missing_ = 0;
  PrefillStats stats_;
};

}  // namespace fathom
