#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cpu/thread_pool.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/device_context.h"
#include "device/cuda/device_turn.h"
#include "device/cuda/event.h"
#include "device/cuda/graph.h"
#include "device/cuda/pinned_array.h"
#include "engine/gpu_page_transfer_cuda.h"
#include "engine/gpu_runner.h"
#include "engine/sampling_params.h"
#include "engine/step_watchdog.h"
#include "model/deepseek_cuda.h"
#include "model/token_work.h"
#include "ops/sampling/sample_batch.h"
#include "ops/sampling/sample_cuda.h"

namespace fathom {
namespace {

using cuda::check;

static_assert(kMaxTopLogprobs <= kDeviceTopLogprobs);

// Larger steps are long enough to hide their launches.
constexpr int64_t kMostGraphRows = 512;

// Padded row counts of the captured decode steps.
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

// The number of keys that multi-head attention expands at a time: 1 GiB of them, whatever the
// context. Longer contexts are expanded in several passes, each of which costs a step of 8,192
// tokens 1 to 2 % of the keys' time.
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
          .stored_fp8 = options.stored_fp8,
          .cache_format = options.cache_format};
}

int64_t page_bytes(const ModelConfig& config, CacheFormat format) {
  return LatentLayout{format, config.kv_lora_rank, config.qk_rope_dim}.page_bytes();
}

// Out of memory is not a failure of the device.
tl::unexpected<Status> error_of(const cuda::DeviceError& failure) {
  const bool is_full = failure.code() == cudaErrorMemoryAllocation;
  return error(is_full ? Code::kUnavailable : Code::kInternal, "{}", failure.what());
}

// Calls body() and converts a DeviceError to a Status.
template <typename Body>
auto guarded(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const cuda::DeviceError& failure) {
    return error_of(failure);
  }
}

// Host buffers of a step between begin() and finish(), which the device reads and writes meanwhile.
struct StepInFlight {
  cuda::PinnedArray<std::byte> arrays;
  cuda::PinnedArray<int32_t> ids, top_ids;  // see cuda::SampleArguments
  cuda::PinnedArray<float> logprobs, top_logprobs;
  cuda::PinnedArray<SeenToken> seen;  // for the first group of rows, see SampleBatch::Group
  std::vector<SampleRow> rows;
  std::vector<SampledToken> tokens;  // never shrinks, to keep its vectors' memory
  cuda::Event done;
  std::string what;  // the watchdog's message
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

  // Loads the model, allocates the cache, captures the graphs.
  Result<> prepare(const Checkpoint& checkpoint) {
    check(cudaSetDevice(options_.device), "choosing the device");
    const StepWatchdog::Watch watch(
        watchdog_, "loading the model and capturing its graphs",
        options_.step_timeout.count() > 0 ? kLoadingTimeout : std::chrono::nanoseconds(0));
    device_ = &cuda::DeviceContext::of(options_.device);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    turn_.emplace(device_->turns());
    const cuda::ModelOptions model = model_options(config_, options_);
    FATHOM_TRY(model_, cuda::DeepSeekModel::load(checkpoint, model, options_.load));
    const int64_t pages = ceil_div(options_.max_total_tokens, kPageSize);
    const int64_t bytes = page_bytes(config_, options_.cache_format), layers = config_.num_layers;
    cache_memory_ = cuda::DeviceArray<std::byte>(pages * layers * bytes);
    const auto rows = checked_mul(pages * kPageSize, layers);
    if (!rows || *rows > std::numeric_limits<int32_t>::max()) {
      return error(Code::kResourceExhausted,
                   "a cache of {} tokens in {} layers has more than 2^31 - 1 rows: lower "
                   "--max-total-tokens",
                   options_.max_total_tokens, layers);
    }
    cache_ = {options_.cache_format, cache_memory_.data(), pages, bytes, layers};
    page_transfer_.emplace(cache_memory_.data(), layers * bytes, stream_);
    AttentionPolicy policy = gpu_attention_policy();
    policy.form = options_.attention;
    planner_.emplace(cuda::StepLimits{
        .heads = config_.num_heads,
        .num_multiprocessors = model_->num_multiprocessors(),
        .shape = {config_.kv_lora_rank, config_.qk_rope_dim, config_.qk_nope_dim, config_.v_dim},
        .policy = policy,
        .most_keys = model.most_keys,
        .batch_invariant = options_.deterministic,
        .page_stride = layers});
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
    const bool is_absorbed = options_.attention == AttentionForm::kAbsorbed;  // the form of prompts
    return fathom::keys_worth_a_row(
        config_, is_absorbed ? absorbed_key_macs(config_) : mha_key_macs(config_));
  }
  int max_steps_in_flight() const override { return kStepsInFlight; }
  PageTransfer* page_transfer(int /*lane*/) override { return &*page_transfer_; }
  bool is_lost() override { return is_lost_; }
  const Stream* host_stream() const override { return &host_stream_; }

  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override {
    return watched([&]() -> Result<> {
      device_->make_current();
      page_transfer_->note_step();
      StepInFlight& step = steps_[static_cast<size_t>(begun_ % kStepsInFlight)];
      const CapturedGraph* const graph = plan(lanes.front());
      plan_sampling(rows, step);
      step.what = fmt::format("step {} ({} rows)", begun_, layout_.rows);
      // Driver calls may block on the device, too.
      const StepWatchdog::Watch watch(watchdog_, step.what, options_.step_timeout);
      turn_->take(stream_, [&] {
        enqueue(graph, step);
        return step.done.get();
      });
      ++begun_;
      return {};
    });
  }

  Result<std::span<const SampledToken>> finish() override {
    return watched([&]() -> Result<std::span<const SampledToken>> {
      StepInFlight& step = steps_[static_cast<size_t>(finished_++ % kStepsInFlight)];
      {
        const StepWatchdog::Watch watch(watchdog_, step.what, options_.step_timeout);
        step.done.wait();
      }
      if (step.tokens.size() < step.rows.size()) step.tokens.resize(step.rows.size());
      for (size_t i = 0; i < step.rows.size(); ++i) take_token(step, i);
      return std::span<const SampledToken>(step.tokens).first(step.rows.size());
    });
  }

 private:
  static constexpr int kStepsInFlight = 2;
  static constexpr std::chrono::nanoseconds kLoadingTimeout = std::chrono::hours(1);

  struct CapturedGraph {
    int64_t rows = 0;
    cuda::Graph graph;
    std::string kernels;  // names of the kernels whose CTAs wait for one another
  };

  // Calls body() under guarded(). After an error it synchronizes: the work launched so far has
  // ended before the next step fills its arrays, and is_lost() is known.
  template <typename Body>
  auto watched(const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (const cuda::DeviceError& failure) {
      const cudaError_t state = cudaStreamSynchronize(stream_);
      cudaGetLastError();
      is_lost_ |= cuda::is_sticky(failure.code()) || cuda::is_sticky(state);
      return error_of(failure);
    }
  }

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
    // Few sequences have penalties, so the buffer is sized for few; more are sampled in groups.
    const int64_t of_one = std::min(max_model_len_, config_.vocab_size);
    seen_room_ = std::max(of_one, std::min(options_.penalty_room, of_one * rows));
    seen_ = cuda::DeviceArray<SeenToken>(seen_room_);
    for (StepInFlight& step : steps_) {
      step.seen = cuda::PinnedArray<SeenToken>(seen_room_);
      step.arrays = cuda::PinnedArray<std::byte>(bytes);
      step.ids = cuda::PinnedArray<int32_t>(rows);
      step.logprobs = cuda::PinnedArray<float>(rows);
      step.top_ids = cuda::PinnedArray<int32_t>(rows * kDeviceTopLogprobs);
      step.top_logprobs = cuda::PinnedArray<float>(rows * kDeviceTopLogprobs);
    }
  }

  // Plans the batch's layout. Returns the captured graph that runs it, or null.
  const CapturedGraph* plan(const ForwardBatch& batch) {
    int64_t rows = batch.num_rows();
    const CapturedGraph* graph = nullptr;
    if (planner_->is_decode(batch)) {
      const auto found = std::lower_bound(
          graphs_.begin(), graphs_.end(), rows,
          [](const CapturedGraph& captured, int64_t wanted) { return captured.rows < wanted; });
      if (found != graphs_.end()) {
        rows = found->rows;
        graph = &*found;
      }
    }
    planner_->plan(batch, rows, layout_);
    if (graph != nullptr && rows == 1 && layout_.most_keys > cuda::kMostDecodeLayersTokens &&
        graph_of_many_keys_) {
      graph = &*graph_of_many_keys_;
    }
    return layout_.decodes.size() == 1 ? graph : nullptr;
  }

  // Places the sampling arrays after the model's.
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
    // Masked ids are stop ids: the request's own and the model's.
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

  void enqueue(const CapturedGraph* graph, StepInFlight& step) {
    copy_arrays(step);
    const SampleBatch::Group first = samples_.group_from(0, seen_room_);
    const SeenToken* const seen = samples_.seen().data();
    std::copy_n(seen + first.first_seen, first.num_seen, step.seen.data());
    copy_seen(step.seen.data(), first.num_seen);
    std::string kernels;
    if (graph != nullptr) {
      graph->graph.launch(stream_);
      kernels = graph->kernels;
    } else {
      const cuda::CoResidentLog log;
      enqueue_model();
      kernels = log.text();
    }
    step.what += "; its kernels whose CTAs wait for one another: " + kernels;
    enqueue_sampling(first);
    const auto rows = std::ssize(step.rows);
    for (int64_t row = first.num_rows; row < rows;) {
      const SampleBatch::Group group = samples_.group_from(row, seen_room_);
      copy_seen(seen + group.first_seen, group.num_seen);
      enqueue_sampling(group);
      row += group.num_rows;
    }
    copy_samples_back(step);
    step.done.record(stream_);
  }

  // `from` is pinned memory, or pageable memory, which the driver has copied when this returns.
  void copy_seen(const SeenToken* from, int64_t count) {
    if (count == 0) return;
    check(cudaMemcpyAsync(seen_.data(), from, static_cast<size_t>(count) * sizeof(SeenToken),
                          cudaMemcpyHostToDevice, stream_),
          "copying seen tokens");
  }

  cuda::GpuStream stream() const { return {*device_, stream_}; }

  void enqueue_model() { model_->forward(layout_, arrays_.data(), ids_.data(), cache_, stream()); }

  // Samples the rows of a group, whose seen tokens are on the device.
  void enqueue_sampling(const SampleBatch::Group& group) {
    if (group.num_rows == 0) return;
    const std::byte* const arrays = arrays_.data();
    const int64_t first = group.first_row;
    cuda::sample(
        {.logits = model_->logits(),
         .logits_stride = model_->logits_stride(),
         .vocab = config_.vocab_size,
         .rows = reinterpret_cast<const DeviceSampleRow*>(arrays + sample_rows_at_) + first,
         .num_rows = group.num_rows,
         .bias_ids = reinterpret_cast<const int32_t*>(arrays + bias_ids_at_),
         .bias_values = reinterpret_cast<const float*>(arrays + bias_values_at_),
         .seen = seen_.data() - group.first_seen,  // indexed by positions in the whole batch
         .masked_ids = reinterpret_cast<const int32_t*>(arrays + masked_at_),
         .allowed = reinterpret_cast<const uint32_t*>(arrays + allowed_at_),
         .ids = ids_.data() + first,
         .logprobs = logprobs_.data() + first,
         .top_ids = top_ids_.data() + first * kDeviceTopLogprobs,
         .top_logprobs = top_logprobs_.data() + first * kDeviceTopLogprobs},
        stream());
  }

  void copy_samples_back(StepInFlight& step) {
    const auto rows = std::ssize(step.rows);
    if (rows == 0) return;
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

  // Captures decode steps of placeholder sequences. A graph reads the actual ones from device
  // memory.
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
      graphs_.push_back(capture_model(rows));
      if (rows > 1 || !model_->one_row_depends_on_keys()) continue;
      layout_.most_keys = cuda::kMostDecodeLayersTokens + 1;
      graph_of_many_keys_ = capture_model(rows);
    }
  }

  CapturedGraph capture_model(int64_t rows) {
    const cuda::CoResidentLog log;
    cuda::Graph graph(stream_, [this] { enqueue_model(); });
    return {rows, std::move(graph), log.text()};
  }

  const ModelConfig config_;
  const GpuRunnerOptions options_;
  const int64_t max_model_len_, max_logit_rows_;
  ThreadPool pool_;
  Stream host_stream_;
  cuda::DeviceContext* device_ = nullptr;  // set by prepare()
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<cuda::DeepSeekModel> model_;
  cuda::DeviceArray<std::byte> cache_memory_;
  cuda::CacheMemory cache_;
  std::optional<GpuPageTransfer> page_transfer_;
  std::vector<CapturedGraph> graphs_;  // by rows, ascending
  // The one-row graph for longer contexts, where it differs from the first.
  std::optional<CapturedGraph> graph_of_many_keys_;

  // Plans the step that is about to begin.
  std::optional<cuda::StepPlanner> planner_;
  cuda::StepLayout layout_;
  SampleBatch samples_;
  int64_t sample_rows_at_ = 0, bias_ids_at_ = 0, bias_values_at_ = 0, masked_at_ = 0,
          allowed_at_ = 0;

  cuda::DeviceArray<std::byte> arrays_;  // of the step, see StepLayout
  cuda::DeviceArray<SeenToken> seen_;    // tokens that the penalties of a group of rows count
  int64_t seen_room_ = 0;
  // The newest step's tokens, where the rows of the next step find theirs.
  cuda::DeviceArray<int32_t> ids_, top_ids_;
  cuda::DeviceArray<float> logprobs_, top_logprobs_;
  StepInFlight steps_[kStepsInFlight];
  std::optional<cuda::DeviceTurn> turn_;
  StepWatchdog watchdog_;
  int64_t begun_ = 0, finished_ = 0;
  bool is_lost_ = false;
};

}  // namespace

Result<GpuMemory> gpu_memory(const Checkpoint& checkpoint, const GpuRunnerOptions& options) {
  return guarded([&]() -> Result<GpuMemory> {
    check(cudaSetDevice(options.device), "choosing the device");
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
    FATHOM_TRY(const cuda::ModelMemory model,
               cuda::DeepSeekModel::memory(checkpoint, model_options(checkpoint.config(), options),
                                           options.load));
    return GpuMemory{.free = static_cast<int64_t>(free),
                     .total = static_cast<int64_t>(total),
                     .weights = model.weights,
                     .working_space = model.workspace};
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
