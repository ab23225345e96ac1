// Where the ranks of one process meet: each publishes spans, then all wait for the last.
//
// Shared by the groups of these ranks. Nothing is copied. There are two slots a rank, in turns: a
// rank that is in meeting n + 1 writes slots that nobody reads any more, because all ranks have
// left meeting n - 1 when meeting n is complete.
//
// A wait spins for a short while, because a decode step meets a hundred times with some
// microseconds of work between, and then sleeps. Where there are more ranks than CPUs it sleeps at
// once, and so it does when a rank that it waits for was last seen on the waiting one's CPU: that
// rank needs the CPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/abort_word.h"
#include "comm/collective.h"
#include "comm/growing_buffer.h"

namespace fathom {

using ConstBytes = std::span<const std::byte>;

class MeetingBoard {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Outcome { kComplete, kAborted, kTimedOut };

  // num_ranks >= 1, in one process.
  MeetingBoard(int num_ranks, AbortWord& abort_word);
  ~MeetingBoard();
  MeetingBoard(const MeetingBoard&) = delete;
  MeetingBoard& operator=(const MeetingBoard&) = delete;

  // `local` counts the ranks of the board. Rank `local` publishes what it gives in its meeting
  // `record.number` and comes to the meeting: `mine` for all, or, if that is nullptr, to_each[r]
  // for rank r of the group. Its thread only.
  void arrive(int local, const CollectiveRecord& record, const ConstBytes* mine,
              std::span<const ConstBytes> to_each);
  // Waits until all ranks have come to meeting `number`. Its thread only, after arrive().
  Outcome wait(uint64_t number, Clock::time_point deadline);

  // Room for what rank `local` gives in meeting `number`, aligned to 64. It stays until the board
  // ends or the rank asks for meeting number + 2. Its thread only.
  std::span<std::byte> staging(int local, uint64_t number, size_t bytes) {
    return slots_[number % 2][local].staging.take(bytes);
  }

  // What rank `local` published in meeting `number`; valid when wait() returned kComplete.
  const CollectiveRecord& record(int local, uint64_t number) const {
    return slots_[number % 2][local].record;
  }
  ConstBytes given(int local, uint64_t number, int to_rank) const {
    const Slot& slot = slots_[number % 2][local];
    return slot.for_all ? slot.mine : slot.to_each[to_rank];
  }
  // Where rank `local` is or was last. Any thread.
  CollectiveRecord last_of(int local) const { return last_[local].record.get(); }

 private:
  struct alignas(64) Slot {
    CollectiveRecord record;
    bool for_all = true;
    ConstBytes mine;
    std::vector<ConstBytes> to_each;
    GrowingBuffer staging = {};
  };
  struct alignas(64) LastRecord {
    SharedRecord record;
    std::atomic<int> cpu{-1};  // on which the rank came to it
  };

  bool is_complete(uint64_t number) const;
  // Whether a rank that has not come to meeting `number` was last on the CPU of this thread.
  bool is_in_the_way(uint64_t number) const;
  void spin(uint64_t number) const;
  void wake();

  const int num_ranks_;
  const bool spins_;
  AbortWord& abort_word_;
  std::vector<Slot> slots_[2];
  std::vector<LastRecord> last_;

  alignas(64) std::atomic<int> arrived_{0};  // of the current meeting
  // The last complete meeting's number << 1; the lowest bit changes the word on abort, so that no
  // rank falls asleep on it. A futex.
  alignas(64) std::atomic<uint32_t> completed_{0};
  std::atomic<int> sleeping_{0};
  int watch_ = -1;
};

}  // namespace fathom
