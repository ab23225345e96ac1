// Time of one MoE layer in steps of the whole model on the GPU: what a step of the model takes
// longer than one of the same model with fewer MoE layers, over their number. Random weights, cache
// in 656 bytes a token; CUDA graphs of one step, medians of 11 replays.
//
//   layer_cuda_bench [MODEL] [--json]      MODEL: config.json's folder, bench/models/v3-10-layers
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
  int32_t sequences, queries, context;  // queries: new tokens of each
};

constexpr Work kWorks[] = {{1, 1, 1024}, {16, 1, 1024}, {128, 1, 1024}, {1, 4096, 0}};
constexpr int64_t kMostRows = 4096, kMostLogitRows = 128, kMostPages = 128 * 17;

// A model that is the same but for its MoE layers, of which it keeps two: in either the last layer
// lets go of the rows without logits.
int64_t fewer_layers(const ModelConfig& config) { return config.first_dense_layers + 2; }

ForwardBatch batch_of(const Work& work) {
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
    batch.logit_rows.push_back((i + 1) * work.queries - 1);
  }
  return batch;
}

// us of a step of each work.
std::vector<double> measure(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  const auto model = DeepSeekModel::load(
      checkpoint, {.max_rows = kMostRows, .max_logit_rows = kMostLogitRows, .most_keys = kMostRows},
      {.show_progress = false});
  if (!model) throw std::runtime_error(model.error().message);
  const LatentLayout rows{CacheFormat::kFp8Scaled, config.kv_lora_rank, config.qk_rope_dim};
  const DeviceArray<std::byte> cache = random_cache(rows, config.num_layers * kMostPages);
  const DeviceArray<int32_t> sampled(kMostRows);
  StepPlanner planner(
      {.heads = config.num_heads,
       .num_multiprocessors = (*model)->num_multiprocessors(),
       .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim},
       .policy = gpu_attention_policy(),
       .most_keys = kMostRows});
  std::vector<double> times(std::size(kWorks));
  // Twice: a device that was idle while the weights were made takes a while to its clock's rate.
  for (int pass = 0; pass < 2; ++pass) {
    for (size_t i = 0; i < std::size(kWorks); ++i) {
      const Work& work = kWorks[i];
      StepLayout layout;
      planner.plan(batch_of(work), int64_t{work.sequences} * work.queries, layout);
      const DeviceArray<std::byte> arrays(layout.memory);
      times[i] = time_in_graph(1, [&](int, cudaStream_t stream) {
        (*model)->forward(layout, arrays.data(), sampled.data(),
                          {rows.format, cache.data(), kMostPages, kMostPages * rows.page_bytes()},
                          stream);
      });
    }
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
  const std::vector<double> with_fewer = measure(*smaller), all = measure(checkpoint);
  std::printf(json ? "{\"device\": \"%s\", \"results\": ["
                   : "%s\nsequences  new cached  %ld layers %ld layers an MoE layer (us)\n",
              device_line().c_str(), layers, fewer);
  const char* separator = "";
  for (size_t i = 0; i < std::size(kWorks); ++i) {
    const Work& work = kWorks[i];
    std::printf(json ? "%s\n  {\"sequences\": %d, \"new\": %d, \"cached\": %d, \"step_us\": %.1f, "
                       "\"step_of_fewer_layers_us\": %.1f, \"moe_layer_us\": %.1f}"
                     : "%s%9d %4d %6d %10.1f %10.1f %10.1f\n",
                separator, work.sequences, work.queries, work.context, all[i], with_fewer[i],
                (all[i] - with_fewer[i]) / static_cast<double>(layers - fewer));
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
