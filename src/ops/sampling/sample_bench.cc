// One row of logits to one token, on one thread: us a row. Each greedy row must read vocab * 4
// bytes.
#include <benchmark/benchmark.h>

#include <random>

#include "ops/sampling/sample.h"

namespace fathom {
namespace {

// Spread 3 resembles a language model's logits; 0.3 a nearly flat row (random weights).
void run(benchmark::State& state, const SampleOptions& options, int num_logprobs,
         float spread = 3) {
  const int64_t vocab = state.range(0);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> row(static_cast<size_t>(vocab));
  for (float& value : row) value = normal(random);
  SampleScratch scratch;
  SampledToken out;
  TokenHistory history;
  for (int32_t i = 0; i < 500; ++i) history.add_output(i * 7 % static_cast<int32_t>(vocab));
  uint64_t position = 0;
  for (auto _ : state) {
    sample(row,
           {.options = &options,
            .history = &history,
            .position = position++,
            .num_logprobs = num_logprobs},
           scratch, out);
    benchmark::DoNotOptimize(out.id);
  }
  state.SetBytesProcessed(state.iterations() * vocab * 4);
}

void greedy(benchmark::State& state) { run(state, {.temperature = 0}, -1); }
void greedy_logprobs20(benchmark::State& state) { run(state, {.temperature = 0}, 20); }
void temperature(benchmark::State& state) { run(state, {.temperature = 0.8}, -1); }
void top_k50(benchmark::State& state) { run(state, {.top_k = 50}, -1); }
void top_p95(benchmark::State& state) { run(state, {.temperature = 0.6, .top_p = 0.95}, -1); }
void top_p95_flat(benchmark::State& state) { run(state, {.top_p = 0.95}, -1, 0.3f); }
void min_p(benchmark::State& state) { run(state, {.min_p = 0.05}, -1); }
void penalties(benchmark::State& state) {
  run(state, {.top_p = 0.8, .top_k = 20, .repetition_penalty = 1.1, .presence_penalty = 1}, -1);
}

#define SIZES Arg(8192)->Arg(102'400)->Arg(129'280)->Unit(benchmark::kMicrosecond)
BENCHMARK(greedy)->SIZES;
BENCHMARK(greedy_logprobs20)->SIZES;
BENCHMARK(temperature)->SIZES;
BENCHMARK(top_k50)->SIZES;
BENCHMARK(top_p95)->SIZES;
BENCHMARK(top_p95_flat)->SIZES;
BENCHMARK(min_p)->SIZES;
BENCHMARK(penalties)->SIZES;

}  // namespace
}  // namespace fathom
