// What sparse attention costs and gains in steps of a model of DeepSeek-V3.2's layers on a GPU: the
// model, the same over whole pages where no row chooses (as over a bf16 cache), in graphs for any
// length up to 160K and up to the step's own, with every row choosing its keys
// (--dsa-dense-threshold 0), and the same model without an indexer, which attends to all keys.
// Random (dummy) weights, steps without logits, cache of 656 bytes a token; a CUDA graph of one
// step, medians of 11 replays and of 5 turns of all forms.
//
//   sparse_layers_cuda_bench [MODEL] [--json]   MODEL: config.json's folder,
//   bench/models/v3.2-4-layers
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/math.h"
#include "device/cuda/graph_timer.h"
#include "model/deepseek_cuda.h"
#include "model/layer_options.h"
#include "model/model_bench_cuda.h"

namespace fathom::cuda {
namespace {

struct Work {
  int32_t sequences, queries, context;  // queries: new tokens of each sequence
};

constexpr int32_t kK = 1024;
constexpr Work kWorks[] = {{1, 1, kK},        {16, 1, kK},       {128, 1, kK},     // dense
                           {1, 1, 16 * kK},   {16, 1, 16 * kK},  {1, 1, 64 * kK},  // decode
                           {16, 1, 64 * kK},  {1, 1, 128 * kK},  {16, 1, 128 * kK},
                           {16, 512, 0},      {8, 1024, 0},      {4, 2000, 0},  // prompts
                           {1, 2048, 6 * kK}, {1, 2048, 30 * kK}};
constexpr int kTurns = 5;
constexpr int64_t kMostRows = 8192, kMostKeys = 8192, kMostLength = 160 * kK;
constexpr int64_t kMostGraphRows = 256;
constexpr CacheFormat kFormat = CacheFormat::kFp8Scaled;

ForwardBatch batch_of(const Work& work) {
  std::mt19937 random(5);
  ForwardBatch batch;
  batch.max_pages = static_cast<int32_t>(ceil_div(work.context + work.queries, kPageSize));
  batch.query_start.push_back(0);
  for (int32_t i = 0; i < work.sequences; ++i) {
    for (int32_t q = 0; q < work.queries; ++q) {
      batch.token_ids.push_back(static_cast<int32_t>(random() % 8000));
      batch.positions.push_back(work.context + q);
    }
    batch.query_start.push_back((i + 1) * work.queries);
    batch.context_lens.push_back(work.context);
    batch.prompt_lens.push_back(0);
    for (int32_t page = 0; page < batch.max_pages; ++page) {
      batch.block_tables.push_back(i * batch.max_pages + page);
    }
  }
  return batch;
}

// The checkpoint's configuration without its indexer.
Checkpoint without_indexer(const Checkpoint& checkpoint, const std::filesystem::path& folder) {
  const auto text = read_text_file(checkpoint.directory() + "/config.json", 1 << 20);
  json::object config = parse_json(text.value(), "config.json")->as_object();
  for (const char* field : {"architectures", "index_n_heads", "index_head_dim", "index_topk"}) {
    config.erase(field);
  }
  config["model_type"] = "deepseek_v3";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << json::serialize(config);
  auto opened = Checkpoint::open_dummy(folder.string());
  if (!opened) throw std::runtime_error(opened.error().message);
  return std::move(*opened);
}

// Random index keys in all pages: codes of small values, scales of 1.
void fill_index_keys(const ModelConfig& config, const DeviceArray<std::byte>& cache) {
  constexpr int64_t kDifferent = 61;
  const int64_t part = latent_layout(config, kFormat).page_bytes();
  const int64_t page = gpu_page_stride(config, kFormat, false) * part;
  const int64_t bytes = config.num_layers * kIndexPageBytes;
  std::mt19937 random(6);
  std::vector<std::byte> some(static_cast<size_t>(kDifferent * bytes));
  for (std::byte& code : some) code = static_cast<std::byte>(random() & 0xBF);
  const float one = 1;
  for (int64_t at = 0; at < std::ssize(some); at += kIndexPageBytes) {
    for (int64_t i = kIndexValueBytes; i < kIndexPageBytes; i += 4) {
      std::memcpy(some.data() + at + i, &one, 4);
    }
  }
  const int64_t pages = cache.size() / page;
  for (int64_t first = 0; first < pages; first += kDifferent) {
    check(cudaMemcpy2D(
              cache.data() + first * page + config.num_layers * part, static_cast<size_t>(page),
              some.data(), static_cast<size_t>(bytes), static_cast<size_t>(bytes),
              static_cast<size_t>(std::min(kDifferent, pages - first)), cudaMemcpyHostToDevice),
          "filling index keys");
  }
}

// How a step's absorbed rows are planned. kOwnLength: as kAnyLength, in a graph whose sequences are
// at most as long as the step's.
enum class Rows { kAsPlanned, kPages, kAnyLength, kOwnLength };

// A model, and steps over a cache.
class Steps {
 public:
  Steps(const Checkpoint& checkpoint, std::optional<int64_t> dense_keys)
      : config_(checkpoint.config()), sampled_(kMostRows) {
    AttentionPolicy policy = gpu_attention_policy();
    policy.dense_keys = dense_keys;
    auto sparse = sparse_limits(config_, policy);
    if (sparse) fit_one_pass(*sparse, kMostGraphRows, kMostLength);  // as the engine has it
    auto model = DeepSeekModel::load(checkpoint,
                                     {.max_rows = kMostRows,
                                      .max_logit_rows = 1,
                                      .most_keys = kMostKeys,
                                      .cache_format = kFormat,
                                      .sparse = sparse,
                                      .max_length = kMostLength},
                                     {.show_progress = false});
    if (!model) throw std::runtime_error(model.error().message);
    model_ = std::move(*model);
    limits_ = {.heads = config_.num_heads,
               .num_multiprocessors = model_->num_multiprocessors(),
               .shape = {config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim,
                         config_.v_dim, /*grouped=*/false, sparse},
               .policy = policy,
               .most_keys = kMostKeys,
               .max_length = kMostLength,
               .page_stride = gpu_page_stride(config_, kFormat, false)};
    pages_planner_.emplace(limits_);
    limits_.lists_always = true;  // as the engine has it over 8-bit caches
    planner_.emplace(limits_);
  }

  // us of a step. kAnyLength, kOwnLength: of a decode step.
  double time(const Work& work, const DeviceArray<std::byte>& cache, Rows rows) {
    StepLayout layout;
    const ForwardBatch batch = batch_of(work);
    StepLimits own = limits_;
    own.max_length = round_up(int64_t{work.context} + work.queries, kPageSize);
    std::optional<StepPlanner> own_planner(own);
    auto& planner = rows == Rows::kPages       ? pages_planner_
                    : rows == Rows::kOwnLength ? own_planner
                                               : planner_;
    planner->plan(batch, batch.num_rows(), layout);
    if (rows == Rows::kAnyLength || rows == Rows::kOwnLength) planner->plan_any_length(layout);
    const DeviceArray<std::byte> arrays(layout.memory);
    const int64_t part = latent_layout(config_, kFormat).page_bytes();
    const int64_t stride = gpu_page_stride(config_, kFormat, false);
    const CacheMemory memory = {kFormat, cache.data(), cache.size() / (part * stride), part,
                                stride};
    return time_in_graph(1, [&](int, cudaStream_t stream) {
      model_->forward(layout, arrays.data(), sampled_.data(), memory, stream);
    });
  }

 private:
  const ModelConfig config_;
  const DeviceArray<int32_t> sampled_;
  std::unique_ptr<DeepSeekModel> model_;
  StepLimits limits_;
  std::optional<StepPlanner> planner_, pages_planner_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(const Checkpoint& checkpoint, bool json) {
  const auto folder = std::filesystem::temp_directory_path() / "sparse_layers_cuda_bench";
  const Checkpoint dense = without_indexer(checkpoint, folder);
  Steps sparse(checkpoint, {}), forced(checkpoint, 0), none(dense, {});
  int64_t pages = 0;
  for (const Work& work : kWorks) {
    pages = std::max(pages, work.sequences * ceil_div(work.context + work.queries, kPageSize));
  }
  const ModelConfig& config = checkpoint.config();
  const DeviceArray<std::byte> cache =
      random_cache(latent_layout(config, kFormat), gpu_page_stride(config, kFormat, false) * pages);
  fill_index_keys(config, cache);
  std::printf(json ? "{\"device\": \"%s\", \"results\": ["
                   : "%s\nsequences tokens context |   us: sparse       pages  any length  own "
                     "length  all chosen  no indexer | over no indexer\n",
              device_line().c_str());
  const char* separator = "";
  for (const Work& work : kWorks) {
    constexpr size_t kForms = 6;
    std::vector<double> times[kForms];
    const auto decode = [&](Rows rows) {
      return work.queries > 1 ? 0 : sparse.time(work, cache, rows);
    };
    for (int turn = 0; turn < kTurns; ++turn) {
      times[0].push_back(sparse.time(work, cache, Rows::kAsPlanned));
      times[1].push_back(sparse.time(work, cache, Rows::kPages));
      times[2].push_back(decode(Rows::kAnyLength));
      times[3].push_back(decode(Rows::kOwnLength));
      times[4].push_back(forced.time(work, cache, Rows::kAsPlanned));
      times[5].push_back(none.time(work, cache, Rows::kAsPlanned));
    }
    double us[kForms];
    for (size_t i = 0; i < kForms; ++i) us[i] = median(times[i]);
    std::printf(json
                    ? "%s\n  {\"sequences\": %d, \"tokens\": %d, \"context\": %d, \"sparse_us\": "
                      "%.1f, \"pages_us\": %.1f, \"any_length_us\": %.1f, \"own_length_us\": %.1f, "
                      "\"all_chosen_us\": %.1f, \"no_indexer_us\": %.1f, \"ratio\": %.3f}"
                    : "%s%9d %6d %7d | %12.1f %11.1f %11.1f %11.1f %11.1f %11.1f | %.3f\n",
                separator, work.sequences, work.queries, work.context, us[0], us[1], us[2], us[3],
                us[4], us[5], us[0] / us[5]);
    if (json) separator = ",";
    std::fflush(stdout);
  }
  if (json) std::printf("\n]}\n");
  std::filesystem::remove_all(folder);
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  return fathom::cuda::model_bench_main(argc, argv, "bench/models/v3.2-4-layers",
                                        fathom::cuda::run);
}
