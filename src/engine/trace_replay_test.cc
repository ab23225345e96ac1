// Replays a recorded load with real prefix sharing on the engine. An oracle computes from the trace
// which blocks an LRU cache of the same size would still have.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <list>
#include <random>
#include <sstream>
#include <unordered_map>

#include "base/random.h"
#include "cache/latent_layout.h"
#include "engine/engine.h"
#include "engine/fake_runner.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kTraceBlock = 512;  // tokens per id of the trace
constexpr int64_t kScale = kTraceBlock / kPageSize;

// Lengths are scaled: a block is a page.
struct TracedRequest {
  int64_t prompt_len = 0, answer_len = 0;
  std::vector<int64_t> blocks;

  int64_t full_pages() const { return prompt_len / kPageSize; }
};

std::vector<TracedRequest> read_trace(size_t count) {
  std::ifstream file(FATHOM_SOURCE_DIR "/tests/data/traces/mooncake_conversation.txt");
  std::vector<TracedRequest> trace;
  for (std::string line; trace.size() < count && std::getline(file, line);) {
    std::istringstream fields(line);
    TracedRequest& request = trace.emplace_back();
    fields >> request.prompt_len >> request.answer_len;
    request.prompt_len = std::max<int64_t>(1, request.prompt_len / kScale);
    request.answer_len = std::max<int64_t>(1, request.answer_len / kScale);
    for (std::string run; fields >> run;) {
      const size_t dash = run.find('-');
      const int64_t first = std::stoll(run);
      const int64_t last = dash == std::string::npos ? first : std::stoll(run.substr(dash + 1));
      for (int64_t block = first; block <= last; ++block) request.blocks.push_back(block);
    }
    EXPECT_GE(std::ssize(request.blocks), request.full_pages()) << line;
  }
  EXPECT_EQ(trace.size(), count);
  return trace;
}

Request request_of(const TracedRequest& traced, uint64_t seed) {
  Request request;
  for (int64_t i = 0; i < traced.prompt_len; ++i) {
    const auto block = static_cast<uint64_t>(traced.blocks[i / kPageSize]);
    request.prompt_ids.push_back(static_cast<int32_t>(random_bits(block, 0, i % kPageSize) % 290));
  }
  request.sampling.max_tokens = traced.answer_len;
  request.sampling.ignore_eos = true;
  request.sampling.seed = seed;
  return request;
}

// The share of prompt tokens found in an LRU cache of `num_pages` pages when requests run one by
// one. A request's last page is evicted first. Completions take pages too.
double possible_hit_rate(const std::vector<TracedRequest>& trace, int64_t num_pages) {
  std::list<int64_t> by_use;  // most recent first
  std::unordered_map<int64_t, std::list<int64_t>::iterator> pages;
  int64_t hits = 0, tokens = 0, answer_id = -1;
  for (const TracedRequest& request : trace) {
    std::vector<int64_t> text(request.blocks.begin(),
                              request.blocks.begin() + request.full_pages());
    int64_t found = 0;
    // At least one token is computed.
    while (found < (request.prompt_len - 1) / kPageSize && pages.contains(text[found])) ++found;
    hits += found * kPageSize;
    tokens += request.prompt_len;
    // The last token of a completion is never cached.
    const int64_t all = (request.prompt_len + request.answer_len - 1) / kPageSize;
    while (std::ssize(text) < all) text.push_back(answer_id--);
    for (auto page = text.rbegin(); page != text.rend(); ++page) {
      if (const auto it = pages.find(*page); it != pages.end()) by_use.erase(it->second);
      by_use.push_front(*page);
      pages[*page] = by_use.begin();
    }
    while (std::ssize(by_use) > num_pages) {
      pages.erase(by_use.back());
      by_use.pop_back();
    }
  }
  return static_cast<double>(hits) / static_cast<double>(tokens);
}

struct Measured {
  double hit_rate = 0;
  int64_t prompt_rows = 0;  // computed
  EngineStats stats;
};

Measured replay(const std::vector<TracedRequest>& trace, int64_t num_pages, int64_t host_pages) {
  auto runner =
      std::make_unique<FakeRunner>(FakeModel{.max_model_len = 1 << 15, .num_pages = num_pages});
  int64_t rows = 0;  // used by the engine's thread until it has drained
  runner->before_step = [&rows](const ForwardBatch& batch) -> Result<> {
    rows += batch.num_rows();
    return {};
  };
  const int64_t page_bytes = runner->page_transfer(0)->page_bytes();
  auto engine = std::move(*Engine::create({.max_num_seqs = 8,
                                           .max_queued_requests = 1 << 20,
                                           .max_queued_tokens = 1 << 30,
                                           .kv_offload_bytes = host_pages * page_bytes},
                                          std::move(runner), nullptr));
  int64_t answer_rows = 0;
  for (size_t i = 0; i < trace.size(); ++i) {
    answer_rows += trace[i].answer_len - 1;
    EXPECT_TRUE(engine->submit(request_of(trace[i], i), [](const Event&) {}).has_value());
  }
  EXPECT_TRUE(engine->drain(120s));
  Measured measured{.stats = engine->stats()};
  measured.prompt_rows = rows - answer_rows;
  measured.hit_rate = static_cast<double>(measured.stats.cached_tokens) /
                      static_cast<double>(measured.stats.prompt_tokens);
  EXPECT_EQ(measured.stats.length, std::ssize(trace));
  return measured;
}

TEST(TraceReplay, HitRateIsWhatTheTraceMakesPossible) {
  const std::vector<TracedRequest> trace = read_trace(1500);
  double smallest = 1, largest = 0;
  // Pages in the pool and in host memory below it.
  for (const auto& [num_pages, host_pages] :
       {std::pair<int64_t, int64_t>{2000, 0}, {2000, 2000}, {100'000, 0}}) {
    const double possible = possible_hit_rate(trace, num_pages + host_pages);
    const Measured measured = replay(trace, num_pages, host_pages);
    EXPECT_NEAR(measured.hit_rate, possible, 0.02) << num_pages << " and " << host_pages;
    if (measured.stats.preemptions == 0) {
      EXPECT_EQ(measured.prompt_rows, measured.stats.prompt_tokens - measured.stats.cached_tokens)
          << "a hit is not computed";
    }
    fmt::print("{} + {} pages: possible {:.2f} %, measured {:.2f} %, {} preemptions\n", num_pages,
               host_pages, 100 * possible, 100 * measured.hit_rate, measured.stats.preemptions);
    smallest = std::min(smallest, possible);
    largest = std::max(largest, possible);
  }
  EXPECT_GT(largest - smallest, 0.2) << "the sizes of the cache make a difference";
}

}  // namespace
}  // namespace fathom
