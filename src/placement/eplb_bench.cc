// Expert balancing on one core: 58 layers of 256 experts, as DeepSeek-V3 has, to 288 replicas. A
// plan is made on a helper thread while the engine runs; the target is 20 ms.
#include <benchmark/benchmark.h>

#include <random>

#include "placement/eplb.h"

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

}  // namespace
}  // namespace fathom
