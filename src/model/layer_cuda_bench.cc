// Time of one MoE layer in steps of the whole model on the GPU: the difference between a step of
// the model and one of the same model with fewer MoE layers, divided by the difference in layers.
// Both steps are without logits: the head of DeepSeek-V3, 1.9 GB, takes 420 or 520 us from one
// replay to the next, more than half of a layer's time at batch 1. Random (dummy) weights, cache of
// 656 bytes a token; CUDA graphs of one step, medians of 11 replays, and of 3 to 31 turns of both
// models.
//
//   layer_cuda_bench [MODEL] [--json]      MODEL: config.json's folder, bench/models/v3-10-layers
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "base/math.h"
#include "device/cuda/graph_timer.h"
#include "model/deepseek_cuda.h"
#include "model/model_bench_cuda.h"

namespace fathom::cuda {
namespace {

struct Work {
  int32_t sequences, queries, context;  // queries: new tokens of each sequence
  int turns;
};

// Two to four rows: of a sequence each, and of one, as a step with drafts has them.
constexpr Work kWorks[] = {{1, 1, 1024, 31},  {2, 1, 1024, 21}, {1, 2, 1024, 21}, {3, 1, 1024, 21},
                           {1, 3, 1024, 21},  {4, 1, 1024, 21}, {1, 4, 1024, 21}, {16, 1, 1024, 5},
                           {128, 1, 1024, 5}, {1, 4096, 0, 3}};
constexpr int kWarmTurns = 3;
constexpr int64_t kMostRows = 4096, kMostLogitRows = 128, kMostPages = 128 * 17;

// Layers of the same model with two MoE layers: in both models the last layer drops the rows
// without logits: all of them where there are none.
int64_t fewer_layers(const ModelConfig& config) { return config.first_dense_layers + 2; }

ForwardBatch batch_of(const Work& work, bool logits) {
  std::mt19937 random(5);
  ForwardBatch batch;
  batch.max_pages = static_cast<int32_t>(ceil_div(work.context + work.queries, kPageSize));
  batch.query_start.push_back(0);
  for (int32_t i = 0; i < work.sequences; ++i) {
    for (int32_t q = 0; q < work.queries; ++q) {
      batch.token_ids.push_back(static_cast<int32_t>(random() % 10'000));
      batch.positions.push_back(work.context + q);
    }
    batch.query_start.push_back((i + 1) * work.queries);
    batch.context_lens.push_back(work.context);
    for (int32_t page = 0; page < batch.max_pages; ++page) {
      batch.block_tables.push_back(i * batch.max_pages + page);
    }
    if (logits) batch.logit_rows.push_back((i + 1) * work.queries - 1);
  }
  return batch;
}

// A model with a cache, and the step arrays of each workload.
class Steps {
 public:
  explicit Steps(const Checkpoint& checkpoint)
      : config_(checkpoint.config()),
        cache_row_{CacheFormat::kFp8Scaled, config_.kv_lora_rank, config_.qk_rope_dim},
        cache_(random_cache(cache_row_, config_.num_layers * kMostPages)),
        sampled_(kMostRows) {
    auto model = DeepSeekModel::load(
        checkpoint,
        {.max_rows = kMostRows, .max_logit_rows = kMostLogitRows, .most_keys = kMostRows},
        {.show_progress = false});
    if (!model) throw std::runtime_error(model.error().message);
    model_ = std::move(*model);
    StepPlanner planner(
        {.heads = config_.num_heads,
         .num_multiprocessors = model_->num_multiprocessors(),
         .shape = {config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim, config_.v_dim},
         .policy = gpu_attention_policy(),
         .most_keys = kMostRows,
         .page_stride = config_.num_layers});
    for (size_t i = 0; i < std::size(steps_); ++i) {
      const Work& work = kWorks[i / 2];
      Step& step = steps_[i];
      planner.plan(batch_of(work, i % 2 == 1), int64_t{work.sequences} * work.queries, step.layout);
      step.arrays = DeviceArray<std::byte>(step.layout.memory);
    }
  }

  // Time of one step in us, with each sequence's logits or without any.
  double time(size_t work, bool logits) {
    const Step& step = steps_[2 * work + (logits ? 1 : 0)];
    return time_in_graph(1, [&](int, cudaStream_t stream) {
      model_->forward(step.layout, step.arrays.data(), sampled_.data(),
                      {cache_row_.format, cache_.data(), kMostPages, cache_row_.page_bytes(),
                       config_.num_layers},
                      stream);
    });
  }

 private:
  const ModelConfig config_;
  const LatentLayout cache_row_;
  const DeviceArray<std::byte> cache_;
  const DeviceArray<int32_t> sampled_;
  std::unique_ptr<DeepSeekModel> model_;
  struct Step {
    StepLayout layout;
    DeviceArray<std::byte> arrays;
  };
  Step steps_[2 * std::size(kWorks)];  // of each work without logits, then with them
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Times {
  double fewer, all, layer;  // us, medians; steps with logits
};

// In turns: within seconds the GPU's clock varies by more than a layer's time at batch 1.
std::vector<Times> measure(Steps& fewer, Steps& all, int64_t more_layers) {
  std::vector<Times> times;
  for (size_t i = 0; i < std::size(kWorks); ++i) {
    std::vector<double> with_fewer, with_all, layer;
    for (int turn = -kWarmTurns; turn < kWorks[i].turns; ++turn) {
      const double a = fewer.time(i, false), b = all.time(i, false);
      const double step_of_fewer = fewer.time(i, true), step = all.time(i, true);
      if (turn < 0) continue;
      with_fewer.push_back(step_of_fewer);
      with_all.push_back(step);
      layer.push_back((b - a) / static_cast<double>(more_layers));
    }
    times.push_back({median(with_fewer), median(with_all), median(layer)});
  }
  return times;
}

int run(const Checkpoint& checkpoint, bool json) {
  const int64_t layers = checkpoint.config().num_layers, fewer = fewer_layers(checkpoint.config());
  const auto smaller = Checkpoint::open_dummy(checkpoint.directory(), fewer);
  if (fewer >= layers || !smaller) {
    std::fprintf(stderr, "%s has no two MoE layers more than %ld\n", checkpoint.directory().c_str(),
                 fewer);
    return 2;
  }
  Steps with_fewer(*smaller), with_all(checkpoint);
  const std::vector<Times> times = measure(with_fewer, with_all, layers - fewer);
  std::printf(json ? "{\"device\": \"%s\", \"results\": ["
                   : "%s\nsequences  new cached  %ld layers %ld layers an MoE layer (us)\n",
              device_line().c_str(), layers, fewer);
  const char* separator = "";
  for (size_t i = 0; i < std::size(kWorks); ++i) {
    const Work& work = kWorks[i];
    std::printf(json ? "%s\n  {\"sequences\": %d, \"new\": %d, \"cached\": %d, \"step_us\": %.1f, "
                       "\"step_of_fewer_layers_us\": %.1f, \"moe_layer_us\": %.1f}"
                     : "%s%9d %4d %6d %10.1f %10.1f %10.1f\n",
                separator, work.sequences, work.queries, work.context, times[i].all, times[i].fewer,
                times[i].layer);
    if (json) separator = ",";
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  return fathom::cuda::model_bench_main(argc, argv, "bench/models/v3-10-layers", fathom::cuda::run);
}
