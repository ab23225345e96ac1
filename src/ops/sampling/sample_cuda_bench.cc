// The sampler on the GPU in a CUDA graph over different logits. Every row reads vocab * 4 bytes.
//
//   sample_cuda_bench [--json]
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/bench_table.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "ops/sampling/sample_batch.h"
#include "ops/sampling/sample_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kVocab = 102'400, kLargestVocab = 129'280;  // V2-Lite's, V3's
constexpr int64_t kMaxRows = 512;
constexpr int kCopies = 4;

// Spread 3 resembles a language model's logits; 0.3 a nearly flat row (random weights).
class Bench {
 public:
  Bench(BenchTable& table, float spread, int64_t vocab = kVocab)
      : table_(table), vocab_(vocab), logits_(kCopies * kMaxRows * vocab) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, spread);
    std::vector<float> some(static_cast<size_t>(31 * vocab + 4));
    for (float& value : some) value = normal(random);
    for (int64_t at = 0; at < logits_.size(); at += std::ssize(some)) {
      const int64_t count = std::min(std::ssize(some), logits_.size() - at);
      check(cudaMemcpy(logits_.data() + at, some.data(), static_cast<size_t>(count) * 4,
                       cudaMemcpyHostToDevice),
            "filling logits");
    }
  }

  void measure(const std::string& name, const SampleOptions& options, int num_logprobs,
               int64_t rows) {
    SampleBatch batch(vocab_);
    TokenHistory history;  // of a text of 1,000 tokens
    for (int32_t i = 0; i < 500; ++i) history.add_output(i * 197);
    for (int64_t row = 0; row < rows; ++row) {
      batch.add({.row = row,
                 .options = &options,
                 .history = &history,
                 .position = static_cast<uint64_t>(row),
                 .num_logprobs = num_logprobs});
    }
    const DeviceArray<DeviceSampleRow> device_rows(
        std::vector(batch.rows().begin(), batch.rows().end()));
    const DeviceArray<int32_t> ids(rows), top_ids(rows * kDeviceTopLogprobs);
    const DeviceArray<float> logprobs(rows), top_logprobs(rows * kDeviceTopLogprobs);
    const DeviceArray<SeenToken> seen(std::vector(batch.seen().begin(), batch.seen().end()));
    const int copies = rows < kMaxRows ? 32 : kCopies;
    const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
      const int64_t first = copy * rows % (kCopies * kMaxRows - rows + 1);
      sample({.logits = logits_.data() + first * vocab_,
              .logits_stride = vocab_,
              .vocab = vocab_,
              .rows = device_rows.data(),
              .num_rows = rows,
              .seen = seen.data(),
              .ids = ids.data(),
              .logprobs = logprobs.data(),
              .top_ids = top_ids.data(),
              .top_logprobs = top_logprobs.data()},
             stream);
    });
    table_.add(name, std::to_string(rows) + " rows", us, 4.0 * static_cast<double>(rows * vocab_));
  }

 private:
  BenchTable& table_;
  int64_t vocab_;
  DeviceArray<float> logits_;
};

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::BenchTable table(argc, argv);
  {
    fathom::cuda::Bench bench(table, 3);
    for (const int64_t rows : {1, 16, 64, 512}) {
      bench.measure("greedy", {.temperature = 0}, -1, rows);
      bench.measure("temperature", {.temperature = 0.8}, -1, rows);
      bench.measure("top-k 50", {.top_k = 50}, -1, rows);
      bench.measure("top-p 0.95", {.temperature = 0.6, .top_p = 0.95}, -1, rows);
      bench.measure("min-p 0.05", {.min_p = 0.05}, -1, rows);
      bench.measure("penalties, top-k, top-p",
                    {.top_p = 0.8, .top_k = 20, .repetition_penalty = 1.1, .presence_penalty = 1},
                    -1, rows);
      bench.measure("greedy, 20 log-probabilities", {.temperature = 0}, 20, rows);
    }
  }
  {
    fathom::cuda::Bench bench(table, 3, fathom::cuda::kLargestVocab);
    for (const int64_t rows : {1, 16, 128}) {
      bench.measure("greedy, 129280 tokens", {.temperature = 0}, -1, rows);
      bench.measure("temperature, 129280 tokens", {.temperature = 0.8}, -1, rows);
      bench.measure("top-p 0.95, 129280 tokens", {.temperature = 0.6, .top_p = 0.95}, -1, rows);
    }
  }
  fathom::cuda::Bench flat(table, 0.3f);
  for (const int64_t rows : {1, 512}) {
    flat.measure("temperature, flat", {}, -1, rows);
    flat.measure("top-p 0.95, flat", {.top_p = 0.95}, -1, rows);
  }
}
