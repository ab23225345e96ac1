// A layer's experts in e4m3 over ranks, in one CUDA graph a rank, beside the same rows on one rank
// that has all experts. With one GPU all ranks share it: what the exchange costs where the links
// cost nothing. With several each rank has one of its own. The exchange alone, without the GEMMs'
// time, is that of experts of one block of columns.
//
//   moe_over_ranks_cuda_bench [--json] [--only exchange|layer|rounds] [--routing uniform|zipf]
//                             [--spare-sms N]
//
// --spare-sms: of rounds in turn; 8 by default.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "device/cuda/graph.h"
#include "device/cuda/graph_timer.h"
#include "ops/moe/exchange_cuda/moe_over_ranks_trial_cuda.h"
#include "ops/moe/expert_draw.h"

namespace fathom::cuda {
namespace {

constexpr int kReplays = 15, kWarm = 3, kSpareSms = 8;

// Nothing may load a kernel while a rank waits for another. Read when the device is first used.
[[maybe_unused]] const int kLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 1);
// Two streams of each of eight ranks on a device, each with a hardware queue of its own.
[[maybe_unused]] const int kQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

// V3's rows; experts of one block of columns, so that little but the exchange is left.
constexpr MoeShape kExchange = {
    .hidden = 7168, .num_experts = 256, .experts_per_token = 8, .inter = 128, .shared_inter = 0};
// V3's experts, as many as 8 GB hold.
constexpr MoeShape kLayer = {
    .hidden = 7168, .num_experts = 64, .experts_per_token = 8, .inter = 2048, .shared_inter = 2048};

// Median time of a layer, in us, over replays of all ranks' graphs: from the first one's launch to
// the last one's end, of which the launches themselves are a part.
double time_ranks(const ScaledMoeProblem& problem, int ranks, int rounds, int spare_sms,
                  int chain) {
  const int64_t all = problem.rows, rows_of_each = all / ranks;
  RanksTrial<E4m3Experts> trial(problem,
                                std::vector<int64_t>(static_cast<size_t>(ranks), rows_of_each), 1,
                                all / rounds, false, std::chrono::seconds(2));
  std::vector<Graph> graphs;
  for (int r = 0; r < ranks; ++r) {
    graphs.emplace_back(trial.rank(r).stream(), [&] {
      for (int i = 0; i < chain; ++i) {
        const ExchangeStep step = spare_sms > 0 ? trial.step_in_turn(r, spare_sms) : trial.step(r);
        trial.enqueue(problem, r, step, nullptr, DType::kBF16);
      }
    });
  }
  std::vector<double> times;
  for (int replay = -kWarm; replay < kReplays; ++replay) {
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks; ++r) graphs[static_cast<size_t>(r)].launch(trial.rank(r).stream());
    trial.wait();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (replay >= 0) times.push_back(took.count() / chain);
  }
  if (trial.group().late()) throw std::runtime_error("a rank did not come");
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

double time_alone(const ScaledMoeProblem& problem, int chain) {
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

struct Chain {
  const char* name;
  MoeShape shape;
  Routing routing;
};

// rows_of_each: of each rank, or 0 for all_rows over all ranks. spare_sms: 0 for one round;
// otherwise there are as many rounds as ranks, as in a step in which each rank has as many rows as
// a round, one after the other and in turn.
void measure(BenchTable& table, const Chain& chain, int64_t rows_of_each, int64_t all_rows,
             int length, int spare_sms = 0) {
  const MoeShape& s = chain.shape;
  const int gpus = num_gpus();
  for (const int ranks : {2, 4, 8}) {
    if (gpus > 1 && ranks > gpus) break;
    const int64_t rows = rows_of_each > 0 ? rows_of_each : all_rows / ranks;
    const auto all = static_cast<int32_t>(rows * ranks);
    const ScaledMoeProblem problem(
        s, all, draw_experts(chain.routing, s.num_experts, s.experts_per_token, all, 3), 1);
    const std::string of = std::to_string(rows) + " x " + std::to_string(s.hidden) + " a rank";
    table.add(std::string(chain.name) + ", the same rows alone",
              std::to_string(all) + " x " + std::to_string(s.hidden), time_alone(problem, length),
              exchanged_bytes(s, 1, all));
    const std::string name =
        std::string(chain.name) + ", " + std::to_string(ranks) + (gpus > 1 ? " GPUs" : " ranks");
    if (spare_sms == 0) {
      table.add(name, of, time_ranks(problem, ranks, 1, 0, length), exchanged_bytes(s, ranks, all));
      continue;
    }
    table.add(name + ", as many rounds", of, time_ranks(problem, ranks, ranks, 0, length),
              exchanged_bytes(s, ranks, all));
    table.add(name + ", as many in turn", of, time_ranks(problem, ranks, ranks, spare_sms, length),
              exchanged_bytes(s, ranks, all));
  }
}

int run(int argc, char** argv) {
  std::string only;
  int spare_sms = kSpareSms;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
    if (std::strcmp(argv[i], "--spare-sms") == 0) spare_sms = std::stoi(argv[i + 1]);
  }
  const Routing routing = routing_flag(argc, argv);
  BenchTable table(argc, argv);
  const Chain exchange = {"exchange", kExchange, routing}, layer = {"layer", kLayer, routing};
  const bool ranks_share = num_gpus() == 1;
  if (only == "" || only == "exchange") {
    for (const int64_t rows : {1, 16, 128}) measure(table, exchange, rows, 0, 20);
    measure(table, exchange, 0, 4096, 4);
    // Ranks that share a GPU have no room for it.
    if (!ranks_share) measure(table, exchange, 4096, 0, 4);
  }
  if (only == "" || only == "layer") {
    for (const int64_t rows : {1, 16, 128}) measure(table, layer, rows, 0, 8);
    measure(table, layer, 0, 4096, 2);
  }
  if (only == "" || only == "rounds") {
    for (const Chain& chain : {exchange, layer}) {
      measure(table, chain, ranks_share ? 1024 : 4096, 0, 2, spare_sms);
    }
  }
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) { return fathom::cuda::run(argc, argv); }
