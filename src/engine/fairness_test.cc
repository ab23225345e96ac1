// One very long prompt among many small requests, in simulated time: a step lasts as long as on a
// modelled device, and the test sets the clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/fake_runner.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;
using Time = std::chrono::steady_clock::time_point;

constexpr int kSmall = 200;

struct Device {
  const char* name;
  std::chrono::nanoseconds step, row;
  std::chrono::nanoseconds between_arrivals;
};

Request request_of(int64_t prompt, int64_t max_tokens, uint32_t text) {
  std::mt19937 random(text);
  Request request;
  for (int64_t i = 0; i < prompt; ++i) {
    request.prompt_ids.push_back(static_cast<int32_t>(random() % 290));
  }
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  return request;
}

// Requests that arrive while steps run. A request that arrives during a step is submitted from
// inside it, with the clock at that time.
class Simulation {
 public:
  explicit Simulation(const Device& device) : device_(device) {
    auto runner =
        std::make_unique<FakeRunner>(FakeModel{.max_model_len = 1 << 17, .num_pages = 4000});
    runner->before_step = [this](const ForwardBatch& batch) { return take_step(batch); };
    engine_ = std::move(
        *Engine::create({.clock = [this] { return clock_.load(); }}, std::move(runner), nullptr));
  }

  // Returns the TTFT of each small request in seconds, sorted.
  std::vector<double> run(bool with_long_prompt) {
    // Two sequences that decode throughout, so that a step is always running.
    std::vector<EventQueue> background(2);
    for (EventQueue& queue : background) submit(request_of(20, 4000, 1), queue.sink());
    std::mt19937 random(1);
    Time at = clock_.load() + 1ms;
    for (uint32_t i = 0; i < kSmall; ++i) {
      if (with_long_prompt && i == 5) arrivals_.push_back({at, request_of(100'000, 1, 2), true});
      const auto prompt = static_cast<int64_t>(50 + random() % 350);
      arrivals_.push_back({at, request_of(prompt, 8, 100 + i), false});
      at += device_.between_arrivals * (random() % 1000) / 500;
    }
    started_ = true;
    for (EventQueue& queue : background) {
      while (queue.next()) {
      }
    }
    EXPECT_TRUE(engine_->drain(60s));
    EXPECT_EQ(ttft_.size(), static_cast<size_t>(kSmall));
    EXPECT_EQ(long_ended_, with_long_prompt);
    std::sort(ttft_.begin(), ttft_.end());
    return ttft_;
  }

 private:
  struct Arrival {
    Time at;
    Request request;
    bool is_long;
  };

  void submit(Request request, EventSink sink) {
    const auto id = engine_->submit(std::move(request), std::move(sink));
    EXPECT_TRUE(id.has_value()) << id.error().message;
  }

  Result<> take_step(const ForwardBatch& batch) {
    while (!started_) std::this_thread::yield();
    Time end = clock_.load() + device_.step + batch.num_rows() * device_.row;
    // If only these two run, advance the clock to the next arrival.
    if (batch.num_rows() == 2 && next_ < arrivals_.size()) end = std::max(end, arrivals_[next_].at);
    for (; next_ < arrivals_.size() && arrivals_[next_].at <= end; ++next_) {
      clock_ = arrivals_[next_].at;
      const bool is_long = arrivals_[next_].is_long;
      submit(std::move(arrivals_[next_].request), [this, is_long](const Event& event) {
        if (!event.last) return;
        EXPECT_EQ(event.finish, FinishReason::kLength);
        if (is_long) {
          long_ended_ = true;
        } else {
          ttft_.push_back(event.timings.ttft_seconds());
        }
      });
    }
    clock_ = end;
    return {};
  }

  const Device device_;
  std::atomic<Time> clock_{Time(1000s)};
  std::vector<Arrival> arrivals_;
  size_t next_ = 0;
  std::atomic<bool> started_{false};
  // Used by the engine's thread until it has drained.
  std::vector<double> ttft_;
  bool long_ended_ = false;
  std::unique_ptr<Engine> engine_;
};

// The small requests' p99 TTFT stays within three times its value without the long prompt. Two
// devices: one whose step time is proportional to rows (a CPU), and one where half the time of a
// full step is spent even on a single row (a large model on GPUs).
TEST(Fairness, ALongPromptDoesNotStallSmallRequests) {
  for (const Device& device :
       {Device{"rows only", 0us, 10us, 5ms}, Device{"steps and rows", 10ms, 5us, 10ms}}) {
    const std::vector<double> alone = Simulation(device).run(false);
    const std::vector<double> beside = Simulation(device).run(true);
    const size_t p99 = kSmall * 99 / 100 - 1;
    EXPECT_LE(beside[p99], 3 * alone[p99]) << device.name;
    fmt::print("{}: p50 {:.1f} -> {:.1f} ms, p99 {:.1f} -> {:.1f} ms\n", device.name,
               1e3 * alone[kSmall / 2], 1e3 * beside[kSmall / 2], 1e3 * alone[p99],
               1e3 * beside[p99]);
  }
}

}  // namespace
}  // namespace fathom
