// Random loads on the engine, compared with the serial oracle: each choice's output equals what it
// would be alone, whatever is batched, chunked, preempted, forked or aborted around it.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "engine/engine_load.h"

namespace fathom {
namespace {

// With and without the prefix cache, with one step in flight and with two: the outputs always equal
// the oracle's.
EngineStats run_load(Load load) {
  load.options.prefix_caching = false;
  load.steps_in_flight = 2;
  const EngineStats without = run_once(load);
  EXPECT_EQ(without.pages_cached + without.prefix_hits + without.prefix_queries, 0);
  load.options.prefix_caching = true;
  run_once(load);
  load.steps_in_flight = 1;
  return run_once(load);
}

// The same with offload to host memory and files below a small pool.
EngineStats run_offloaded(Load load) {
  const int64_t page_bytes = FakeRunner(FakeModel{}).page_transfer(0)->page_bytes();
  load.options.kv_offload_bytes = 5 * page_bytes * load.model.num_lanes;
  load.options.kv_offload_dir = testing::TempDir();
  load.options.kv_offload_disk_bytes = 200 * page_bytes * load.model.num_lanes;
  return run_once(load);
}

TEST(Engine, RoomyCache) {
  const EngineStats stats =
      run_load({.model = {.num_pages = 2000}, .options = {.eos_ids = {kFakeEos}}});
  EXPECT_EQ(stats.preemptions, 0);
  EXPECT_GT(stats.prefix_hits, 500);
  EXPECT_GT(stats.pages_cached, 50) << "they stay for the next";
  EXPECT_EQ(stats.prefix_hits, stats.cached_tokens);
  EXPECT_EQ(stats.aborted + stats.failed, 0);
  EXPECT_GT(stats.stopped, 0);
  EXPECT_GT(stats.length, 0);
}

// Lanes with small pools: sequences are preempted, move, and take their pages with them.
TEST(Engine, SeveralLanes) {
  int64_t preemptions = 0, moved = 0, copied = 0;
  for (const int lanes : {2, 3, 8}) {
    Load load{.model = {.num_pages = 14, .num_lanes = lanes},
              .options = {.max_num_seqs = 6,
                          .max_batched_tokens = 70,
                          .eos_ids = {kFakeEos},
                          .preempt_every = 9},
              .num_requests = 100,
              .abort_share = 0.1,
              .seed = static_cast<uint32_t>(lanes)};
    run_load(load);
    load.arrives_at_once = true;
    const EngineStats stats = run_once(load);
    ASSERT_EQ(std::ssize(stats.lanes), lanes);
    preemptions += stats.preemptions;
    moved += stats.sequences_moved;
    copied += stats.pages_copied;
  }
  EXPECT_GT(preemptions, 100);
  EXPECT_GT(moved, 10);
  EXPECT_GT(copied, 10);
}

TEST(Engine, SeveralLanesOffload) {
  for (const bool late : {false, true}) {
    Load load{.model = {.num_pages = 14, .num_lanes = 8},
              .options = {.max_num_seqs = 6,
                          .max_batched_tokens = 70,
                          .eos_ids = {kFakeEos},
                          .preempt_every = 9},
              .num_requests = 100,
              .copies = {.late = late},
              .seed = 4};
    run_offloaded(load);
    load.arrives_at_once = true;
    const EngineStats stats = run_offloaded(load);
    EXPECT_GT(stats.prefix_returns, 0);
    EXPECT_GT(stats.pages_copied, 0);
  }
}

TEST(Engine, ChoicesSharePagesWithoutThePrefixCacheToo) {
  Load load{.model = {.num_pages = 2000}, .options = {.eos_ids = {kFakeEos}}};
  load.options.prefix_caching = false;
  EXPECT_GT(run_once(load).cached_tokens, 0);
}

TEST(Engine, EverySmallChunkSize) {
  for (const int64_t budget : {1, 2, 3, 7, 16, 63, 64, 65, 130}) {
    run_load({.model = {.num_pages = 40},
              .options = {.max_num_seqs = std::min<int64_t>(budget, 8),
                          .max_batched_tokens = budget,
                          .max_prompt_logit_rows = 1 + budget / 4,
                          .eos_ids = {kFakeEos}},
              .num_requests = 14,
              .max_prompt = 150,
              .max_output = 30,
              .seed = static_cast<uint32_t>(budget)});
  }
}

TEST(Engine, PagesRunOut) {
  int64_t preemptions = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    // 280 tokens take at most 5 pages: the largest request just fits into the smallest cache.
    preemptions += run_load({.model = {.num_pages = 5 + seed},
                             .options = {.max_num_seqs = 12,
                                         .max_batched_tokens = 12 + 20 * (seed % 4),
                                         .max_prompt_logit_rows = 5,
                                         .eos_ids = {kFakeEos}},
                             .num_requests = 30,
                             .seed = seed})
                       .preemptions;
  }
  EXPECT_GT(preemptions, 20) << "this test is about preemption";
}

TEST(Engine, PagesComeBackFromHostMemoryAndFiles) {
  int64_t returns = 0;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    const EngineStats stats = run_offloaded({.model = {.num_pages = 5 + seed},
                                             .options = {.max_num_seqs = 12,
                                                         .max_batched_tokens = 60,
                                                         .max_prompt_logit_rows = 5,
                                                         .eos_ids = {kFakeEos},
                                                         .preempt_every = seed % 2 == 0 ? 0 : 5},
                                             .num_requests = 60,
                                             .abort_share = seed % 3 == 0 ? 0.2 : 0,
                                             .shared_share = 1,
                                             .steps_in_flight = 1 + static_cast<int>(seed) / 3,
                                             .seed = seed});
    EXPECT_GT(stats.pages_stored, 5);
    returns += stats.prefix_returns;
  }
  EXPECT_GT(returns, 10) << "how many depends on how arrivals and steps fall together";
}

Load small_cache(uint32_t seed) {
  return {.model = {.num_pages = 5 + seed},
          .options = {.max_num_seqs = 12,
                      .max_batched_tokens = 60,
                      .max_prompt_logit_rows = 5,
                      .eos_ids = {kFakeEos},
                      .preempt_every = seed % 2 == 0 ? 0 : 5},
          .num_requests = 60,
          .abort_share = seed % 3 == 0 ? 0.2 : 0,
          .shared_share = 1,
          .steps_in_flight = 1 + static_cast<int>(seed % 2),
          .seed = seed};
}

TEST(Engine, PagesThatComeBackLateAndOutOfOrder) {
  int64_t returns = 0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    Load load = small_cache(seed);
    load.copies.late = true;
    const EngineStats stats = run_offloaded(load);
    EXPECT_EQ(stats.failed, 0);
    returns += stats.prefix_returns;
  }
  EXPECT_GT(returns, 10) << "how many depends on how arrivals and steps fall together";
}

// A failed copy changes no output (run_once() compares them) and loses no page (the engine recounts
// them when it is idle).
TEST(Engine, EachCopyOfAPageMayFail) {
  std::atomic<int64_t> count = 0;
  for (const bool late : {false, true}) {
    Load load = small_cache(1);
    load.num_requests = 16;
    load.max_output = 30;
    load.copies.late = late;
    load.copies.count = &count;
    const int64_t before = count;
    run_offloaded(load);
    const int64_t most = count - before;
    for (int64_t n = 1; n <= most && !HasFailure(); ++n) {
      SCOPED_TRACE(testing::Message() << "copy " << n << " fails");
      load.copies.fail_at = n;
      EXPECT_EQ(run_offloaded(load).failed, 0);
    }
    load.copies.fail_at = 0;
    for (const int64_t every : {1, 2, 3, 10}) {
      load.copies.fail_every = every;
      EXPECT_EQ(run_offloaded(load).failed, 0) << every;
    }
  }
  EXPECT_GT(count, 20) << "how many depends on how arrivals and steps fall together";
}

TEST(Engine, OffloadOptionsThatCannotBeAreRefused) {
  const auto refusal = [](const EngineOptions& options) {
    return Engine::create(options, std::make_unique<FakeRunner>(FakeModel{}), nullptr)
        .error()
        .message;
  };
  EXPECT_EQ(refusal({.prefix_caching = false, .kv_offload_bytes = 1 << 20}),
            "kv_offload_bytes and kv_offload_dir need prefix_caching, which is off");
  EXPECT_EQ(refusal({.kv_offload_bytes = -1}), "kv_offload_bytes is -1, must be 0 or more");
  EXPECT_EQ(refusal({.kv_offload_dir = "/no/such", .kv_offload_disk_bytes = 1 << 20}),
            "kv_offload_dir /no/such: No such file or directory");
  FakeModel lanes;
  lanes.num_lanes = 2;
  const int64_t page_bytes = FakeRunner(lanes).page_transfer(0)->page_bytes();
  EXPECT_EQ(Engine::create({.kv_offload_bytes = 2 * page_bytes - 1},
                           std::make_unique<FakeRunner>(lanes), nullptr)
                .error()
                .message,
            fmt::format("kv_offload_bytes is {}, less than one page of {} bytes in each of 2 lanes",
                        2 * page_bytes - 1, page_bytes));
}

TEST(Engine, ForcedPreemptionChangesNothing) {
  for (const int64_t every : {1, 3, 7}) {
    const EngineStats stats = run_load({.model = {.num_pages = 100},
                                        .options = {.max_num_seqs = 8,
                                                    .max_batched_tokens = 100,
                                                    .eos_ids = {kFakeEos},
                                                    .preempt_every = every},
                                        .num_requests = 30,
                                        .seed = static_cast<uint32_t>(every)});
    EXPECT_GT(stats.preemptions, 10);
    EXPECT_LT(stats.pages_used + stats.pages_cached, stats.pages_total);
  }
}

TEST(Engine, AbortsAtRandomMoments) {
  int64_t aborted = 0;
  for (uint32_t seed = 0; seed < 25; ++seed) {
    aborted += run_load({.model = {.num_pages = 6 + seed},
                         .options = {.max_num_seqs = 6,
                                     .max_batched_tokens = 10 + 10 * (seed % 5),
                                     .max_prompt_logit_rows = 4,
                                     .eos_ids = {kFakeEos},
                                     .preempt_every = seed % 3 == 0 ? 5 : 0},
                         .num_requests = 40,
                         .abort_share = 0.5,
                         .seed = 100 + seed})
                   .aborted;
  }
  EXPECT_GT(aborted, 100);
}

}  // namespace
}  // namespace fathom
