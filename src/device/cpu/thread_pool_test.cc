#include "device/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace fathom {
namespace {

TEST(ThreadPool, RunsEveryShareOnceAndPublishesItsWrites) {
  ThreadPool pool(4);
  std::vector<int> counts(4, 0);
  constexpr int kRuns = 2000;
  for (int i = 0; i < kRuns; ++i) pool.run([&](int share) { ++counts[share]; });
  EXPECT_EQ(counts, std::vector<int>(4, kRuns));
}

TEST(ThreadPool, WakesFromSleep) {
  ThreadPool pool(3);
  for (int i = 0; i < 20; ++i) {
    std::atomic<int> sum = 0;
    pool.run([&](int share) { sum += share; });
    EXPECT_EQ(sum, 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(ThreadPool, ParallelForCoversEachIndexOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 5, 16, 17, 1000}) {
      for (const int64_t grain : {1, 4, 16}) {
        std::vector<int> hits(static_cast<size_t>(count), 0);
        pool.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          EXPECT_EQ(begin % grain, 0);
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
        EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), int64_t{0}), count);
        EXPECT_EQ(std::count(hits.begin(), hits.end(), 1), count);
      }
    }
  }
}

TEST(ThreadPool, RunsEveryPieceOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (const int count : {0, 1, 3, 7, 8, 100}) {
      std::vector<int> hits(static_cast<size_t>(count), 0);
      pool.run_pieces(count, [&](int piece) { ++hits[static_cast<size_t>(piece)]; });
      EXPECT_EQ(hits, std::vector<int>(static_cast<size_t>(count), 1)) << threads << " threads";
    }
  }
}

TEST(ThreadPool, WhatAShareThrowsComesWhenAllHaveEnded) {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      std::atomic<int> ended = 0;
      const auto body = [&](int share) {
        if (share == round % threads) throw std::runtime_error("a share");
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        ++ended;
      };
      EXPECT_THROW(pool.run(body), std::runtime_error);
      EXPECT_EQ(ended, threads - 1);
    }
    std::atomic<int> ended = 0;
    pool.run([&](int) { ++ended; });
    EXPECT_EQ(ended, threads);
  }
}

// Runs until the condition holds, at most for a minute.
template <typename Condition, typename Body>
bool run_until(ThreadPool& pool, Condition condition, Body body) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition() && std::chrono::steady_clock::now() < end) pool.run(body);
  return condition();
}

template <typename Condition>
bool run_until(ThreadPool& pool, Condition condition) {
  return run_until(pool, condition, [](int) {});
}

TEST(ThreadPool, ParksAWorkerThatLosesItsCpuAndTriesItAgain) {
  ThreadPool pool(2);
  for (int round = 0; round < 5; ++round) {
    ASSERT_TRUE(run_until(pool, [&] { return pool.num_active() == 2; }));
    const auto caller = std::this_thread::get_id();
    const auto lose_cpu = [&](int) {
      // Nothing is computed here, as in a thread whose CPU another program has.
      if (std::this_thread::get_id() != caller) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(200));  // the worker takes the other
      }
    };
    // Beside other programs the worker may begin too late to have a share in many runs.
    ASSERT_TRUE(run_until(
        pool, [&] { return pool.num_active() == 1; }, lose_cpu));
    // All shares are the caller's then.
    std::vector<int> counts(2, 0);
    pool.run([&](int share) {
      if (std::this_thread::get_id() == caller) ++counts[static_cast<size_t>(share)];
    });
    if (pool.num_active() == 1) {
      EXPECT_EQ(counts, std::vector<int>(2, 1));
    }
  }
}

TEST(ThreadPool, ParksAWorkerOnTheCallersCpu) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);  // its workers inherit it
  {
    ThreadPool pool(2);
    EXPECT_TRUE(run_until(pool, [&] { return pool.num_active() == 1; }));
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(ThreadPool, DoesNotParkAWorkerThatComputes) {
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  using Clock = std::chrono::steady_clock;
  // A neighbour may take the worker's CPU at any instant, so a single run proves nothing. A pool
  // that parks workers that compute never keeps one for so many runs in a row.
  constexpr int kInARow = 5;
  int kept = 0, judged = 0;
  for (const auto end = Clock::now() + std::chrono::minutes(1); kept < kInARow;) {
    if (Clock::now() >= end && judged < 10 * kInARow) GTEST_SKIP() << "no CPU for 2 ms";
    ASSERT_LT(Clock::now(), end);
    if (!run_until(pool, [&] { return pool.num_active() == 2; })) continue;
    bool has_cpu = false;  // the worker had one for nearly all of its share
    pool.run([&](int) {
      if (std::this_thread::get_id() == caller) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        return;
      }
      const auto cpu_time = [] {
        timespec time{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
      };
      const auto wall_start = Clock::now();
      const auto cpu_start = cpu_time();
      while (cpu_time() - cpu_start < std::chrono::milliseconds(2)) {
      }
      has_cpu = Clock::now() - wall_start < std::chrono::microseconds(2050);
    });
    if (!has_cpu) continue;
    ++judged;
    kept = pool.num_active() == 2 ? kept + 1 : 0;
  }
}

TEST(ThreadPool, RunsEveryShareOnceWhateverIsParked) {
  for (const int threads : {2, 3, 5}) {
    ThreadPool pool(threads);
    std::vector<int> counts(static_cast<size_t>(threads), 0);
    int runs = 0;
    for (; runs < 3000; ++runs) {
      pool.run([&](int share) {
        ++counts[static_cast<size_t>(share)];
        if (share > 0 && runs % 500 < 3) {
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
      });
    }
    EXPECT_EQ(counts, std::vector<int>(static_cast<size_t>(threads), runs));
  }
}

}  // namespace
}  // namespace fathom
