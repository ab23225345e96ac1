#include "engine/prefill_orders.h"

#include <algorithm>
#include <new>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

uint64_t random_id() {
  std::random_device entropy;
  return (uint64_t{entropy()} << 32) | entropy();
}

}  // namespace

bool HostCopies::save(int32_t page, std::span<std::byte> rows) {
  try {
    transfer_->save(page, rows.data(), 0);
    return wait();
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool HostCopies::load(std::span<const std::byte> rows, int32_t page) {
  try {
    transfer_->load(rows.data(), page, 0);
    return wait();
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// There is never more than one copy in flight.
bool HostCopies::wait() {
  do {
    transfer_->take_ended(ended_, true);
  } while (ended_.empty());
  return ended_.front().ok;
}

PrefillOrders::PrefillOrders(const PrefillOptions& options, Clock clock)
    : options_(options), clock_(std::move(clock)), engine_(random_id()), epoch_(random_id()) {}

PrefillOrders::~PrefillOrders() { options_.mailbox->set_landings(nullptr); }

void PrefillOrders::add_lane(PagePool& pool, PageTransfer& transfer) {
  lanes_.emplace_back(ArrivalsOptions{.engine = engine_ + lanes_.size(),
                                      .epoch = epoch_,
                                      .page_bytes = transfer.page_bytes(),
                                      .form = options_.form,
                                      .with_digests = options_.with_digests},
                      pool, transfer);
}

// Not where the logits of the prompt are wanted, or where a token that is still being sampled is
// not the last.
bool PrefillOrders::takes(const Sequence& sequence) const {
  const int64_t rows = sequence.len() - 1 - sequence.computed;
  if (rows < std::max<int64_t>(1, options_.least_rows) || sequence.prefills_here ||
      sequence.is_prompt_only || sequence.num_unknown > 1 ||
      sequence.prompt_logits_done < sequence.prompt_logits_end) {
    return false;
  }
  return options_.roles == nullptr || !options_.roles->keep_prompt();
}

void PrefillOrders::count_missing(Order& order, int64_t rows) {
  order.rows_missing += rows;
  rows_missing_ += rows;
}

void PrefillOrders::begin(Sequence& sequence) {
  Lane& lane = lane_of(sequence);
  FATHOM_CHECK(sequence.computed % kPageSize == 0, "an order from token {} on", sequence.computed);
  const int64_t rows = sequence.len() - 1;
  const int64_t first = sequence.computed / kPageSize, end = ceil_div(rows, kPageSize);
  PromptOrder order{.ticket = {},
                    .tokens = {sequence.tokens.begin(), sequence.tokens.begin() + rows},
                    .cache_salt = sequence.request->request.cache_salt,
                    .priority = sequence.priority,
                    .prefer = sequence.request->request.prefill_at};
  order.ticket = lane.arrivals.open(
      sequence.request->id, first,
      std::span(sequence.pages)
          .subspan(static_cast<size_t>(first), static_cast<size_t>(end - first)));
  const TicketId id = order.ticket.id;
  sequence.ticket = id.number;
  Order& entry =
      lane.orders.emplace(id.number, Order{.sequence = &sequence, .last = clock_()}).first->second;
  count_missing(entry, (end - first) * kPageSize);
  ++num_orders_;
  ++stats_.orders;
  if (const auto sent = options_.link->order(std::move(order)); !sent) {
    refused_.push_back({id, sent.error()});
  }
}

void PrefillOrders::cancel(Sequence& sequence) {
  const uint64_t number = std::exchange(sequence.ticket, 0);
  if (number == 0) return;
  Lane& lane = lane_of(sequence);
  lane.arrivals.close(number);
  if (const auto order = lane.orders.find(number); order != lane.orders.end()) {
    count_missing(order->second, -order->second.rows_missing);
    lane.orders.erase(order);
    --num_orders_;
  }
  options_.link->cancel(id_of(sequence, number));
}

const std::vector<PrefillOrders::Ended>& PrefillOrders::take_pieces() {
  ended_.clear();
  ended_.reserve(static_cast<size_t>(num_orders_));  // so that no order that ends is lost
  options_.mailbox->take(news_);
  for (const LandedPiece& landed : news_.landed) take(landed);
  for (PagePiece& piece : news_.pieces) {
    piece.read([&](std::span<const std::byte> rows) { take(piece.header, rows); });
    piece.lent = nullptr;
  }
  for (auto* failures : {&news_.failures, &refused_}) {
    for (FailedOrder& failed : *failures) {
      Lane* const lane = lane_of(failed.ticket);
      if (lane != nullptr) end(*lane, failed.ticket.number, false, std::move(failed.why));
    }
    failures->clear();
  }
  if (num_orders_ == 0) return ended_;
  const auto now = clock_();
  for (Lane& lane : lanes_) {
    late_.clear();
    for (auto& [number, order] : lane.orders) {
      if (now - order.last <= options_.patience) continue;
      if (options_.link->holds(id_of(*order.sequence, number))) {
        order.last = now;  // it waits there, or is being computed
      } else {
        late_.push_back(number);
      }
    }
    for (const uint64_t number : late_) {
      end(lane, number, false, {Code::kDeadlineExceeded, "no page came"});
    }
  }
  return ended_;
}

// Called by the threads that receive pieces: reads what stays as it is, and the lane's Arrivals.
std::optional<LandingPlace> PrefillOrders::begin_landing(const PieceHeader& header) {
  Lane* const lane = lane_of(header.ticket);
  if (lane == nullptr || lane->copies.memory_of(0).empty()) return std::nullopt;
  const auto place = lane->arrivals.begin_landing(header);
  if (!place) return std::nullopt;
  return LandingPlace{.rows = lane->copies.memory_of(place->page),
                      .digest_seed = place->digest_seed};
}

void PrefillOrders::take(const LandedPiece& landed) {
  Lane& lane = *lane_of(landed.header.ticket);
  lane.arrivals.end_landing(landed.header, landed.how);
  if (landed.how == Landed::kWritten) end_piece(lane, landed.header, true);
}

void PrefillOrders::take(const PieceHeader& header, std::span<const std::byte> rows) {
  const TicketId& id = header.ticket;
  Lane* const lane = lane_of(id);
  if (lane == nullptr) {
    ++stats_.pieces[static_cast<size_t>(PieceVerdict::kForeign)];
    return;
  }
  const auto admitted = lane->arrivals.admit(header, rows);
  if (admitted.verdict != PieceVerdict::kAccepted) return;
  const bool ok = lane->copies.load(rows, admitted.page);
  lane->arrivals.end_write(id, header.page, ok);
  end_piece(*lane, header, ok);
}

// A piece has been written, or its copy has failed.
void PrefillOrders::end_piece(Lane& lane, const PieceHeader& header, bool ok) {
  const TicketId& id = header.ticket;
  const auto order = lane.orders.find(id.number);
  if (order == lane.orders.end()) return;
  order->second.last = clock_();
  order->second.cached_tokens = header.cached_tokens;
  if (ok) count_missing(order->second, -kPageSize);
  if (!ok) {
    end(lane, id.number, false, {Code::kInternal, "a page failed"});  // does not allocate
  } else if (lane.arrivals.is_complete(id.number)) {
    end(lane, id.number, true, {});
  }
}

void PrefillOrders::end(Lane& lane, uint64_t number, bool has_arrived, Status why) {
  const auto it = lane.orders.find(number);
  if (it == lane.orders.end()) return;
  Sequence& sequence = *it->second.sequence;
  ended_.push_back({&sequence, has_arrived, it->second.cached_tokens, std::move(why)});
  cancel(sequence);
  ++(has_arrived ? stats_.arrived : stats_.failed);
}

PrefillOrders::Lane* PrefillOrders::lane_of(const TicketId& id) {
  const uint64_t lane = id.engine - engine_;
  return id.epoch == epoch_ && lane < lanes_.size() ? &lanes_[static_cast<size_t>(lane)] : nullptr;
}

PrefillStats PrefillOrders::stats() const {
  PrefillStats stats = stats_;
  for (const Lane& lane : lanes_) {
    for (size_t i = 0; i < kNumPieceVerdicts; ++i) stats.pieces[i] += lane.arrivals.verdicts()[i];
  }
  return stats;
}

}  // namespace fathom
