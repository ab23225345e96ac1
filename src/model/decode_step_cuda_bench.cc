// Time of a decode step of the whole model on the GPU, without sampling and host work: random
// (dummy) weights; a CUDA graph of one step, median of 11 replays. "by operations": where one
// launch takes the MoE layers of a token, the same step with a launch for each operation.
//
//   decode_step_cuda_bench [MODEL] [--json]      MODEL: config.json's folder, bench/models/v2-lite
#include <cstdio>
#include <vector>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cuda/graph_timer.h"
#include "model/deepseek_cuda.h"
#include "model/model_bench_cuda.h"

namespace fathom::cuda {
namespace {

struct Work {
  int32_t sequences, context;
};

constexpr Work kWorks[] = {{1, 128},  {1, 1024},   {1, 4096},  {1, 8192}, {1, 16000},
                           {2, 128},  {2, 1024},   {2, 1700},  {2, 4096}, {4, 1024},
                           {8, 1024}, {128, 1024}, {256, 500}, {512, 500}};
constexpr int64_t kMaxRows = 512, kMostKeys = 128;

int64_t pages_of(const Work& work) { return ceil_div(work.context + 1, kPageSize); }

ForwardBatch batch_of(const Work& work) {
  ForwardBatch batch;
  batch.max_pages = static_cast<int32_t>(pages_of(work));
  batch.query_start.push_back(0);
  for (int32_t i = 0; i < work.sequences; ++i) {
    batch.token_ids.push_back(17 + i);
    batch.positions.push_back(work.context);
    batch.query_start.push_back(i + 1);
    batch.context_lens.push_back(work.context);
    for (int32_t page = 0; page < batch.max_pages; ++page) {
      batch.block_tables.push_back(i * batch.max_pages + page);
    }
    batch.logit_rows.push_back(i);
  }
  return batch;
}

struct Times {
  double us = 0, by_operations_us = 0;  // the second 0: the same launches
};

Times measure(DeepSeekModel& model, const ModelConfig& config, const Work& work) {
  const LatentLayout rows{CacheFormat::kBF16, config.kv_lora_rank, config.qk_rope_dim};
  const int64_t pages = work.sequences * pages_of(work);
  const DeviceArray<std::byte> cache = random_cache(rows, config.num_layers * pages);
  StepPlanner planner(
      {.heads = config.num_heads,
       .num_multiprocessors = model.num_multiprocessors(),
       .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim},
       .most_keys = kMostKeys,
       .page_stride = config.num_layers});
  StepLayout layout;
  planner.plan(batch_of(work), work.sequences, layout);
  const DeviceArray<std::byte> arrays(layout.memory);
  const DeviceArray<int32_t> sampled(kMaxRows);
  const auto time = [&] {
    return time_in_graph(1, [&](int, cudaStream_t stream) {
      model.forward(layout, arrays.data(), sampled.data(),
                    {rows.format, cache.data(), pages, rows.page_bytes(), config.num_layers},
                    stream);
    });
  };
  Times times{.us = time()};
  if (layout.rows > model.most_rows_of_one_launch() ||
      layout.all_keys > model.most_keys_of_one_launch(layout.rows, rows.format)) {
    return times;
  }
  layout.all_keys = model.most_keys_of_one_launch(layout.rows, rows.format) + 1;
  times.by_operations_us = time();
  return times;
}

int run(const Checkpoint& checkpoint, bool json) {
  auto model = DeepSeekModel::load(
      checkpoint, {.max_rows = kMaxRows, .max_logit_rows = kMaxRows, .most_keys = kMostKeys},
      {.show_progress = false});
  if (!model) {
    std::fprintf(stderr, "%s\n", model.error().message.c_str());
    return 2;
  }
  std::printf(json ? "{\"device\": \"%s\", \"results\": ["
                   : "%s\nsequences context      us  by operations\n",
              device_line().c_str());
  const char* separator = "";
  for (const Work& work : kWorks) {
    const Times times = measure(**model, checkpoint.config(), work);
    std::printf(
        json ? "%s\n  {\"sequences\": %d, \"context\": %d, \"us\": %.1f" : "%s%9d %7d %7.1f",
        separator, work.sequences, work.context, times.us);
    if (times.by_operations_us > 0) {
      std::printf(json ? ", \"by_operations_us\": %.1f" : " %14.1f", times.by_operations_us);
    }
    std::printf(json ? "}" : "\n");
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
