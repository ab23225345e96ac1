#include "device/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>

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

}  // namespace
}  // namespace fathom
