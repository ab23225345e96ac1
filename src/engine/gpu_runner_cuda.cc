#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cpu/thread_pool.h"
#include "device/cuda/event.h"
#include "device/cuda/graph.h"
#include "device/cuda/pinned_array.h"
#include "engine/gpu_runner.h"
#include "engine/sampling_params.h"
#include "model/deepseek_cuda.h"
#include "model/token_work.h"
#include "ops/sampling/sample_batch.h"
#include "ops/sampling/sample_cuda.h"

namespace fathom {
namespace {

using cuda::check;

static_assert(kMaxTopLogprobs <= kDeviceTopLogprobs);

// A step of more rows takes so long that its launches are never waited for.
constexpr int64_t kMostGraphRows = 512;

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

// Keys of multi-head attention take 1 GiB, whatever the context: longer ones are expanded in
// several passes, each of which costs a step of 8,192 tokens 1 to 2 % of their time.
int64_t most_keys(const ModelConfig& config, const GpuRunnerOptions& options) {
  constexpr int64_t kBytes = int64_t{1} << 30, kTile = cuda::MhaPrefillTile::kKeys;
  const int64_t key_bytes =
      config.num_heads * (config.qk_nope_dim + config.v_dim) * static_cast<int64_t>(sizeof(bf16));
  const int64_t most = options.expanded_keys > 0 ? options.expanded_keys : kBytes / key_bytes;
  const int64_t wanted = std::max(model_len(config, options), options.max_batched_tokens);
  return std::max(kTile, std::min(most / kTile * kTile, round_up(wanted, kTile)));
}

cuda::ModelOptions model_options(const ModelConfig& config, const GpuRunnerOptions& options) {
  return {.max_rows = options.max_batched_tokens,
          .max_logit_rows = options.max_num_seqs + options.max_prompt_logit_rows,
          .most_keys = most_keys(config, options),
          .batch_invariant = options.deterministic,
          .stored_fp8 = options.stored_fp8};
}

int64_t page_bytes(const ModelConfig& config, CacheFormat format) {
  return LatentLayout{format, config.kv_lora_rank, config.qk_rope_dim}.page_bytes();
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

// Nobody waits for a copy's error. It is remembered, and the next step's: that forgets the pages.
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
  void finish() override { note(cudaStreamSynchronize(stream_)); }

  Result<> take_failure() {
    const cudaError_t failure = std::exchange(failure_, cudaSuccess);
    if (failure == cudaSuccess) return {};
    return error(Code::kInternal, "copying pages: {}", cudaGetErrorString(failure));
  }

 private:
  void note(cudaError_t status) {
    if (failure_ == cudaSuccess) failure_ = status;
  }
  void copy(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
            cudaMemcpyKind kind) {
    note(cudaMemcpy2DAsync(to, static_cast<size_t>(to_stride), from,
                           static_cast<size_t>(from_stride), static_cast<size_t>(page_bytes_),
                           static_cast<size_t>(layers_), kind, stream_));
  }

  const cuda::CacheMemory cache_;
  const int64_t page_bytes_, layers_;
  const cudaStream_t stream_;
  cudaError_t failure_ = cudaSuccess;
};

// A step between begin() and finish(): what the device copies from and to meanwhile.
struct StepInFlight {
  cuda::PinnedArray<std::byte> arrays;
  cuda::PinnedArray<int32_t> ids, top_ids;  // see cuda::SampleArguments
  cuda::PinnedArray<float> logprobs, top_logprobs;
  cuda::PinnedArray<SeenToken> seen;  // grows with what penalties look at
  std::vector<SampleRow> rows;
  std::vector<SampledToken> tokens;  // only grows, for its vectors' memory
  cuda::Event done;
};

class GpuRunner : public Runner {
 public:
  GpuRunner(const ModelConfig& config, const GpuRunnerOptions& options)
      : config_(config),
        options_(options),
        max_model_len_(model_len(config, options)),
        max_logit_rows_(model_options(config, options).max_logit_rows),
        pool_(options.num_threads),
        host_stream_(pool_),
        samples_(config.vocab_size) {}
  ~GpuRunner() override {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    graphs_.clear();
    graph_of_many_keys_.reset();
    cudaStreamDestroy(stream_);
  }

  // Loads the model, takes the cache's memory, captures the graphs.
  Result<> prepare(const Checkpoint& checkpoint) {
    check(cudaSetDevice(options_.device), "choosing the device");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    const cuda::ModelOptions model = model_options(config_, options_);
    FATHOM_TRY(model_, cuda::DeepSeekModel::load(checkpoint, model, options_.load));
    const int64_t pages = ceil_div(options_.max_total_tokens, kPageSize);
    const int64_t bytes = page_bytes(config_, options_.cache_format), layer_bytes = pages * bytes;
    cache_memory_ = cuda::DeviceArray<std::byte>(layer_bytes * config_.num_layers);
    cache_ = {options_.cache_format, cache_memory_.data(), pages, layer_bytes};
    page_transfer_.emplace(cache_, bytes, config_.num_layers, stream_);
    AttentionPolicy policy = gpu_attention_policy();
    policy.form = options_.attention;
    planner_.emplace(cuda::StepLimits{
        .heads = config_.num_heads,
        .num_multiprocessors = model_->num_multiprocessors(),
        .shape = {config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim, config_.v_dim},
        .policy = policy,
        .most_keys = model.most_keys,
        .batch_invariant = options_.deterministic});
    allocate_steps();
    if (options_.graphs) capture();
    return {};
  }

  int64_t vocab_size() const override { return config_.vocab_size; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t num_pages() const override { return cache_.num_pages; }
  bool answers_equal_prompts() const override {
    return !options_.deterministic || options_.attention == AttentionForm::kAbsorbed;
  }
  int64_t keys_worth_a_row() const override {
    const bool is_absorbed = options_.attention == AttentionForm::kAbsorbed;  // of prompts
    return fathom::keys_worth_a_row(
        config_, is_absorbed ? absorbed_key_macs(config_) : mha_key_macs(config_));
  }
  int max_steps_in_flight() const override { return kStepsInFlight; }
  PageTransfer* page_transfer() override { return &*page_transfer_; }
  const Stream* host_stream() const override { return &host_stream_; }

  Result<> begin(const ForwardBatch& batch, std::span<const SampleRow> rows) override {
    return guarded([&]() -> Result<> {
      check(cudaSetDevice(options_.device), "choosing the device");
      FATHOM_RETURN_IF_ERROR(page_transfer_->take_failure());
      StepInFlight& step = steps_[static_cast<size_t>(begun_ % kStepsInFlight)];
      const cuda::Graph* const graph = plan(batch);
      plan_sampling(rows, step);
      copy_arrays(step);
      copy_seen(step);
      if (graph != nullptr) {
        graph->launch(stream_);
      } else {
        enqueue_model();
      }
      enqueue_sampling(step);
      step.done.record(stream_);
      ++begun_;
      return {};
    });
  }

  Result<std::span<const SampledToken>> finish() override {
    return guarded([&]() -> Result<std::span<const SampledToken>> {
      StepInFlight& step = steps_[static_cast<size_t>(finished_++ % kStepsInFlight)];
      step.done.wait();
      if (step.tokens.size() < step.rows.size()) step.tokens.resize(step.rows.size());
      for (size_t i = 0; i < step.rows.size(); ++i) take_token(step, i);
      return std::span<const SampledToken>(step.tokens).first(step.rows.size());
    });
  }

 private:
  static constexpr int kStepsInFlight = 2;

  void allocate_steps() {
    const int64_t rows = max_logit_rows_;
    const int64_t bytes = planner_->most_bytes(options_.max_batched_tokens, options_.max_num_seqs,
                                               ceil_div(max_model_len_, kPageSize)) +
                          sampling_bytes();
    arrays_ = cuda::DeviceArray<std::byte>(bytes);
    ids_ = cuda::DeviceArray<int32_t>(rows);
    logprobs_ = cuda::DeviceArray<float>(rows);
    top_ids_ = cuda::DeviceArray<int32_t>(rows * kDeviceTopLogprobs);
    top_logprobs_ = cuda::DeviceArray<float>(rows * kDeviceTopLogprobs);
    for (StepInFlight& step : steps_) {
      step.arrays = cuda::PinnedArray<std::byte>(bytes);
      step.ids = cuda::PinnedArray<int32_t>(rows);
      step.logprobs = cuda::PinnedArray<float>(rows);
      step.top_ids = cuda::PinnedArray<int32_t>(rows * kDeviceTopLogprobs);
      step.top_logprobs = cuda::PinnedArray<float>(rows * kDeviceTopLogprobs);
    }
  }

  // The graph that runs the batch, or null; its layout is made in either case.
  const cuda::Graph* plan(const ForwardBatch& batch) {
    int64_t rows = batch.num_rows();
    const cuda::Graph* graph = nullptr;
    if (planner_->is_decode(batch)) {
      const auto found = std::lower_bound(
          graphs_.begin(), graphs_.end(), rows,
          [](const auto& captured, int64_t wanted) { return captured.first < wanted; });
      if (found != graphs_.end()) {
        rows = found->first;
        graph = &found->second;
      }
    }
    planner_->plan(batch, rows, layout_);
    if (graph != nullptr && rows == 1 && layout_.most_keys > cuda::kMostDecodeLayersTokens &&
        graph_of_many_keys_) {
      graph = &*graph_of_many_keys_;
    }
    return layout_.decodes.size() == 1 ? graph : nullptr;
  }

  // The rows' arrays behind the model's.
  void plan_sampling(std::span<const SampleRow> rows, StepInFlight& step) {
    step.rows.assign(rows.begin(), rows.end());
    samples_.clear();
    for (const SampleRow& row : rows) samples_.add(row);
    sample_rows_at_ = append(layout_, samples_.rows());
    bias_ids_at_ = append(layout_, samples_.bias_ids());
    bias_values_at_ = append(layout_, samples_.bias_values());
    masked_at_ = append(layout_, samples_.masked_ids());
    allowed_at_ = append(layout_, samples_.allowed());
  }

  int64_t sampling_bytes() const {
    // Masked ids are stop ids, the request's own and the model's.
    constexpr int64_t kIds = kMaxLogitBiasIds * 2 + kMaxStopTokenIds + 64;
    return max_logit_rows_ *
           (static_cast<int64_t>(sizeof(DeviceSampleRow)) + (samples_.mask_words() + kIds) * 4);
  }

  void copy_arrays(StepInFlight& step) {
    const auto bytes = std::ssize(layout_.memory);
    FATHOM_CHECK(bytes <= arrays_.size(), "a step's arrays take {} bytes of {}", bytes,
                 arrays_.size());
    std::memcpy(step.arrays.data(), layout_.memory.data(), layout_.memory.size());
    check(cudaMemcpyAsync(arrays_.data(), step.arrays.data(), layout_.memory.size(),
                          cudaMemcpyHostToDevice, stream_),
          "copying a step's arrays");
  }

  // Few sequences have penalties, and there is no saying how long their texts are: room for what
  // the steps so far have wanted.
  void copy_seen(StepInFlight& step) {
    const auto seen = samples_.seen();
    if (seen.empty()) return;
    const auto room = static_cast<int64_t>(std::bit_ceil(seen.size()));
    if (step.seen.size() < room) step.seen = cuda::PinnedArray<SeenToken>(room);
    if (seen_.size() < room) seen_ = cuda::DeviceArray<SeenToken>(room);
    std::memcpy(step.seen.data(), seen.data(), seen.size_bytes());
    check(cudaMemcpyAsync(seen_.data(), step.seen.data(), seen.size_bytes(), cudaMemcpyHostToDevice,
                          stream_),
          "copying seen tokens");
  }

  void enqueue_model() { model_->forward(layout_, arrays_.data(), ids_.data(), cache_, stream_); }

  void enqueue_sampling(StepInFlight& step) {
    const auto rows = std::ssize(step.rows);
    if (rows == 0) return;
    const std::byte* const arrays = arrays_.data();
    cuda::sample({.logits = model_->logits(),
                  .logits_stride = config_.vocab_size,
                  .vocab = config_.vocab_size,
                  .rows = reinterpret_cast<const DeviceSampleRow*>(arrays + sample_rows_at_),
                  .num_rows = rows,
                  .bias_ids = reinterpret_cast<const int32_t*>(arrays + bias_ids_at_),
                  .bias_values = reinterpret_cast<const float*>(arrays + bias_values_at_),
                  .seen = seen_.data(),
                  .masked_ids = reinterpret_cast<const int32_t*>(arrays + masked_at_),
                  .allowed = reinterpret_cast<const uint32_t*>(arrays + allowed_at_),
                  .ids = ids_.data(),
                  .logprobs = logprobs_.data(),
                  .top_ids = top_ids_.data(),
                  .top_logprobs = top_logprobs_.data()},
                 stream_);
    copy_back(ids_, rows, step.ids);
    const auto wants_logprobs = [](const SampleRow& row) { return row.num_logprobs >= 0; };
    if (std::any_of(step.rows.begin(), step.rows.end(), wants_logprobs)) {
      copy_back(logprobs_, rows, step.logprobs);
      copy_back(top_ids_, rows * kDeviceTopLogprobs, step.top_ids);
      copy_back(top_logprobs_, rows * kDeviceTopLogprobs, step.top_logprobs);
    }
  }

  template <typename T>
  void copy_back(const cuda::DeviceArray<T>& from, int64_t count, cuda::PinnedArray<T>& to) {
    check(cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(count) * sizeof(T),
                          cudaMemcpyDeviceToHost, stream_),
          "copying tokens");
  }

  static void take_token(StepInFlight& step, size_t i) {
    const auto row = static_cast<int64_t>(i);
    SampledToken& token = step.tokens[i];
    token.id = step.ids[row];
    token.logprob = 0;
    token.top.clear();
    const int num_logprobs = step.rows[i].num_logprobs;
    if (num_logprobs < 0) return;
    token.logprob = step.logprobs[row];
    for (int64_t k = row * kDeviceTopLogprobs; k < row * kDeviceTopLogprobs + num_logprobs; ++k) {
      if (step.top_ids[k] < 0) break;
      token.top.emplace_back(step.top_ids[k], step.top_logprobs[k]);
    }
  }

  // Decode steps of made-up sequences: what they are is in device memory when a graph is launched.
  void capture() {
    for (const int64_t rows : graph_sizes(std::min(options_.max_num_seqs, kMostGraphRows))) {
      ForwardBatch batch;
      batch.max_pages = 1;
      batch.query_start = {0};
      for (int32_t row = 0; row < rows; ++row) {
        batch.token_ids.push_back(0);
        batch.positions.push_back(0);
        batch.query_start.push_back(row + 1);
        batch.context_lens.push_back(0);
        batch.prompt_lens.push_back(0);
        batch.block_tables.push_back(0);
        batch.logit_rows.push_back(row);
      }
      planner_->plan(batch, rows, layout_);
      graphs_.emplace_back(rows, cuda::Graph(stream_, [this] { enqueue_model(); }));
      if (rows > 1 || !model_->one_row_depends_on_keys()) continue;
      layout_.most_keys = cuda::kMostDecodeLayersTokens + 1;
      graph_of_many_keys_.emplace(stream_, [this] { enqueue_model(); });
    }
  }

  const ModelConfig config_;
  const GpuRunnerOptions options_;
  const int64_t max_model_len_, max_logit_rows_;
  ThreadPool pool_;
  Stream host_stream_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<cuda::DeepSeekModel> model_;
  cuda::DeviceArray<std::byte> cache_memory_;
  cuda::CacheMemory cache_;
  std::optional<GpuPageTransfer> page_transfer_;
  std::vector<std::pair<int64_t, cuda::Graph>> graphs_;  // by rows, ascending
  // Of one row, where that is another one.
  std::optional<cuda::Graph> graph_of_many_keys_;

  // Of the step that is being begun.
  std::optional<cuda::StepPlanner> planner_;
  cuda::StepLayout layout_;
  SampleBatch samples_;
  int64_t sample_rows_at_ = 0, bias_ids_at_ = 0, bias_values_at_ = 0, masked_at_ = 0,
          allowed_at_ = 0;

  cuda::DeviceArray<std::byte> arrays_;  // the step's, see StepLayout
  cuda::DeviceArray<SeenToken> seen_;    // what its penalties look at
  // The newest step's tokens: where the next one's rows find theirs.
  cuda::DeviceArray<int32_t> ids_, top_ids_;
  cuda::DeviceArray<float> logprobs_, top_logprobs_;
  StepInFlight steps_[kStepsInFlight];
  int64_t begun_ = 0, finished_ = 0;
};

int usable_gpus() {
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

}  // namespace

int num_gpus() {
  static const int count = usable_gpus();
  return count;
}

Result<GpuMemory> gpu_memory(const Checkpoint& checkpoint, const GpuRunnerOptions& options) {
  return guarded([&]() -> Result<GpuMemory> {
    check(cudaSetDevice(options.device), "choosing the device");
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
    const cuda::ModelOptions model = model_options(checkpoint.config(), options);
    return GpuMemory{
        .free = static_cast<int64_t>(free),
        .total = static_cast<int64_t>(total),
        .weights = cuda::DeepSeekModel::weight_bytes(checkpoint, model, options.load),
        .working_space = cuda::DeepSeekModel::workspace_bytes(checkpoint.config(), model)};
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
