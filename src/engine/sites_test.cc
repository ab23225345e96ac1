// Two sites of one process over the fake model: each choice's output equals the serial oracle's,
// whatever the roles are and whatever happens on the way.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "engine/engine_load.h"
#include "engine/event_queue.h"
#include "engine/plain_request.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

Load sites_load(uint32_t seed = 1) {
  Load load{.model = {.num_pages = 200},
            .options = {.max_num_seqs = 8, .max_batched_tokens = 60, .eos_ids = {kFakeEos}},
            .seed = seed,
            .separation = Separation{.one_process = true}};
  load.options.prefill.least_rows = 0;
  return load;
}

// Roles that do not change in loads like these.
constexpr RoleLimits kFixed{.backlog_from = 1 << 20, .no_backlog_to = -1};
// Roles that change at every chance.
constexpr RoleLimits kLoose{
    .backlog_from = 1, .no_backlog_to = 1 << 20, .idle_to = 1 << 20, .decode_share = 1};

// Chunked prompts, prefixes, n up to 4, log-probabilities, seeds, stops: what random_request() has.
TEST(Sites, AnswersAreThoseOfOneEngine) {
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    Load load = sites_load(seed);
    load.separation->roles = kFixed;
    load.separation->with_digests = seed % 2 == 0;
    load.steps_in_flight = 1 + static_cast<int>(seed % 2);
    load.separation->steps_in_flight = 1 + static_cast<int>(seed / 2 % 2);
    load.options.prefix_caching = seed % 3 != 0;
    const EngineStats stats = run_once(load);
    EXPECT_EQ(stats.prefill.failed + stats.prefill.computed_here + stats.prefill.refused, 0);
    EXPECT_EQ(stats.prefill.orders, stats.prefill.arrived);
    EXPECT_GT(stats.prefill.arrived, 40);
    EXPECT_GT(stats.prefill.pages_sent, 40);
    EXPECT_EQ(stats.failed, 0);
    EXPECT_EQ(stats.roles->decode_changes + stats.roles->prefill_changes, 0);
    EXPECT_EQ(stats.lanes.size(), 2u);
  }
}

TEST(Sites, DraftsAndGrammars) {
  for (const auto kind : {FakeDrafts::Kind::kRight, FakeDrafts::Kind::kAdversarial}) {
    Load load = sites_load(static_cast<uint32_t>(kind) + 40);
    load.drafts = {.most = 3, .kind = kind};
    load.separation->roles = kLoose;
    EXPECT_GT(run_once(load).speculation.draft_tokens, 100);
  }
}

// Lanes on both sides, small pools, aborts, preemptions, copies that fail or end late.
TEST(Sites, WhateverHappens) {
  int64_t preemptions = 0, aborted = 0, failed = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    Load load = sites_load(100 + seed);
    load.model.num_lanes = 1 + static_cast<int>(seed % 3);
    load.model.num_pages = seed % 2 == 0 ? 200 : 20;
    load.separation->num_lanes = 1 + static_cast<int>(seed % 2);
    load.separation->num_pages = 8 + 4 * (seed % 4);
    load.separation->roles = seed % 4 == 0 ? kFixed : kLoose;
    load.separation->mailbox_bytes = seed % 4 == 1 ? 1 : 1 << 20;
    load.copies = {.late = seed % 2 == 0, .fail_every = seed % 3 == 0 ? 16 : 0};
    load.separation->copies = {.late = true, .fail_every = seed % 3 == 1 ? 16 : 0};
    load.options.preempt_every = seed % 3 == 2 ? 7 : 0;
    load.abort_share = 0.2;
    load.may_fail = true;
    const EngineStats stats = run_once(load);
    preemptions += stats.preemptions;
    aborted += stats.aborted;
    failed += stats.prefill.failed;
  }
  EXPECT_GT(preemptions, 30);
  EXPECT_GT(aborted, 60);
  EXPECT_GT(failed, 5);
}

TEST(Sites, RolesChangeUnderLoad) {
  RoleStats sum;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Load load = sites_load(200 + seed);
    load.num_requests = 120;
    load.max_output = 300;  // it is full before the last request comes
    load.options.max_num_seqs = seed % 2 == 0 ? 3 : 40;
    load.separation->step_time = 200us;  // there is a backlog
    load.separation->roles = kLoose;
    load.abort_share = seed % 3 == 0 ? 0.1 : 0;
    const EngineStats stats = run_once(load);
    EXPECT_EQ(stats.failed, 0);
    ASSERT_TRUE(stats.roles.has_value());
    sum.decode_changes += stats.roles->decode_changes;
    sum.prefill_changes += stats.roles->prefill_changes;
    sum.prompts_kept += stats.roles->prompts_kept;
    sum.requests_taken += stats.roles->requests_taken;
  }
  EXPECT_GT(sum.decode_changes, 0);
  EXPECT_GT(sum.prefill_changes, 0);
  EXPECT_GT(sum.prompts_kept, 0);
  EXPECT_GT(sum.requests_taken, 0);
}

// Holds a runner's steps until they are let go.
class Gate {
 public:
  void pass() {
    while (!is_open_) std::this_thread::sleep_for(100us);
  }
  void open() { is_open_ = true; }
  void close() { is_open_ = false; }

 private:
  std::atomic<bool> is_open_ = true;
};

struct TwoSites {
  explicit TwoSites(EngineOptions options = {.max_num_seqs = 4, .max_batched_tokens = 100},
                    SitesOptions sites = {}) {
    options.eos_ids = {kFakeEos};
    options.prefill.least_rows = 0;
    sites.prefill_lanes = {1, 2};
    sites.decode_lanes = {0, 3};
    auto prefill_runner = std::make_unique<FakeRunner>(FakeModel{.num_lanes = 2});
    prefill_runner->before_step = [this](const ForwardBatch&) -> Result<> {
      prefill.pass();
      if (lose_prefill) {
        return error(Code::kInternal, "a planted loss");
      }
      return {};
    };
    lost = &prefill_runner->lost;
    auto decode_runner = std::make_unique<FakeRunner>(FakeModel{.num_lanes = 2});
    decode_runner->before_step = [this](const ForwardBatch&) {
      decode.pass();
      return Result<>();
    };
    engine = std::move(*Engine::create_separated(
        options, {.prefill = std::move(prefill_runner), .decode = std::move(decode_runner)}, sites,
        fake_tokenizer()));
  }
  ~TwoSites() {
    prefill.open();
    decode.open();
    engine->stop();
  }

  Event answer(const Request& request) const {
    EventQueue queue;
    EXPECT_TRUE(engine->submit(request, queue.sink()));
    return last_event(queue);
  }
  // Its events go to the newest of `queues`.
  RequestId submit(int64_t prompt, int64_t max_tokens) {
    queues.push_back(std::make_unique<EventQueue>());
    const int64_t first = 10 * std::ssize(queues);  // they share no prefix
    return *engine->submit(plain_request(prompt, max_tokens, first), queues.back()->sink());
  }
  template <typename Is>
  void wait_until(Is is) const {
    while (!is(engine->stats())) std::this_thread::sleep_for(100us);
  }

  Gate prefill, decode;
  std::vector<std::unique_ptr<EventQueue>> queues;  // of what was submitted
  std::atomic<bool> lose_prefill = false;
  bool* lost = nullptr;
  std::unique_ptr<Engine> engine;
};

TEST(Sites, FiguresAreThoseOfBothSites) {
  const TwoSites two;
  EXPECT_EQ(two.engine->num_sites(), 2);
  EXPECT_EQ(two.answer(plain_request(200, 4)).finish, FinishReason::kLength);
  EXPECT_EQ(two.answer(plain_request(200, 4)).usage.cached_tokens, 192);
  EXPECT_TRUE(two.engine->drain(60s));
  const EngineStats stats = two.engine->stats();
  EXPECT_EQ(stats.prompt_tokens, 400) << "a prompt counts once";
  EXPECT_EQ(stats.generated_tokens, 8);
  EXPECT_EQ(stats.length, 2);
  EXPECT_EQ(stats.stopped + stats.aborted, 0) << "an order is no choice";
  EXPECT_EQ(stats.prefill.orders, 2);
  EXPECT_EQ(stats.prefill.pages_sent, 5);
  EXPECT_EQ(stats.pages_total, 4 * 64);
  ASSERT_EQ(stats.lanes.size(), 4u);
  // Pages stay cached where they were computed, and where they were used.
  EXPECT_GT(stats.lanes[0].pages_cached + stats.lanes[3].pages_cached, 0);
  EXPECT_GT(stats.lanes[1].pages_cached + stats.lanes[2].pages_cached, 0);
  EXPECT_EQ(stats.roles->prefill_lanes, (std::vector<int>{1, 2}));
  two.engine->flush_prefix_cache();
  two.wait_until([](const EngineStats& now) { return now.pages_cached == 0; });
}

TEST(Sites, ALaneIsAskedForByItsNumber) {
  const TwoSites two;
  Request request = plain_request(100, 2);
  request.lane = 3;
  EXPECT_EQ(two.answer(request).finish, FinishReason::kLength);
  EXPECT_GT(two.engine->stats().lanes[3].pages_cached, 0);
  EXPECT_EQ(two.engine->stats().lanes[0].pages_cached, 0);
  const auto refused = [&](int lane) {
    request.lane = lane;
    return two.engine->submit(request, [](const Event&) {}).error().message;
  };
  EXPECT_EQ(refused(2),
            "the data-parallel rank is 2, which computes prompts for those that decode");
  EXPECT_EQ(refused(4), "the data-parallel rank is 4, there are 4: 0 to 3");
}

// A full decode site: the others take new requests whole, which can be aborted like any.
TEST(Sites, PrefillLanesTakeWholeRequests) {
  TwoSites two({.max_num_seqs = 1, .max_batched_tokens = 100});
  for (int i = 0; i < 3; ++i) two.submit(3, 1900);  // two lanes of one slot: one waits
  two.wait_until([](const EngineStats& stats) { return stats.roles->prefill_takes; });
  two.decode.close();
  const RequestId taken = two.submit(3, 1900);
  two.wait_until([](const EngineStats& stats) { return stats.lanes[1].running == 1; });
  EXPECT_TRUE(two.queues.back()->next().has_value()) << "it goes on while the decode site stands";
  const EngineStats stats = two.engine->stats();
  EXPECT_EQ(stats.roles->requests_taken, 1);
  EXPECT_EQ(stats.running, 3) << "it counts as running, one waits";
  EXPECT_EQ(stats.prompt_tokens, 9);
  two.engine->abort(taken);
  EXPECT_EQ(last_event(*two.queues.back()).finish, FinishReason::kAbort);
  Request with_lane = plain_request(3, 2);
  with_lane.lane = 0;
  EventQueue waits;
  const RequestId in_lane = *two.engine->submit(with_lane, waits.sink());
  EXPECT_EQ(two.engine->stats().roles->requests_taken, 1) << "it has a lane of the decode site";
  two.decode.open();
  two.engine->abort(in_lane);
  last_event(waits);
}

// A request that has to stay in a full lane does not make the site full.
TEST(Sites, ALaneThatIsAskedForDoesNotFillTheSite) {
  const TwoSites two({.max_num_seqs = 1, .max_batched_tokens = 100});
  std::vector<std::unique_ptr<EventQueue>> queues;
  for (int i = 0; i < 2; ++i) {
    queues.push_back(std::make_unique<EventQueue>());
    Request request = plain_request(3, 300, i);
    request.lane = 0;
    ASSERT_TRUE(two.engine->submit(request, queues.back()->sink()));
  }
  for (const auto& queue : queues) last_event(*queue);
  EXPECT_EQ(two.engine->stats().roles->prefill_changes, 0);
}

// The prefill site stands and the decode site has nothing to decode: it computes new prompts.
TEST(Sites, DecodeLanesComputePromptsThemselves) {
  TwoSites two({.max_num_seqs = 16, .max_batched_tokens = 100});
  two.prefill.close();
  for (int i = 0; i < 4; ++i) two.submit(300, 2);  // 4 * 5 pages' rows: more than four steps of 200
  two.wait_until([](const EngineStats& stats) { return stats.roles->decode_computes; });
  EXPECT_EQ(two.engine->stats().prefill.arrived, 0);
  two.submit(300, 2);
  EXPECT_EQ(last_event(*two.queues.back()).finish, FinishReason::kLength)
      << "while the prefill site stands";
  EXPECT_EQ(two.engine->stats().roles->prompts_kept, 1);
  EXPECT_EQ(two.engine->stats().prefill.orders, 4);
  two.prefill.open();
  EXPECT_TRUE(two.engine->drain(60s));
  EXPECT_EQ(two.engine->stats().prefill.arrived, 4);
  two.wait_until([](const EngineStats& stats) { return !stats.roles->decode_computes; });
}

TEST(Sites, OrdersThatHaveEndedAreNoBacklog) {
  TwoSites two({.max_num_seqs = 16, .max_batched_tokens = 100});
  two.prefill.close();
  std::array<RequestId, 4> ids{};
  for (RequestId& id : ids) id = two.submit(300, 2);
  two.wait_until([](const EngineStats& stats) { return stats.roles->decode_computes; });
  for (const RequestId id : ids) two.engine->abort(id);
  for (const auto& queue : two.queues) last_event(*queue);
  two.submit(300, 2);
  // Many more boundaries than a change wants.
  const int64_t begun = two.engine->progress().steps;
  const int64_t until = begun + int64_t{5} * kRoleSteps;
  while (two.engine->progress().steps < until) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(two.engine->stats().roles->decode_changes, 1);
}

TEST(Sites, TheDeathOfThePrefillSiteIsTheEnginesDeath) {
  TwoSites two;
  EXPECT_FALSE(two.engine->is_dead());
  two.prefill.close();
  EventQueue queue;
  ASSERT_TRUE(two.engine->submit(plain_request(2000, 2), queue.sink()));
  two.wait_until([](const EngineStats& stats) { return stats.prefill.orders == 1; });
  const EngineProgress before = two.engine->progress(1);
  EXPECT_TRUE(before.has_work);
  EXPECT_EQ(two.engine->progress(1).steps, before.steps) << "a site that hangs is seen";
  *two.lost = true;
  two.lose_prefill = true;
  two.prefill.open();
  while (!two.engine->wait_until_dead(1ms)) {
  }
  EXPECT_TRUE(two.engine->is_dead());
  EXPECT_EQ(two.engine->has_room().error().message, "the engine is dead: a planted loss");
}

TEST(Sites, DrainingEndsWhatBothSitesHave) {
  TwoSites two;
  for (int i = 0; i < 20; ++i) two.submit(100 + 10 * i, 5);
  EXPECT_TRUE(two.engine->drain(60s));
  for (const auto& queue : two.queues) {
    const Event last = last_event(*queue);
    EXPECT_EQ(last.finish, FinishReason::kLength) << last.error.message;
  }
  EXPECT_EQ(two.engine->submit(plain_request(3, 1), [](const Event&) {}).error().code,
            Code::kUnavailable);
}

}  // namespace
}  // namespace fathom
