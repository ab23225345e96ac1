#include "comm/group.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/random.h"
#include "comm/collectives.h"
#include "comm/contains.h"
#include "comm/rank_threads.h"

namespace fathom {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

ConstBytes bytes_of(const uint64_t& value) { return std::as_bytes(std::span(&value, 1)); }

uint64_t number_in(ConstBytes bytes) {
  uint64_t value = 0;
  EXPECT_EQ(bytes.size(), sizeof value);
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

TEST(Group, MeetsInOrderUnderRandomDelays) {
  constexpr int kMeetings = 10000;
  for (const int ranks : {1, 2, 3, 8}) {
    GroupOptions options;
    options.at_meeting = [](const MeetingPoint& at) {
      if (at.phase != MeetingPhase::kBefore) return;
      const int rank = at.rank;
      const uint64_t number = at.number;
      // Some are late by a little, few by more than a waiting rank spins.
      const uint64_t chance = random_bits(3, rank, number) % 1000;
      if (chance < 2) std::this_thread::sleep_for(microseconds(200));
      if (chance < 100) std::this_thread::yield();
    };
    const auto ends = run_ranks(
        ranks,
        [&](Group& group) {
          uint64_t given[2];
          std::vector<uint64_t> to_each[2];
          for (uint64_t n = 0; n < kMeetings; ++n) {
            const uint64_t me = group.rank();
            if (random_bits(5, 0, n) % 2 == 0) {
              given[n % 2] = mix64(n * 64 + me);
              const auto all = group.meet(Collective::kDispatch, bytes_of(given[n % 2]));
              for (uint64_t r = 0; r < all.size(); ++r) {
                ASSERT_EQ(number_in(all[r]), mix64(n * 64 + r));
              }
            } else {
              std::vector<ConstBytes> spans;
              std::vector<uint64_t>& values = to_each[n % 2];
              values.resize(ranks);
              for (int r = 0; r < ranks; ++r) values[r] = mix64((n * 64 + me) * 64 + r);
              spans.reserve(ranks);
              for (const uint64_t& value : values) spans.push_back(bytes_of(value));
              const auto all = group.meet(Collective::kCombine, spans);
              for (uint64_t r = 0; r < all.size(); ++r) {
                ASSERT_EQ(number_in(all[r]), mix64((n * 64 + r) * 64 + me));
              }
            }
          }
          EXPECT_EQ(group.last_of(group.rank()).number, kMeetings);
          barrier(group);  // the others have read the last
        },
        options);
    for (const RankEnd& end : ends) EXPECT_TRUE(end.returned) << end.what;
  }
}

TEST(Group, SeveralGroupsOfTheSameThreads) {
  // Ranks 0 … 3 as two pairs and as two other pairs: their boards must not mix.
  AbortWord abort_word;
  auto world = make_local_groups(4, abort_word);
  std::vector<std::unique_ptr<Group>> rows[2], columns[2];
  for (int i = 0; i < 2; ++i) {
    rows[i] = make_local_groups(2, abort_word, {.name = "row", .world_ranks = {2 * i, 2 * i + 1}});
    columns[i] = make_local_groups(2, abort_word, {.name = "column", .world_ranks = {i, i + 2}});
  }
  const auto ends = run_ranks(world, abort_word, [&](Group& group) {
    const int rank = group.rank();
    Group& row = *rows[rank / 2][rank % 2];
    Group& column = *columns[rank % 2][rank / 2];
    EXPECT_EQ(row.world_rank(row.rank()), rank);
    EXPECT_EQ(column.world_rank(column.rank()), rank);
    for (int n = 0; n < 1000; ++n) {
      std::vector<float> x = {static_cast<float>(1 << rank)};
      all_reduce(row, x, x);
      ASSERT_EQ(x[0], rank < 2 ? 3 : 12);
      all_reduce(column, x, x);
      ASSERT_EQ(x[0], 15);
      all_reduce(group, x, x);
      ASSERT_EQ(x[0], 60);
    }
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.returned) << end.what;
}

TEST(Group, AMismatchIsFoundByBoth) {
  const auto ends = run_ranks(2, [](Group& group) {
    barrier(group);
    const std::vector<std::byte> bytes(group.rank() == 0 ? 14336 : 4096);
    group.meet(group.rank() == 0 ? Collective::kAllReduce : Collective::kAllGather, bytes);
  });
  EXPECT_EQ(ends[0].what,
            "rank 1 is in all_gather #2 (4096 bytes), this rank 0 in all_reduce #2 (14336 bytes)");
  EXPECT_EQ(ends[1].what,
            "rank 0 is in all_reduce #2 (14336 bytes), this rank 1 in all_gather #2 (4096 bytes)");
}

TEST(Group, UnequalBytesAreFoundWhereTheyMustBeEqual) {
  for (int kind = 0; kind < kNumCollectives; ++kind) {
    const auto collective = static_cast<Collective>(kind);
    const auto ends = run_ranks(2, [&](Group& group) {
      const std::vector<std::byte> bytes(group.rank() == 0 ? 64 : 60);
      group.meet(collective, bytes);
      barrier(group);
    });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(ends[rank].returned, !needs_equal_bytes(collective)) << name_of(collective);
      if (ends[rank].returned) continue;
      EXPECT_TRUE(contains(ends[rank].what, name_of(collective) + " #1 (60 bytes)"))
          << ends[rank].what;
      EXPECT_TRUE(contains(ends[rank].what, name_of(collective) + " #1 (64 bytes)"))
          << ends[rank].what;
    }
  }
}

TEST(Group, PartsOfAnotherSizeAreFound) {
  // The totals agree; what rank 1 gives to rank 0 does not fit rank 0's own part.
  const auto ends = run_ranks(2, [](Group& group) {
    const std::vector<std::byte> bytes(100);
    const ConstBytes all = bytes;
    const size_t cut = group.rank() == 0 ? 60 : 40;
    const ConstBytes parts[] = {all.first(cut), all.subspan(cut)};
    group.meet(Collective::kReduceScatter, parts);
  });
  EXPECT_TRUE(contains(ends[0].what, "it gave this one 40 bytes of them instead of 60"))
      << ends[0].what;
  EXPECT_FALSE(ends[1].returned);
}

// One way in which a rank of each kind of collective fails.
enum class Fault { kThrowsBefore, kThrowsInHook, kThrowsAfter, kAbortsWhileOthersWait };

TEST(Abort, ReachesEveryRankFromEveryCollective) {
  for (const Fault fault : {Fault::kThrowsBefore, Fault::kThrowsInHook, Fault::kThrowsAfter,
                            Fault::kAbortsWhileOthersWait}) {
    for (int kind = 0; kind < kNumCollectives; ++kind) {
      const auto collective = static_cast<Collective>(kind);
      constexpr int kFailing = 2;
      GroupOptions options;
      options.limit = std::chrono::hours(1);  // nothing else may end the wait
      options.at_meeting = [&](const MeetingPoint& at) {
        if (at.phase != MeetingPhase::kBefore) return;
        const int rank = at.rank;
        const uint64_t number = at.number;
        if (fault == Fault::kThrowsInHook && rank == kFailing && number == 5) {
          throw std::runtime_error("out of memory");
        }
      };
      const auto ends = run_ranks(
          4,
          [&](Group& group) {
            const std::byte given[1] = {};
            for (int n = 1; n <= 10; ++n) {
              if (n == 5 && group.rank() == kFailing) {
                if (fault == Fault::kThrowsBefore) throw std::runtime_error("out of memory");
                if (fault == Fault::kAbortsWhileOthersWait) {
                  for (const int other : {0, 1, 3}) {
                    while (group.last_of(other).number < 5) std::this_thread::yield();
                  }
                  std::this_thread::sleep_for(milliseconds(1));  // they sleep by now, probably
                  group.abort(Status{Code::kInternal, "out of memory"});
                  return;
                }
              }
              group.meet(collective, given);
              if (n == 5 && group.rank() == kFailing && fault == Fault::kThrowsAfter) {
                throw std::runtime_error("out of memory");
              }
            }
          },
          options);
      for (const int rank : {0, 1, 3}) {
        EXPECT_TRUE(ends[rank].comm_error);
        EXPECT_TRUE(contains(ends[rank].what, "rank 2 failed: out of memory (rank " +
                                                  std::to_string(rank) + " was in " +
                                                  name_of(collective) +
                                                  (fault == Fault::kThrowsAfter ? " #6" : " #5")))
            << ends[rank].what;
      }
    }
  }
}

TEST(Abort, ReachesOtherGroupsOfTheProcess) {
  AbortWord abort_word;
  auto pair = make_local_groups(2, abort_word, {.name = "tp 0", .world_ranks = {0, 1}});
  auto other = make_local_groups(2, abort_word, {.name = "tp 1", .world_ranks = {2, 3}});
  std::thread failing([&] {
    while (pair[0]->last_of(0).number < 1) std::this_thread::yield();
    run_rank(abort_word, 3, [] { throw std::runtime_error("a bad expert"); });
  });
  try {
    barrier(*pair[0]);
    ADD_FAILURE() << "rank 1 never comes";
  } catch (const CommError& failure) {
    EXPECT_STREQ(failure.what(),
                 "rank 3 failed: a bad expert (rank 0 was in barrier #1 (0 bytes) of group tp 0)");
    EXPECT_EQ(failure.failed_rank(), 3);
    EXPECT_EQ(failure.status().code, Code::kInternal);
  }
  failing.join();
  // And who comes later does not wait at all.
  EXPECT_THROW(barrier(*other[0]), CommError);
}

TEST(Abort, TheFirstReasonStays) {
  AbortWord abort_word;
  std::atomic<int> woken{0}, first{0};
  const int watch = abort_word.watch([&] { ++woken; });
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int rank = 0; rank < 8; ++rank) {
    threads.emplace_back([&, rank] {
      if (abort_word.abort(rank, Status{Code::kInternal, std::to_string(rank)})) ++first;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(first, 1);
  EXPECT_EQ(woken, 1);
  EXPECT_EQ(abort_word.reason().status.message, std::to_string(abort_word.reason().rank));
  abort_word.unwatch(watch);
  const int late = abort_word.watch([&] { ++woken; });
  EXPECT_EQ(woken, 2);
  abort_word.unwatch(late);
}

TEST(Limit, NamesTheRanksThatDidNotCome) {
  GroupOptions options;
  options.limit = milliseconds(30);
  for (int kind = 0; kind < kNumCollectives; ++kind) {
    const auto collective = static_cast<Collective>(kind);
    AbortWord abort_word;
    auto groups = make_local_groups(4, abort_word, options);
    const auto ends = run_ranks(groups, abort_word, [&](Group& group) {
      const std::vector<std::byte> bytes(12);
      if (group.rank() % 2 == 0) group.meet(collective, bytes);
    });
    // Rank 0 or rank 2 was the first to give up; the other says the same or learns of it.
    for (const int rank : {0, 2}) {
      EXPECT_TRUE(ends[rank].comm_error);
      for (const std::string& part : {"waited 0.03 s in " + name_of(collective) + " #1 (12 bytes)",
                                      std::string("rank 1 (last: no collective yet)"),
                                      std::string("rank 3 (last: no collective yet)")}) {
        EXPECT_TRUE(contains(ends[rank].what, part)) << ends[rank].what;
      }
    }
  }
}

TEST(Limit, SaysWhereTheMissingRankWasLast) {
  GroupOptions options;
  options.limit = milliseconds(30);
  const auto ends = run_ranks(
      2,
      [](Group& group) {
        std::vector<float> x(16);
        all_reduce(group, x, x);
        if (group.rank() == 0) barrier(group);
      },
      options);
  EXPECT_EQ(ends[0].what,
            "rank 0 waited 0.03 s in barrier #2 (0 bytes) for rank 1 (last: all_reduce #1 (64 "
            "bytes))");
}

TEST(Group, RanksThatSleepAreWoken) {
  // Rank 1 comes when rank 0 has certainly stopped spinning; many times, so that a wake that is
  // lost now and then ends in the limit.
  GroupOptions options;
  options.at_meeting = [](const MeetingPoint& at) {
    if (at.phase != MeetingPhase::kBefore) return;
    const int rank = at.rank;
    const uint64_t number = at.number;
    if (rank == static_cast<int>(number % 2)) std::this_thread::sleep_for(microseconds(300));
  };
  const auto ends = run_ranks(
      2,
      [](Group& group) {
        for (int n = 0; n < 500; ++n) barrier(group);
      },
      options);
  for (const RankEnd& end : ends) EXPECT_TRUE(end.returned) << end.what;
}

}  // namespace
}  // namespace fathom
