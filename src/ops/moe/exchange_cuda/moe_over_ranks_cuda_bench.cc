// A layer's experts in e4m3 over ranks that share one device, in one CUDA graph a rank, beside the
// same rows on one rank that has all experts: what the exchange costs where the links cost nothing.
// The exchange alone, without the GEMMs' time, is that of experts of one block of columns.
//
//   moe_over_ranks_cuda_bench [--json]
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "device/cuda/graph.h"
#include "device/cuda/graph_timer.h"
#include "ops/moe/exchange_cuda/moe_over_ranks_trial_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kReplays = 15, kWarm = 3;

// Each stream needs a hardware queue of its own, and nothing may load a kernel while a rank waits
// for another. Read when the device is first used.
[[maybe_unused]] const int kVariables =
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) + setenv("CUDA_MODULE_LOADING", "EAGER", 1);

// V3's rows; experts of one block of columns, so that little but the exchange is left.
constexpr MoeShape kExchange = {
    .hidden = 7168, .num_experts = 256, .experts_per_token = 8, .inter = 128, .shared_inter = 0};
// V3's experts, as many as 8 GB hold.
constexpr MoeShape kLayer = {
    .hidden = 7168, .num_experts = 64, .experts_per_token = 8, .inter = 2048, .shared_inter = 2048};

// Median time of a layer, in us, over replays of all ranks' graphs: from the first one's launch to
// the last one's end, of which the launches themselves are a part.
double time_ranks(const MoeShape& shape, int ranks, int64_t rows_of_each, int chain) {
  const auto all = static_cast<int32_t>(rows_of_each * ranks);
  const ScaledMoeProblem problem(shape, all, random_experts(shape, all, 3), 1);
  RanksTrial<E4m3Experts> trial(problem,
                                std::vector<int64_t>(static_cast<size_t>(ranks), rows_of_each), 1,
                                all, false, std::chrono::seconds(2));
  std::vector<Graph> graphs;
  for (int r = 0; r < ranks; ++r) {
    graphs.emplace_back(trial.rank(r).stream, [&] {
      for (int i = 0; i < chain; ++i) {
        trial.enqueue(problem, r, trial.step(r), nullptr, DType::kBF16);
      }
    });
  }
  std::vector<double> times;
  for (int replay = -kWarm; replay < kReplays; ++replay) {
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks; ++r) graphs[static_cast<size_t>(r)].launch(trial.rank(r).stream);
    trial.wait();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (replay >= 0) times.push_back(took.count() / chain);
  }
  if (trial.group().late()) throw std::runtime_error("a rank did not come");
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

double time_alone(const MoeShape& shape, int64_t rows, int chain) {
  const auto all = static_cast<int32_t>(rows);
  const ScaledMoeProblem problem(shape, all, random_experts(shape, all, 3), 1);
  return time_in_graph(chain, [&](int, cudaStream_t stream) {
    scaled_moe_many_rows(problem.arguments(DType::kBF16), stream);
  });
}

// The least bytes of the exchange: each row once to each of its experts' ranks, of which it is
// taken to have min(k, ranks), with its scales; each result back in bf16; out in bf16.
double exchanged_bytes(const MoeShape& shape, int ranks, int64_t rows) {
  const double hidden = shape.hidden;
  return static_cast<double>(rows) *
         (std::min(shape.experts_per_token, ranks) * 2 * hidden * (1 + 4.0 / 128) +
          shape.experts_per_token * 2 * hidden + 2 * hidden);
}

void measure(BenchTable& table, const char* name, const MoeShape& shape, int64_t rows_of_each,
             int64_t all_rows, int chain) {
  for (const int ranks : {2, 4, 8}) {
    const int64_t rows = rows_of_each > 0 ? rows_of_each : all_rows / ranks;
    const std::string of = std::to_string(rows) + " x " + std::to_string(shape.hidden) + " a rank";
    table.add(std::string(name) + ", " + std::to_string(ranks) + " ranks", of,
              time_ranks(shape, ranks, rows, chain), exchanged_bytes(shape, ranks, rows * ranks));
    table.add(std::string(name) + ", the same rows alone",
              std::to_string(rows * ranks) + " x " + std::to_string(shape.hidden),
              time_alone(shape, rows * ranks, chain), exchanged_bytes(shape, 1, rows * ranks));
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  using namespace fathom::cuda;
  BenchTable table(argc, argv);
  for (const int64_t rows : {1, 16, 128}) measure(table, "exchange", kExchange, rows, 0, 20);
  measure(table, "exchange", kExchange, 0, 4096, 4);
  for (const int64_t rows : {1, 16, 128}) measure(table, "layer", kLayer, rows, 0, 8);
  measure(table, "layer", kLayer, 0, 4096, 2);
}
