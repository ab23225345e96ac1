// Time of a whole step on the GPU with either form of attention, by new tokens and cached context:
// the data behind AttentionPolicy's crossover (docs/performance.md, "The two forms of attention").
// Random (dummy) weights; a CUDA graph of one step, median of 11 replays.
//
//   attention_form_cuda_bench [MODEL] [--json]      MODEL: config.json's folder,
//   bench/models/v2-lite
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cuda/graph_timer.h"
#include "model/deepseek_cuda.h"
#include "model/model_bench_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kMaxRows = 2048, kMostKeys = 1 << 17, kMostPages = 1200;

struct Work {
  int32_t queries, context;  // per sequence
};

ForwardBatch batch_of(const Work& work) {
  std::mt19937 random(5);
  ForwardBatch batch;
  const int64_t pages = ceil_div(work.context + work.queries, kPageSize);
  batch.max_pages = static_cast<int32_t>(pages);
  batch.query_start.push_back(0);
  for (int32_t i = 0; i < work.queries; ++i) {
    batch.token_ids.push_back(static_cast<int32_t>(random() % 10'000));
    batch.positions.push_back(work.context + i);
  }
  batch.query_start.push_back(work.queries);
  batch.context_lens.push_back(work.context);
  for (int32_t page = 0; page < pages; ++page) batch.block_tables.push_back(page);
  batch.logit_rows.push_back(work.queries - 1);
  return batch;
}

class Bench {
 public:
  explicit Bench(const Checkpoint& checkpoint)
      : config_(checkpoint.config()),
        layout_{CacheFormat::kBF16, config_.kv_lora_rank, config_.qk_rope_dim},
        cache_(random_cache(layout_, config_.num_layers * kMostPages)),
        sampled_(kMaxRows) {
    auto loaded = DeepSeekModel::load(
        checkpoint, {.max_rows = kMaxRows, .max_logit_rows = 512, .most_keys = kMostKeys},
        {.show_progress = false});
    if (!loaded) throw std::runtime_error(loaded.error().message);
    model_ = std::move(*loaded);
  }

  double measure(const Work& work, AttentionForm form) {
    StepPlanner planner(
        {.heads = config_.num_heads,
         .num_multiprocessors = model_->num_multiprocessors(),
         .shape = {config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim, config_.v_dim},
         .policy = {.form = form},
         .most_keys = kMostKeys,
         .page_stride = config_.num_layers});
    const ForwardBatch batch = batch_of(work);
    StepLayout layout;
    planner.plan(batch, std::ssize(batch.token_ids), layout);
    const DeviceArray<std::byte> arrays(layout.memory);
    return time_in_graph(1, [&](int, cudaStream_t stream) {
      model_->forward(
          layout, arrays.data(), sampled_.data(),
          {layout_.format, cache_.data(), kMostPages, layout_.page_bytes(), config_.num_layers},
          stream);
    });
  }

 private:
  const ModelConfig& config_;
  const LatentLayout layout_;
  const DeviceArray<std::byte> cache_;
  const DeviceArray<int32_t> sampled_;
  std::unique_ptr<DeepSeekModel> model_;
};

int run(const Checkpoint& checkpoint, bool json) {
  Bench bench(checkpoint);
  std::vector<Work> works;
  for (const int32_t context : {0, 256, 1024, 4096, 16384, 65536}) {
    // A step of single tokens is always absorbed, whatever the policy.
    for (const int32_t queries : {4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
      works.push_back({queries, context});
    }
  }
  std::printf(
      json ? "{\"device\": \"%s\", \"results\": [" : "%s\n new cached absorbed us multi-head us\n",
      device_line().c_str());
  const char* separator = "";
  for (const Work& work : works) {
    const double absorbed = bench.measure(work, AttentionForm::kAbsorbed);
    const double mha = bench.measure(work, AttentionForm::kMha);
    std::printf(json ? "%s\n  {\"new\": %d, \"cached\": %d, \"absorbed_us\": "
                       "%.1f, \"mha_us\": %.1f}"
                     : "%s%4d %6d %11.1f %13.1f\n",
                separator, work.queries, work.context, absorbed, mha);
    if (json) separator = ",";
    std::fflush(stdout);
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  return fathom::cuda::model_bench_main(argc, argv, "bench/models/v2-lite", fathom::cuda::run);
}
