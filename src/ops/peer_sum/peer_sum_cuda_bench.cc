// A chain of peer_sum() or peer_sum_rows() in one CUDA graph a rank. With one GPU all ranks share
// it: what a sum costs where the links cost nothing. With several each rank has one of its own.
// Beside it add_rms_norm() alone, with which one rank ends its block.
//
//   peer_sum_cuda_bench [--json]
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/math.h"
#include "device/cuda/bench_table.h"
#include "device/cuda/graph.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/peer_sum/peer_rows_cuda.h"
#include "ops/peer_sum/peer_sum_cuda.h"
#include "ops/peer_sum/peer_trial_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kChain = 122;  // sums of a step of DeepSeek-V3
constexpr int kReplays = 15, kWarm = 3;

// A rank's arrays and the norm that ends its block.
struct Rank {
  Rank(int device, const PeerShape& shape, std::mt19937& random)
      : arrays(device, shape, shape.n), weight(random_f32(shape.n, 1, random)) {
    arrays.residual.copy_from(random_f32(shape.rows * shape.n, 1, random));
    arrays.delta.copy_from(random_bf16(shape.rows * shape.n, 0.01f, random));
  }

  AddRmsNormArguments norm(const PeerShape& shape) const {
    return {.residual = arrays.residual.data(),
            .delta = arrays.delta.data(),
            .delta_stride = shape.n,
            .weight = weight.data(),
            .quantized = {.values = arrays.values.data(),
                          .values_row_stride = shape.n,
                          .scales = arrays.scales.data(),
                          .scales_block_stride = round_up(shape.rows, int64_t{4})},
            .rows = shape.rows,
            .n = shape.n};
  }

  PeerTrialRank arrays;  // first: makes its device current
  const DeviceArray<float> weight;
};

enum class Form { kOneShot, kTwoShot };

// Median time of a sum, in us, over replays of all ranks' graphs: from the first one's launch to
// the last one's end, of which the launches themselves are a part.
double time_ranks(Form form, const PeerShape& shape) {
  const auto [ranks, rows, n] = shape;
  std::mt19937 random(1);
  PeerGroup group(trial_devices(ranks), form == Form::kOneShot ? rows : 1, n,
                  std::chrono::seconds(2));
  const int sms = DeviceContext::current().num_multiprocessors() / ceil_div(ranks, num_gpus());
  std::vector<std::unique_ptr<Rank>> all;
  for (const int device : trial_devices(ranks)) {
    all.push_back(std::make_unique<Rank>(device, shape, random));
  }
  const auto enqueue = [&](int r) {
    const Rank& rank = *all[static_cast<size_t>(r)];
    const AddRmsNormArguments norm = rank.norm(shape);
    if (form == Form::kOneShot) {
      return peer_sum({.norm = norm, .peers = group.rank(r), .sms = sms}, rank.arrays.stream());
    }
    PeerRowsArguments a = {.weight = norm.weight, .rows = rows, .n = n, .peers = group.rank(r)};
    for (int peer = 0; peer < ranks; ++peer) {
      const AddRmsNormArguments of = all[static_cast<size_t>(peer)]->norm(shape);
      a.ranks[peer] = {of.residual, of.delta, nullptr, of.quantized};
    }
    a.sms = sms;
    peer_sum_rows(a, rank.arrays.stream());
  };
  std::vector<Graph> graphs;
  for (int r = 0; r < ranks; ++r) {
    graphs.emplace_back(all[static_cast<size_t>(r)]->arrays.stream(), [&] {
      for (int i = 0; i < kChain; ++i) enqueue(r);
    });
  }
  std::vector<double> times;
  for (int replay = -kWarm; replay < kReplays; ++replay) {
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks; ++r) {
      graphs[static_cast<size_t>(r)].launch(all[static_cast<size_t>(r)]->arrays.stream());
    }
    for (const auto& rank : all) check(cudaStreamSynchronize(rank->arrays.stream()), "peer_sum");
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (replay >= 0) times.push_back(took.count() / kChain);
  }
  if (group.late()) throw std::runtime_error("a rank did not come");
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

void measure(BenchTable& table, int64_t rows, int64_t n) {
  const PeerShape alone = {1, rows, n};
  const std::string shape = std::to_string(rows) + " x " + std::to_string(n);
  // Residual in and out, delta in, e4m3 out; the packets are counted with the ranks'.
  const double bytes = static_cast<double>(rows * n) * (4 + 4 + 2 + 1);
  std::mt19937 random(1);
  const Rank rank(0, alone, random);
  table.add("add_rms_norm", shape,
            time_in_graph(
                kChain, [&](int, cudaStream_t stream) { add_rms_norm(rank.norm(alone), stream); }),
            bytes);
  const int gpus = num_gpus();
  for (const int ranks : {2, 4, 8}) {
    if (gpus > 1 && ranks > gpus) break;
    const std::string suffix = ", " + std::to_string(ranks) + (gpus > 1 ? " GPUs" : " ranks");
    const auto values = static_cast<double>(rows * n);
    if (rows <= 128) {
      const double packets = values * 16 / kPacketValues * 2 * (ranks - 1);
      table.add("peer_sum" + suffix, shape, time_ranks(Form::kOneShot, {ranks, rows, n}),
                ranks * (bytes + packets));
    }
    if (rows >= 64) {  // residual once, deltas and e4m3 of all ranks
      table.add("peer_sum_rows" + suffix, shape, time_ranks(Form::kTwoShot, {ranks, rows, n}),
                values * (4 + 4 + ranks * (2 + 1)));
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::BenchTable table(argc, argv);
  for (const int64_t rows : {1, 4, 16, 18, 64, 128, 512, 4096})  // 18: 252 KB in bf16
    fathom::cuda::measure(table, rows, 7168);
  for (const int64_t rows : {1, 4, 64}) fathom::cuda::measure(table, rows, 2048);
  fathom::cuda::measure(table, 1, 1024);  // 2 KB
}
