#include <algorithm>
#include <cstring>
#include <utility>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cpu/thread_pool.h"
#include "device/cuda/graph.h"
#include "device/cuda/pinned_array.h"
#include "engine/gpu_runner.h"
#include "engine/logits_runner.h"
#include "model/deepseek_cuda.h"

namespace fathom {
namespace {

using cuda::check;

// Padded sizes of the decode steps that are captured.
std::vector<int64_t> graph_sizes(int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < most; size += size < 4 ? 1 : size < 16 ? 4 : size < 64 ? 8 : 16) {
    sizes.push_back(size);
  }
  sizes.push_back(most);
  return sizes;
}

int64_t model_len(const ModelConfig& config, const GpuRunnerOptions& options) {
  const int64_t most = options.max_model_len > 0 ? options.max_model_len : config.max_position;
  return std::min(most, round_up(options.max_total_tokens, kPageSize));
}

cuda::ModelOptions model_options(const ModelConfig& config, const GpuRunnerOptions& options) {
  return {.max_rows = options.max_batched_tokens,
          .max_logit_rows = options.max_num_seqs + options.max_prompt_logit_rows,
          // A sequence's keys are expanded together.
          .most_keys = std::max(model_len(config, options), options.max_batched_tokens)};
}

int64_t page_bytes(const ModelConfig& config) {
  return LatentLayout{CacheFormat::kBF16, config.kv_lora_rank, config.qk_rope_dim}.page_bytes();
}

// Calls body(), and makes an error of what the device throws.
template <typename Body>
auto guarded(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const cuda::DeviceError& failure) {
    return error(Code::kInternal, "{}", failure.what());
  }
}

class GpuPageTransfer : public PageTransfer {
 public:
  GpuPageTransfer(const cuda::CacheMemory& cache, int64_t page_bytes, int64_t layers,
                  cudaStream_t stream)
      : cache_(cache), page_bytes_(page_bytes), layers_(layers), stream_(stream) {}

  int64_t page_bytes() const override { return page_bytes_ * layers_; }
  void save(int32_t page, std::byte* host) override {
    copy(host, page_bytes_, cache_.data + page * page_bytes_, cache_.layer_bytes,
         cudaMemcpyDeviceToHost);
  }
  void load(const std::byte* host, int32_t page) override {
    copy(cache_.data + page * page_bytes_, cache_.layer_bytes, host, page_bytes_,
         cudaMemcpyHostToDevice);
  }
  void finish() override { check(cudaStreamSynchronize(stream_), "copying pages"); }

 private:
  void copy(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
            cudaMemcpyKind kind) {
    check(cudaMemcpy2DAsync(to, static_cast<size_t>(to_stride), from,
                            static_cast<size_t>(from_stride), static_cast<size_t>(page_bytes_),
                            static_cast<size_t>(layers_), kind, stream_),
          "copying pages");
  }

  const cuda::CacheMemory cache_;
  const int64_t page_bytes_, layers_;
  const cudaStream_t stream_;
};

class GpuRunner : public LogitsRunner {
 public:
  GpuRunner(const ModelConfig& config, const GpuRunnerOptions& options)
      : config_(config),
        options_(options),
        max_model_len_(model_len(config, options)),
        pool_(options.num_threads),
        host_stream_(pool_) {}
  ~GpuRunner() override {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    graphs_.clear();
    cudaStreamDestroy(stream_);
  }

  Result<> prepare(const Checkpoint& checkpoint) {
    check(cudaSetDevice(options_.device), "choosing the device");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    FATHOM_TRY(model_, cuda::DeepSeekModel::load(checkpoint, model_options(config_, options_),
                                                 options_.load));
    const int64_t pages = ceil_div(options_.max_total_tokens, kPageSize);
    const int64_t layer_bytes = pages * page_bytes(config_);
    cache_memory_ = cuda::DeviceArray<std::byte>(layer_bytes * config_.num_layers);
    cache_ = {cache_memory_.data(), pages, layer_bytes};
    page_transfer_.emplace(cache_, page_bytes(config_), config_.num_layers, stream_);
    const AttentionShape shape{config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim,
                               config_.v_dim};
    AttentionPolicy policy;
    policy.form = options_.attention;
    planner_.emplace(cuda::StepLimits{.heads = config_.num_heads,
                                      .num_multiprocessors = model_->num_multiprocessors(),
                                      .shape = shape,
                                      .policy = policy,
                                      .most_keys = model_options(config_, options_).most_keys});
    const int64_t bytes = planner_->most_bytes(options_.max_batched_tokens, options_.max_num_seqs,
                                               ceil_div(max_model_len_, kPageSize));
    arrays_ = cuda::DeviceArray<std::byte>(bytes);
    staged_ = cuda::PinnedArray<std::byte>(bytes);
    logits_ = cuda::PinnedArray<float>(model_options(config_, options_).max_logit_rows *
                                       config_.vocab_size);
    if (options_.graphs) capture();
    return {};
  }

  int64_t vocab_size() const override { return config_.vocab_size; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t num_pages() const override { return cache_.num_pages; }
  PageTransfer* page_transfer() override { return &*page_transfer_; }
  const Stream* host_stream() const override { return &host_stream_; }

  Result<ConstTensorView> forward(const ForwardBatch& batch) override {
    return guarded([&]() -> Result<ConstTensorView> {
      check(cudaSetDevice(options_.device), "choosing the device");
      const cuda::Graph* const graph = plan(batch);
      std::memcpy(staged_.data(), layout_.memory.data(), layout_.memory.size());
      check(cudaMemcpyAsync(arrays_.data(), staged_.data(), layout_.memory.size(),
                            cudaMemcpyHostToDevice, stream_),
            "copying a step's arrays");
      if (graph != nullptr) {
        graph->launch(stream_);
      } else {
        enqueue();
      }
      const auto rows = std::ssize(batch.logit_rows);
      check(cudaMemcpyAsync(logits_.data(), model_->logits(),
                            static_cast<size_t>(rows * config_.vocab_size) * sizeof(float),
                            cudaMemcpyDeviceToHost, stream_),
            "copying logits");
      check(cudaStreamSynchronize(stream_), "running a step");
      return ConstTensorView(logits_.data(), {rows, config_.vocab_size});
    });
  }

 private:
  // The graph that runs the batch, or null; its layout is made in either case.
  const cuda::Graph* plan(const ForwardBatch& batch) {
    int64_t rows = batch.num_rows();
    const cuda::Graph* graph = nullptr;
    if (cuda::StepPlanner::is_decode(batch)) {
      const auto found = std::lower_bound(
          graphs_.begin(), graphs_.end(), rows,
          [](const auto& captured, int64_t wanted) { return captured.first < wanted; });
      if (found != graphs_.end()) {
        rows = found->first;
        graph = &found->second;
      }
    }
    planner_->plan(batch, rows, layout_);
    FATHOM_CHECK(std::ssize(layout_.memory) <= arrays_.size(),
                 "a step's arrays take {} bytes of {}", layout_.memory.size(), arrays_.size());
    return graph;
  }

  void enqueue() { model_->forward(layout_, arrays_.data(), nullptr, cache_, stream_); }

  // Decode steps of made-up sequences: what they are is in device memory when a graph is launched.
  void capture() {
    for (const int64_t rows : graph_sizes(options_.max_num_seqs)) {
      ForwardBatch batch;
      batch.max_pages = 1;
      batch.query_start = {0};
      for (int32_t row = 0; row < rows; ++row) {
        batch.token_ids.push_back(0);
        batch.positions.push_back(0);
        batch.query_start.push_back(row + 1);
        batch.context_lens.push_back(0);
        batch.block_tables.push_back(0);
        batch.logit_rows.push_back(row);
      }
      planner_->plan(batch, rows, layout_);
      graphs_.emplace_back(rows, cuda::Graph(stream_, [this] { enqueue(); }));
    }
  }

  const ModelConfig config_;
  const GpuRunnerOptions options_;
  const int64_t max_model_len_;
  ThreadPool pool_;
  Stream host_stream_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<cuda::DeepSeekModel> model_;
  cuda::DeviceArray<std::byte> cache_memory_;
  cuda::CacheMemory cache_;
  std::optional<GpuPageTransfer> page_transfer_;
  std::optional<cuda::StepPlanner> planner_;
  cuda::StepLayout layout_;
  cuda::DeviceArray<std::byte> arrays_;  // the step's, see StepLayout
  cuda::PinnedArray<std::byte> staged_;
  cuda::PinnedArray<float> logits_;
  std::vector<std::pair<int64_t, cuda::Graph>> graphs_;  // by rows, ascending
};

}  // namespace

int num_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
  int usable = 0;
  for (int device = 0; device < count; ++device) {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "asking for the compute capability");
    if (major != 9) break;  // --device counts from 0
    ++usable;
  }
  return usable;
}

Result<GpuMemory> gpu_memory(const ModelConfig& config, const GpuRunnerOptions& options) {
  return guarded([&]() -> Result<GpuMemory> {
    check(cudaSetDevice(options.device), "choosing the device");
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
    return GpuMemory{.free = static_cast<int64_t>(free),
                     .total = static_cast<int64_t>(total),
                     .weights = cuda::weight_bytes(config),
                     .working_space = cuda::DeepSeekModel::workspace_bytes(
                         config, model_options(config, options))};
  });
}

Result<std::unique_ptr<Runner>> create_gpu_runner(const Checkpoint& checkpoint,
                                                  const GpuRunnerOptions& options) {
  return guarded([&]() -> Result<std::unique_ptr<Runner>> {
    auto runner = std::make_unique<GpuRunner>(checkpoint.config(), options);
    FATHOM_RETURN_IF_ERROR(runner->prepare(checkpoint));
    return runner;
  });
}

}  // namespace fathom
