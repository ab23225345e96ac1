// Out of memory on the engine's thread: its n-th allocation fails, for each n. The work that needed
// it ends with an error, everything else ends normally, and no page is lost (the engine recounts
// pages whenever it is idle). A separate program, because it replaces operator new.
#include <gtest/gtest.h>

#include <cstdlib>
#include <future>
#include <map>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/fake_runner.h"

namespace {

// This thread's countdown to a failing allocation; 0: off.
thread_local int64_t countdown = 0;

void* allocate(std::size_t size) {
  if (countdown > 0 && --countdown == 0) throw std::bad_alloc();
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace fathom {
namespace {

using namespace std::chrono_literals;

struct Ending {
  std::vector<int32_t> ids;
  std::string text;
  FinishReason finish = FinishReason::kAbort;
  std::string error;
  int finals = 0;
};
using Endings = std::map<std::pair<RequestId, int>, Ending>;

// Requests of every kind, some with a common prefix, more than the cache holds at once.
std::vector<Request> requests() {
  std::vector<Request> made(7);
  for (size_t i = 0; i < made.size(); ++i) {
    for (int32_t token = 0; token < 70 + 40 * static_cast<int32_t>(i % 3); ++token) {
      made[i].prompt_ids.push_back(token % 250);
    }
    made[i].sampling.max_tokens = 60;
    made[i].sampling.seed = 5 + i;
    made[i].cache_salt = i == 5 ? std::string(40, 's') : "";
  }
  made[1].sampling.n = 3;
  made[2].sampling.logprobs = 3;
  made[2].sampling.prompt_logprobs = 2;
  made[3].sampling.presence_penalty = 1;
  made[4].sampling.stop = {"a rather long stop string", "x"};
  made[6].sampling.temperature = 0;
  return made;
}

// Runs all requests. The n-th allocation that the engine's thread makes after its first step has
// begun fails. Afterwards n is the rest of the countdown.
Endings run(int64_t& n, int lanes) {
  auto runner = std::make_unique<FakeRunner>(FakeModel{.num_pages = 14, .num_lanes = lanes});
  std::promise<void> submitted;
  int64_t steps = 0;
  runner->before_step = [&, n](const ForwardBatch&) -> Result<> {
    if (++steps == 1) {
      submitted.get_future().wait();
      countdown = n;
    }
    return {};
  };
  Endings endings;
  int64_t left = n;
  {
    auto engine = std::move(*Engine::create({.max_num_seqs = 6, .max_batched_tokens = 96},
                                            std::move(runner), fake_tokenizer()));
    for (const Request& request : requests()) {
      const auto sink = [&](const Event& event) {
        const int64_t kept = std::exchange(countdown, 0);  // sinks do not throw
        Ending& ending = endings[{event.request, event.index}];
        ending.ids.insert(ending.ids.end(), event.ids.begin(), event.ids.end());
        ending.text += event.text;
        if (event.finish) {
          ++ending.finals;
          ending.finish = *event.finish;
          ending.error = event.error.message;
        }
        countdown = left = kept;
      };
      EXPECT_TRUE(engine->submit(request, sink));
    }
    submitted.set_value();
    EXPECT_TRUE(engine->drain(60s));
    EXPECT_EQ(engine->stats().pages_used, 0);
    EXPECT_EQ(engine->stats().queued_requests, 0);
  }
  n = left;
  return endings;
}

class EngineMemory : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Lanes, EngineMemory, testing::Values(1, 2));

TEST_P(EngineMemory, EachAllocationMayFail) {
  int64_t unarmed = 0;
  const Endings expected = run(unarmed, GetParam());
  ASSERT_EQ(expected.size(), 9u);
  int64_t tried = 0, ended_early = 0, first_unused = 1;
  for (bool failed = true; failed; ++first_unused) {
    int64_t n = first_unused;
    const Endings endings = run(n, GetParam());
    failed = n == 0;
    tried += failed;
    ASSERT_EQ(endings.size(), expected.size()) << first_unused;
    for (const auto& [choice, ending] : endings) {
      EXPECT_EQ(ending.finals, 1) << first_unused;
      if (ending.finish == FinishReason::kError || ending.finish == FinishReason::kAbort) {
        EXPECT_TRUE(failed);
        EXPECT_EQ(ending.error, "out of memory") << first_unused;
        ++ended_early;
        continue;
      }
      const Ending& whole = expected.at(choice);
      EXPECT_EQ(ending.ids, whole.ids) << first_unused;
      EXPECT_EQ(ending.text, whole.text) << first_unused;
      EXPECT_EQ(ending.finish, whole.finish) << first_unused;
    }
    if (HasFailure()) break;
  }
  std::printf("%ld allocations failed, one in each run; they ended %ld choices\n",
              static_cast<long>(tried), static_cast<long>(ended_early));
  EXPECT_GT(tried, 100);
  EXPECT_LE(ended_early, 9 * tried);
}

// What the first steps allocate once, before any request has failed for lack of memory.
TEST_P(EngineMemory, EachAllocationOfTheFirstStepsMayFail) {
  for (int64_t n = 1, left = 0; left == 0; ++n) {
    SCOPED_TRACE(n);
    auto runner = std::make_unique<FakeRunner>(FakeModel{.num_pages = 14, .num_lanes = GetParam()},
                                               /*max_steps_in_flight=*/2);
    Ending ending;
    left = n;
    {
      const auto submitter = std::this_thread::get_id();
      bool is_armed = false;  // the engine's thread only
      EngineOptions options{.max_num_seqs = 6, .max_batched_tokens = 96};
      // The engine looks at the clock before its first step.
      options.clock = [&] {
        if (std::this_thread::get_id() != submitter && !std::exchange(is_armed, true)) {
          countdown = n;
        }
        return std::chrono::steady_clock::now();
      };
      auto engine = std::move(*Engine::create(options, std::move(runner), fake_tokenizer()));
      const auto sink = [&](const Event& event) {
        const int64_t kept = std::exchange(countdown, 0);  // sinks do not throw
        ending.ids.insert(ending.ids.end(), event.ids.begin(), event.ids.end());
        ending.finals += event.finish.has_value();
        if (event.finish) ending.error = event.error.message;
        countdown = left = kept;
      };
      Request request = requests()[0];
      request.sampling.max_tokens = 3;
      request.sampling.ignore_eos = true;
      EXPECT_TRUE(engine->submit(request, sink));
      EXPECT_TRUE(engine->drain(60s));
    }
    EXPECT_EQ(ending.finals, 1);
    if (ending.error.empty()) {
      EXPECT_EQ(ending.ids.size(), 3u);
    } else {
      EXPECT_EQ(ending.error, "out of memory");
    }
    if (HasFailure()) break;
  }
}

TEST(EngineProgress, IsToldWithoutMemory) {
  const auto engine = std::move(*Engine::create(
      {}, std::make_unique<FakeRunner>(FakeModel{.num_lanes = 2}), fake_tokenizer()));
  countdown = 1;
  const EngineProgress progress = engine->progress();
  EXPECT_EQ(std::exchange(countdown, 0), 1);
  EXPECT_FALSE(progress.has_work);
}

}  // namespace
}  // namespace fathom
