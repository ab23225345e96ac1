// Tickets over a channel that drops, delays, duplicates, reorders, truncates and alters messages,
// with cancelled requests, failed writes and restarts, in a pool of 24 pages: what completes has
// exactly its own rows, as long as it is held, and at the end no page is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

#include "base/random.h"
#include "transfer/arrivals.h"
#include "transfer/piece_wire.h"

namespace fathom {
namespace {

constexpr int64_t kNumPages = 24, kLossyPageBytes = 96, kMostPages = 6;
constexpr double kFaultShare = 0.05;
constexpr int64_t kPatience = 400;  // events after which a request gives up its ticket

using Rows = std::vector<std::byte>;

Rows rows_of(uint64_t text, int64_t page) {
  Rows rows(kLossyPageBytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<std::byte>(random_bits(text, static_cast<uint64_t>(page), i));
  }
  return rows;
}

class Channel {
 public:
  explicit Channel(std::mt19937& random) : random_(&random) {}

  void send(const Rows& message) {
    log_.push_back(message);
    if (log_.size() > 200) log_.erase(log_.begin());
    if (fault()) return;  // dropped
    const int copies = fault() ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
      Rows sent = message;
      if (fault()) sent.resize((*random_)() % sent.size());
      if (fault() && !sent.empty()) {
        sent[(*random_)() % sent.size()] ^= static_cast<std::byte>(1 + (*random_)() % 255);
      }
      waiting_.push_back({std::move(sent), fault() ? 300 + (*random_)() % 1000 : 0});
    }
  }
  // Sends again what went long ago.
  void replay() {
    if (!log_.empty()) waiting_.push_back({log_[(*random_)() % log_.size()], 0});
  }
  // Any message that is not delayed; empty: none.
  Rows receive() {
    for (auto& message : waiting_) message.delay -= message.delay > 0;
    std::vector<size_t> ready;
    for (size_t i = 0; i < waiting_.size(); ++i) {
      if (waiting_[i].delay == 0) ready.push_back(i);
    }
    if (ready.empty()) return {};
    const size_t chosen = fault() ? ready[(*random_)() % ready.size()] : ready.front();
    Rows message = std::move(waiting_[chosen].bytes);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(chosen));
    return message;
  }

 private:
  struct Waiting {
    Rows bytes;
    uint64_t delay = 0;
  };
  bool fault() { return std::uniform_real_distribution<>()(*random_) < kFaultShare; }

  std::mt19937* random_;
  std::vector<Waiting> waiting_;
  std::vector<Rows> log_;
};

struct Counts {
  int64_t started = 0, right = 0, given_up = 0, restarts = 0, malformed = 0, drained_late = 0;
  std::array<int64_t, kNumPieceVerdicts> verdicts{};
};

class Simulation {
 public:
  Simulation(uint32_t seed, bool with_digests)
      : random_(seed), channel_(random_), with_digests_(with_digests) {
    restart();
  }

  void step() {
    ++now_;
    switch (random_() % 16) {
      case 0:
      case 1:
        start_request();
        break;
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
        send_a_piece();
        break;
      case 7:
        if (random_() % 8 == 0) channel_.replay();
        break;
      case 8:
        if (random_() % 10 == 0) cancel_one();
        break;
      case 9:
      case 10:
        end_a_write();
        break;
      case 11:
        if (random_() % 100 == 0) restart();
        break;
      default:
        deliver();
    }
    settle();
    counts.drained_late += arrivals_->num_draining() > 0;
    ASSERT_EQ(pool_->free() + pool_->used() + pool_->cached() + pool_->quarantined(), kNumPages);
    pool_->check_invariant();
  }

  void finish() {
    while (!requests_.empty()) give_up(requests_.begin()->first);
    while (!writes_.empty()) end_a_write();
    for (const Held& held : held_) release(held);
    held_.clear();
    note_verdicts();
    EXPECT_EQ(arrivals_->num_open() + arrivals_->num_draining(), 0);
    EXPECT_EQ(pool_->free(), kNumPages) << "pages are lost";
    EXPECT_EQ(counts.started, counts.right + counts.given_up);
  }

  Counts counts;

 private:
  struct Request {
    uint64_t text = 0;
    Ticket ticket;
    std::vector<int32_t> pages;
    int64_t since = 0;
  };
  struct Job {  // of the sender, who never hears that a ticket is closed
    uint64_t text = 0;
    Ticket ticket;
    int64_t next = 0;
  };
  struct Write {
    TicketId ticket;
    int64_t page = 0;
    int32_t target = -1;
    Rows rows;
  };
  struct Held {  // complete: decoding
    uint64_t text = 0;
    int64_t first_page = 0;
    std::vector<int32_t> pages;
    int64_t until = 0;
  };

  void restart() {
    if (arrivals_ != nullptr) {
      note_verdicts();
      counts.given_up += std::ssize(requests_);
      ++counts.restarts;
    }
    requests_.clear();
    held_.clear();
    writes_.clear();
    memory_.assign(kNumPages, Rows(kLossyPageBytes));
    pool_ = std::make_unique<PagePool>(kNumPages);
    arrivals_ = std::make_unique<Arrivals>(ArrivalsOptions{.engine = 1,
                                                           .epoch = ++epoch_,
                                                           .page_bytes = kLossyPageBytes,
                                                           .form = 5,
                                                           .with_digests = with_digests_},
                                           *pool_);
  }

  void note_verdicts() {
    for (size_t i = 0; i < kNumPieceVerdicts; ++i) counts.verdicts[i] += arrivals_->verdicts()[i];
  }

  void start_request() {
    Request request;
    request.text = ++texts_;
    request.since = now_;
    if (!pool_->allocate(1 + static_cast<int64_t>(random_() % kMostPages), request.pages)) return;
    request.ticket =
        arrivals_->open(request.text, static_cast<int64_t>(random_() % 3), request.pages);
    jobs_.push_back(
        {.text = request.text, .ticket = request.ticket, .next = request.ticket.first_page});
    ++counts.started;
    requests_.emplace(request.ticket.id.number, std::move(request));
  }

  void send_a_piece() {
    if (jobs_.empty()) return;
    const size_t chosen = random_() % jobs_.size();
    Job& job = jobs_[chosen];
    Ticket ticket = job.ticket;
    if (random_() % 50 == 0) ticket.id.engine = 2;  // sent to the wrong receiver
    if (random_() % 50 == 0) ticket.form = 6;
    const Rows rows = rows_of(job.text, job.next);
    Rows message;
    write_piece(make_piece(ticket, job.next, rows), rows, message);
    channel_.send(message);
    // Goes one page too far now and then.
    const bool goes_on = random_() % 20 == 0;
    if (++job.next < ticket.first_page + ticket.num_pages + (goes_on ? 1 : 0)) return;
    jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(chosen));
  }

  void deliver() {
    const Rows message = channel_.receive();
    if (message.empty()) return;
    const auto piece = read_piece(message);
    if (!piece) {
      ++counts.malformed;
      return;
    }
    const auto admitted = arrivals_->admit(piece->header, piece->rows);
    if (admitted.verdict != PieceVerdict::kAccepted) return;
    Write write{piece->header.ticket, piece->header.page, admitted.page,
                Rows(piece->rows.begin(), piece->rows.end())};
    // The device has written a part of it when the next event comes.
    std::copy_n(write.rows.begin(), random_() % kLossyPageBytes,
                memory_[static_cast<size_t>(write.target)].begin());
    writes_.push_back(std::move(write));
  }

  void end_a_write() {
    if (writes_.empty()) return;
    const size_t chosen = random_() % writes_.size();
    const Write& write = writes_[chosen];
    const bool ok = random_() % 16 != 0;
    if (ok) memory_[static_cast<size_t>(write.target)] = write.rows;
    arrivals_->end_write(write.ticket, write.page, ok);
    writes_.erase(writes_.begin() + static_cast<std::ptrdiff_t>(chosen));
  }

  void cancel_one() {
    if (requests_.empty()) return;
    give_up(
        std::next(requests_.begin(), static_cast<int64_t>(random_() % requests_.size()))->first);
  }

  void give_up(uint64_t number) {
    arrivals_->close(number);
    for (const int32_t page : requests_.at(number).pages) pool_->release(page);
    requests_.erase(number);
    ++counts.given_up;
  }

  // Takes what is complete, gives up what has failed or waits too long, and ends what is held.
  void settle() {
    std::vector<uint64_t> ended;
    for (auto& [number, request] : requests_) {
      if (arrivals_->is_complete(number)) {
        arrivals_->close(number);
        held_.push_back({request.text, request.ticket.first_page, request.pages,
                         now_ + static_cast<int64_t>(random_() % 300)});
        expect_right(held_.back());
        ++counts.right;
        ended.push_back(number);
      }
    }
    for (const uint64_t number : ended) requests_.erase(number);
    ended.clear();
    for (const auto& [number, request] : requests_) {
      if (arrivals_->has_failed(number) || now_ - request.since > kPatience) {
        ended.push_back(number);
      }
    }
    for (const uint64_t number : ended) give_up(number);
    std::erase_if(held_, [&](const Held& held) {
      if (held.until > now_) return false;
      release(held);
      return true;
    });
  }

  void expect_right(const Held& held) {
    for (size_t i = 0; i < held.pages.size(); ++i) {
      ASSERT_EQ(memory_[static_cast<size_t>(held.pages[i])],
                rows_of(held.text, held.first_page + static_cast<int64_t>(i)))
          << "text " << held.text << " has another's rows in its page " << i;
    }
  }

  void release(const Held& held) {
    expect_right(held);
    for (const int32_t page : held.pages) pool_->release(page);
  }

  std::mt19937 random_;
  Channel channel_;
  const bool with_digests_;
  std::vector<Rows> memory_;  // [kNumPages]
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<Arrivals> arrivals_;
  std::map<uint64_t, Request> requests_;  // by their tickets' numbers
  std::vector<Job> jobs_;
  std::vector<Write> writes_;
  std::vector<Held> held_;
  int64_t now_ = 0;
  uint64_t texts_ = 0, epoch_ = 0;
};

TEST(LossyChannel, RightOrAnErrorAndNothingLostOver100000Events) {
  Simulation simulation(1, /*with_digests=*/true);
  for (int64_t event = 0; event < 100'000; ++event) {
    simulation.step();
    if (testing::Test::HasFatalFailure()) FAIL() << "at event " << event;
  }
  simulation.finish();
  const Counts& counts = simulation.counts;
  EXPECT_GT(counts.right, 1000);
  EXPECT_GT(counts.given_up, 100);
  EXPECT_GT(counts.restarts, 10);
  EXPECT_GT(counts.malformed, 100);
  EXPECT_GT(counts.drained_late, 50) << "tickets were closed while their pages were written";
  for (size_t i = 0; i < kNumPieceVerdicts; ++i) {
    if (static_cast<PieceVerdict>(i) == PieceVerdict::kWrongSize) continue;  // by read_piece()
    EXPECT_GT(counts.verdicts[i], 10) << name_of(static_cast<PieceVerdict>(i));
  }
}

TEST(LossyChannel, OtherSeeds) {
  for (uint32_t seed = 2; seed < 10; ++seed) {
    Simulation simulation(seed, /*with_digests=*/true);
    for (int64_t event = 0; event < 10'000; ++event) {
      simulation.step();
      if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed << " at event " << event;
    }
    simulation.finish();
  }
}

}  // namespace
}  // namespace fathom
