// What a sum over ranks costs beside the work between two sums. Ranks are threads: the figures hold
// for as many free CPUs as ranks.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "comm/collectives.h"
#include "comm/node_threads.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

void compute(std::chrono::nanoseconds time) {
  const auto until = Clock::now() + time;
  while (Clock::now() < until) {
  }
}

void report(benchmark::State& state, std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  const auto percentile = [&](size_t percent) { return times[times.size() * percent / 100]; };
  state.counters["p10_us"] = percentile(10);
  state.counters["p50_us"] = percentile(50);
  state.counters["p99_us"] = percentile(99);
}

// An all_reduce of `bytes` bytes over `ranks` ranks with `work_us` of work before each. Rank 0's
// calls are timed one by one without that work, as percentiles: a neighbour that takes a CPU away
// moves the mean and not p10.
void BM_AllReduce(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(0));
  const int64_t count = state.range(1) / static_cast<int64_t>(sizeof(float));
  const auto work = std::chrono::microseconds(state.range(2));
  AbortWord abort_word;
  auto groups = make_local_groups(ranks, abort_word);
  // All ranks learn from the sum that it is the last one: rank 0 gives 1 there, 0 before.
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<float> x(count), sum(count);
      do {
        compute(work);
        all_reduce(*groups[rank], x, sum);
      } while (sum[0] == 0);
    });
  }
  std::vector<float> x(count), sum(count);
  std::vector<double> times;
  for (auto _ : state) {
    compute(work);
    const auto begin = Clock::now();
    all_reduce(*groups[0], x, sum);
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  x[0] = 1;
  all_reduce(*groups[0], x, sum);
  for (std::thread& thread : threads) thread.join();
  report(state, times);
}
BENCHMARK(BM_AllReduce)
    ->ArgNames({"ranks", "bytes", "work_us"})
    ->ArgsProduct({{2}, {14336}, {0, 20}})
    ->ArgsProduct({{2, 4, 8},
                   {4 << 10, 14336, 32 << 10, 64 << 10, 128 << 10, 1 << 20, 4 << 20},
                   {0}})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

// The same between two nodes of one rank each over loopback TCP, without work between.
void BM_AllReduceOverTcp(benchmark::State& state) {
  const int64_t count = state.range(0) / static_cast<int64_t>(sizeof(float));
  std::vector<double> times;
  run_nodes({1, 1}, [&](World&, Group& group) {
    std::vector<float> x(count), sum(count);
    if (group.rank() == 1) {
      do {
        all_reduce(group, x, sum);
      } while (sum[0] == 0);
      return;
    }
    for (auto _ : state) {
      const auto begin = Clock::now();
      all_reduce(group, x, sum);
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    }
    x[0] = 1;
    all_reduce(group, x, sum);
  });
  report(state, times);
}
BENCHMARK(BM_AllReduceOverTcp)
    ->ArgName("bytes")
    ->Args({64})
    ->Args({14336})
    ->Args({1 << 20})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

}  // namespace
}  // namespace fathom
