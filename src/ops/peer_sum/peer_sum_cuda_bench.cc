// A chain of peer_sum() or peer_sum_rows() in one CUDA graph a rank, all ranks on one device: what
// a sum costs where the links cost nothing. Beside it add_rms_norm() alone, with which one rank
// ends its block.
//
//   peer_sum_cuda_bench [--json]
#include <algorithm>
#include <chrono>
#include <cstdlib>
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

namespace fathom::cuda {
namespace {

constexpr int kChain = 122;  // sums of a step of DeepSeek-V3
constexpr int kReplays = 15, kWarm = 3;

// As in the test: a hardware queue for each rank's stream.
[[maybe_unused]] const int kQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

struct Rank {
  Rank(int64_t rows, int64_t n, std::mt19937& random)
      : residual(random_f32(rows * n, 1, random)),
        weight(random_f32(n, 1, random)),
        delta(random_bf16(rows * n, 0.01f, random)),
        values(rows * n),
        scales(n / kScaleBlock * round_up(rows, int64_t{4})) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  }
  ~Rank() { cudaStreamDestroy(stream); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  AddRmsNormArguments norm(int64_t rows, int64_t n) const {
    return {.residual = residual.data(),
            .delta = delta.data(),
            .delta_stride = n,
            .weight = weight.data(),
            .quantized = {.values = values.data(),
                          .values_row_stride = n,
                          .scales = scales.data(),
                          .scales_block_stride = round_up(rows, int64_t{4})},
            .rows = rows,
            .n = n};
  }

  const DeviceArray<float> residual, weight;
  const DeviceArray<uint16_t> delta;
  const DeviceArray<uint8_t> values;
  const DeviceArray<float> scales;
  cudaStream_t stream = nullptr;
};

enum class Form { kOneShot, kTwoShot };

// Median time of a sum, in us, over replays of all ranks' graphs: from the first one's launch to
// the last one's end, of which the launches themselves are a part.
double time_ranks(Form form, int ranks, int64_t rows, int64_t n) {
  std::mt19937 random(1);
  PeerGroup group(std::vector<int>(static_cast<size_t>(ranks), 0),
                  form == Form::kOneShot ? rows : 1, n, std::chrono::seconds(2));
  const int sms = DeviceContext::current().num_multiprocessors() / ranks;
  std::vector<std::unique_ptr<Rank>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<Rank>(rows, n, random));
  const auto enqueue = [&](int r) {
    const Rank& rank = *all[static_cast<size_t>(r)];
    const AddRmsNormArguments norm = rank.norm(rows, n);
    if (form == Form::kOneShot) {
      return peer_sum({.norm = norm, .peers = group.rank(r), .sms = sms}, rank.stream);
    }
    PeerRowsArguments a = {.weight = norm.weight, .rows = rows, .n = n, .peers = group.rank(r)};
    for (int peer = 0; peer < ranks; ++peer) {
      const AddRmsNormArguments of = all[static_cast<size_t>(peer)]->norm(rows, n);
      a.ranks[peer] = {of.residual, of.delta, nullptr, of.quantized};
    }
    a.sms = sms;
    peer_sum_rows(a, rank.stream);
  };
  std::vector<Graph> graphs;
  for (int r = 0; r < ranks; ++r) {
    graphs.emplace_back(all[static_cast<size_t>(r)]->stream, [&] {
      for (int i = 0; i < kChain; ++i) enqueue(r);
    });
  }
  std::vector<double> times;
  for (int replay = -kWarm; replay < kReplays; ++replay) {
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < ranks; ++r) {
      graphs[static_cast<size_t>(r)].launch(all[static_cast<size_t>(r)]->stream);
    }
    for (const auto& rank : all) check(cudaStreamSynchronize(rank->stream), "peer_sum");
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (replay >= 0) times.push_back(took.count() / kChain);
  }
  if (group.late()) throw std::runtime_error("a rank did not come");
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

void measure(BenchTable& table, int64_t rows, int64_t n) {
  const std::string shape = std::to_string(rows) + " x " + std::to_string(n);
  // Residual in and out, delta in, e4m3 out; the packets are counted with the ranks'.
  const double bytes = static_cast<double>(rows * n) * (4 + 4 + 2 + 1);
  std::mt19937 random(1);
  const Rank rank(rows, n, random);
  table.add(
      "add_rms_norm", shape,
      time_in_graph(kChain,
                    [&](int, cudaStream_t stream) { add_rms_norm(rank.norm(rows, n), stream); }),
      bytes);
  for (const int ranks : {2, 4, 8}) {
    const std::string suffix = ", " + std::to_string(ranks) + " ranks";
    const auto values = static_cast<double>(rows * n);
    if (rows <= 128) {
      const double packets = values * 16 / kPacketValues * 2 * (ranks - 1);
      table.add("peer_sum" + suffix, shape, time_ranks(Form::kOneShot, ranks, rows, n),
                ranks * (bytes + packets));
    }
    if (rows >= 64) {  // residual once, deltas and e4m3 of all ranks
      table.add("peer_sum_rows" + suffix, shape, time_ranks(Form::kTwoShot, ranks, rows, n),
                values * (4 + 4 + ranks * (2 + 1)));
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::BenchTable table(argc, argv);
  for (const int64_t rows : {1, 4, 16, 64, 128, 512, 4096})
    fathom::cuda::measure(table, rows, 7168);
  for (const int64_t rows : {1, 64}) fathom::cuda::measure(table, rows, 2048);
}
