// Planning of experts on one core: 58 layers of 256 experts, as DeepSeek-V3 has, to 288 slots, with
// a target of 20 ms. And the cost of counting a routed token.
#include <benchmark/benchmark.h>

#include <random>

#include "placement/eplb.h"
#include "placement/expert_load.h"

namespace fathom {
namespace {

constexpr int64_t kLayers = 58, kExperts = 256;

std::vector<double> skewed_loads() {
  std::mt19937 random(1);
  std::lognormal_distribution<double> load(8, 0.8);
  std::vector<double> loads(kLayers * kExperts);
  for (double& of_expert : loads) of_expert = load(random);
  return loads;
}

// The table of all layers, as a running server would make it.
void plan(benchmark::State& state, BalancePolicy policy, int64_t nodes, int64_t gpus) {
  const std::vector<double> loads = skewed_loads();
  const BalanceShape shape{
      .experts = kExperts, .replicas = 288, .groups = 8, .nodes = nodes, .gpus = gpus};
  for (auto _ : state) {
    auto table = balance_experts(loads, kLayers, shape, policy);
    if (!table) return state.SkipWithError(table.error().message.c_str());
    benchmark::DoNotOptimize(table);
  }
}
BENCHMARK_CAPTURE(plan, hierarchical_1x8, BalancePolicy::kHierarchical, 1, 8)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan, hierarchical_4x32, BalancePolicy::kHierarchical, 4, 32)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan, global_32, BalancePolicy::kGlobal, 4, 32)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan, global_144, BalancePolicy::kGlobal, 18, 144)->Unit(benchmark::kMillisecond);

// A step of 128 tokens with 8 experts in each layer.
void count_step(benchmark::State& state) {
  constexpr int64_t kTokens = 128, kTopK = 8;
  ExpertLoad load(kLayers, kExperts, 16, 64);
  std::mt19937 random(1);
  std::vector<int32_t> experts(kLayers * kTokens * kTopK);
  for (int32_t& expert : experts) expert = static_cast<int32_t>(random() % kExperts);
  for (auto _ : state) {
    size_t next = 0;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t i = 0; i < kTokens * kTopK; ++i) load.add(layer, experts[next++]);
    }
    load.end_step();
  }
  state.SetItemsProcessed(state.iterations() * std::ssize(experts));
}
BENCHMARK(count_step)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fathom
