#include "comm/meeting_board.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "comm/spin.h"
#include "device/cpu/thread_pool.h"

namespace fathom {
namespace {

// Sleeps while the word is `seen`, no longer than `longest`.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec time{};
  time.tv_sec = static_cast<time_t>(seconds.count());
  time.tv_nsec = static_cast<int64_t>((longest - seconds).count());
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

constexpr uint32_t kAborted = 1;
constexpr uint32_t word_of(uint64_t number) { return static_cast<uint32_t>(number) << 1; }

}  // namespace

MeetingBoard::MeetingBoard(int num_ranks, AbortWord& abort_word)
    : num_ranks_(num_ranks),
      spins_(num_ranks <= usable_cores()),
      abort_word_(abort_word),
      slots_{std::vector<Slot>(num_ranks), std::vector<Slot>(num_ranks)},
      last_(num_ranks) {
  watch_ = abort_word_.watch([this] { wake(); });
}

MeetingBoard::~MeetingBoard() { abort_word_.unwatch(watch_); }

void MeetingBoard::arrive(int local, const CollectiveRecord& record, const ConstBytes* mine,
                          std::span<const ConstBytes> to_each) {
  last_[local].record.set(record);
  last_[local].cpu.store(sched_getcpu(), std::memory_order_relaxed);
  Slot& slot = slots_[record.number % 2][local];
  slot.record = record;
  slot.for_all = mine != nullptr;
  if (slot.for_all) {
    slot.mine = *mine;
  } else {
    slot.to_each.assign(to_each.begin(), to_each.end());
  }
  if (num_ranks_ == 1) return;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_ranks_) return;
  arrived_.store(0, std::memory_order_relaxed);
  // seq_cst here and in wait(): either a rank sees that the meeting is complete before it sleeps,
  // or this one sees it among the sleeping.
  completed_.store(word_of(record.number));
  if (sleeping_.load() > 0) futex_wake_all(completed_);
}

bool MeetingBoard::is_complete(uint64_t number) const {
  return (completed_.load(std::memory_order_acquire) & ~kAborted) == word_of(number);
}

bool MeetingBoard::is_in_the_way(uint64_t number) const {
  const int cpu = sched_getcpu();
  return std::any_of(last_.begin(), last_.end(), [&](const LastRecord& last) {
    return last.cpu.load(std::memory_order_relaxed) == cpu && last.record.get().number < number;
  });
}

void MeetingBoard::spin(uint64_t number) const {
  const Clock::time_point until = Clock::now() + kRankSpin;
  for (int spins = 1; !is_complete(number); ++spins) {
    spin_pause();
    if (spins % kSpinsALook != 0) continue;
    if (Clock::now() >= until || abort_word_.aborted() || is_in_the_way(number)) return;
  }
}

MeetingBoard::Outcome MeetingBoard::wait(uint64_t number, Clock::time_point deadline) {
  if (num_ranks_ == 1 || is_complete(number)) return Outcome::kComplete;
  if (spins_) spin(number);
  while (true) {
    const uint32_t seen = completed_.load();
    if (is_complete(number)) return Outcome::kComplete;
    // The order matters: `seen` is older than this look at the word, so that the change that
    // wake() makes to it keeps this rank from sleeping.
    if (abort_word_.aborted()) return Outcome::kAborted;
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return Outcome::kTimedOut;
    sleeping_.fetch_add(1);
    futex_wait(completed_, seen, left);
    sleeping_.fetch_sub(1);
  }
}

void MeetingBoard::wake() {
  completed_.fetch_or(kAborted);
  futex_wake_all(completed_);
}

}  // namespace fathom
