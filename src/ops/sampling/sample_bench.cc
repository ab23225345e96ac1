// Rows of logits to a token each, on one thread: us for all rows. Each greedy row must read
// vocab * 4 bytes.
#include <benchmark/benchmark.h>

#include <random>

#include "ops/sampling/sample.h"

namespace fathom {
namespace {

// Spread 3 resembles a language model's logits; 0.3 a nearly flat row (random weights).
void run(benchmark::State& state, const SampleOptions& options, int num_logprobs,
         float spread = 3) {
  const int64_t vocab = state.range(0), num_rows = state.range(1);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(num_rows * vocab));
  for (float& value : logits) value = normal(random);
  TokenHistory history;
  for (int32_t i = 0; i < 500; ++i) history.add_output(i * 7 % static_cast<int32_t>(vocab));
  std::vector<SampleRow> rows;
  for (int64_t row = 0; row < num_rows; ++row) {
    rows.push_back(
        {.row = row, .options = &options, .history = &history, .num_logprobs = num_logprobs});
  }
  std::vector<SampleScratch> scratch;
  std::vector<SampledToken> out(rows.size());
  for (auto _ : state) {
    for (SampleRow& row : rows) row.position += 1 + static_cast<uint64_t>(row.row);
    sample_rows(nullptr, ConstTensorView(logits.data(), {num_rows, vocab}), rows, scratch, out);
    benchmark::DoNotOptimize(out.data());
  }
  state.SetBytesProcessed(state.iterations() * num_rows * vocab * 4);
}

void greedy(benchmark::State& state) { run(state, {.temperature = 0}, -1); }
void greedy_logprobs20(benchmark::State& state) { run(state, {.temperature = 0}, 20); }
void temperature(benchmark::State& state) { run(state, {.temperature = 0.8}, -1); }
void temperature_flat(benchmark::State& state) { run(state, {}, -1, 0.3f); }
void top_k50(benchmark::State& state) { run(state, {.top_k = 50}, -1); }
void top_p95(benchmark::State& state) { run(state, {.temperature = 0.6, .top_p = 0.95}, -1); }
void top_p95_flat(benchmark::State& state) { run(state, {.top_p = 0.95}, -1, 0.3f); }
void min_p(benchmark::State& state) { run(state, {.min_p = 0.05}, -1); }
void penalties(benchmark::State& state) {
  run(state, {.top_p = 0.8, .top_k = 20, .repetition_penalty = 1.1, .presence_penalty = 1}, -1);
}

#define SIZES                       \
  Args({8192, 1})                   \
      ->Args({102'400, 1})          \
      ->Args({129'280, 1})          \
      ->Args({129'280, 16})         \
      ->ArgNames({"vocab", "rows"}) \
      ->Unit(benchmark::kMicrosecond)
BENCHMARK(greedy)->SIZES;
BENCHMARK(greedy_logprobs20)->SIZES;
BENCHMARK(temperature)->SIZES;
BENCHMARK(temperature_flat)->SIZES;
BENCHMARK(top_k50)->SIZES;
BENCHMARK(top_p95)->SIZES;
BENCHMARK(top_p95_flat)->SIZES;
BENCHMARK(min_p)->SIZES;
BENCHMARK(penalties)->SIZES;

}  // namespace
}  // namespace fathom
