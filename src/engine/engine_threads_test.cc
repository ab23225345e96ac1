// Calls the API from many threads at once, for ThreadSanitizer.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/fake_runner.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

Request random_request(std::mt19937& random) {
  Request request;
  for (size_t i = 1 + random() % 90; i > 0; --i) {
    request.prompt_ids.push_back(static_cast<int32_t>(random() % 290));
  }
  request.sampling.max_tokens = 1 + random() % 30;
  request.sampling.n = 1 + static_cast<int>(random() % 2);
  if (random() % 2 == 0) request.sampling.stop = {"STOP"};
  return request;
}

// Submits requests and reads their events; sometimes aborts, sometimes drops its queue early.
void client(Engine& engine, uint32_t seed, std::atomic<int64_t>& finals) {
  std::mt19937 random(seed);
  for (int i = 0; i < 25; ++i) {
    EventQueue queue;
    const Request request = random_request(random);
    const auto id = engine.submit(request, queue.sink());
    if (!id) {
      EXPECT_EQ(id.error().code, Code::kResourceExhausted);
      continue;
    }
    const bool walks_away = random() % 5 == 0, aborts = random() % 3 == 0;
    int events = 0;
    while (!queue.ended()) {
      if (aborts && events == 2) engine.abort(*id);
      if (walks_away && events == 1) break;
      const auto event = queue.next_for(50ms);
      if (event) ++events;
      if (event && event->finish) ++finals;
    }
    if (walks_away) engine.abort(*id);
  }
}

TEST(EngineThreads, ManyClientsAndReadersOfStats) {
  auto engine = std::move(
      *Engine::create({.max_num_seqs = 6, .max_batched_tokens = 64, .max_queued_requests = 4},
                      std::make_unique<FakeRunner>(FakeModel{.num_pages = 12}), fake_tokenizer()));
  std::atomic<int64_t> finals{0};
  std::atomic<bool> done{false};
  std::thread watcher([&] {
    while (!done) {
      const EngineStats stats = engine->stats();
      EXPECT_LE(stats.pages_used, stats.pages_total);
      EXPECT_LE(stats.queued_requests, 4);
      std::this_thread::sleep_for(200us);
    }
  });
  std::vector<std::thread> clients;
  for (uint32_t i = 0; i < 6; ++i) {
    clients.emplace_back([&engine, &finals, i] { client(*engine, i, finals); });
  }
  for (std::thread& thread : clients) thread.join();
  EXPECT_TRUE(engine->drain(30s));
  done = true;
  watcher.join();
  EXPECT_EQ(engine->stats().pages_used, 0);
  EXPECT_GT(finals, 20);
}

TEST(EngineThreads, StopUnderLoadFromTwoThreads) {
  for (int round = 0; round < 10; ++round) {
    auto engine = std::move(*Engine::create({.max_num_seqs = 4, .max_batched_tokens = 64},
                                            std::make_unique<FakeRunner>(FakeModel{}), nullptr));
    std::atomic<int> accepted{0}, ended{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          Request request{.id = {}, .prompt_ids = {1, 2, 3}, .sampling = {}};
          const auto id = engine->submit(request, [&](const Event& event) { ended += event.last; });
          if (!id) return;
          ++accepted;
        }
      });
    }
    for (int t = 0; t < 2; ++t) threads.emplace_back([&] { engine->stop(); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(accepted, ended) << "every accepted request has its last event";
  }
}

}  // namespace
}  // namespace fathom
