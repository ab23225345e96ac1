#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"
#include "device/cpu/thread_pool.h"
#include "device/cuda/device_turn.h"
#include "engine/draft_steps.h"
#include "engine/gpu_lane_cuda.h"
#include "engine/gpu_runner.h"
#include "engine/rank_workers.h"
#include "engine/step_watchdog.h"
#include "model/gpu_support.h"
#include "model/token_work.h"

namespace fathom {
namespace {

using cuda::check;

// Out of memory is not a failure of the device.
Status status_of(const cuda::DeviceError& failure) {
  const bool is_full = failure.code() == cudaErrorMemoryAllocation;
  return {is_full ? Code::kUnavailable : Code::kInternal, failure.what()};
}

// Calls body() and converts a DeviceError to a Status.
template <typename Body>
auto guarded(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const cuda::DeviceError& failure) {
    return tl::unexpected(status_of(failure));
  }
}

// How many of the ranks are on a device.
int ranks_on(const GpuRunnerOptions& options, int device) {
  return static_cast<int>(std::count(options.devices.begin(), options.devices.end(), device));
}

cuda::RankPlace place_of(const GpuRunnerOptions& options, int rank) {
  const int device = options.devices[static_cast<size_t>(rank)];
  return {options.placement, rank, device, ranks_on(options, device)};
}

Result<> check_devices(const GpuRunnerOptions& options) {
  if (std::ssize(options.devices) == options.placement.world()) return {};
  return invalid("--device names {} GPUs for {} ranks (--tp {} x --dp {})", options.devices.size(),
                 options.placement.world(), options.placement.tp, options.placement.dp);
}

// The ranks of all lanes, numbered lane by lane. The first one's thread is the engine's.
class GpuRunner : public Runner {
 public:
  GpuRunner(const ModelConfig& config, const GpuRunnerOptions& options)
      : config_(config),
        options_(options),
        max_model_len_(gpu_model_len(config, options)),
        pool_(options.num_threads),
        host_stream_(pool_),
        workers_(options.placement.world()) {}
  ~GpuRunner() override {
    for (auto& lane : lanes_) lane->synchronize();
  }

  // Loads the model, allocates the caches, captures the graphs.
  Result<> prepare(const Checkpoint& checkpoint) {
    const StepWatchdog::Watch watch(
        watchdog_, "loading the model and capturing its graphs",
        options_.step_timeout.count() > 0 ? kLoadingTimeout : std::chrono::nanoseconds(0));
    const int tp = options_.placement.tp;
    std::vector<cuda::RankPlace> places;
    for (int lane = 0; lane < num_lanes(); ++lane) {
      const auto devices = std::span(options_.devices).subspan(static_cast<size_t>(lane * tp));
      lanes_.push_back(
          std::make_unique<GpuLane>(config_, options_, devices.first(static_cast<size_t>(tp))));
      for (int rank = 0; rank < tp; ++rank) {
        places.push_back(place_of(options_, options_.placement.rank_of(lane, rank)));
        devices_[places.back().device].streams.push_back(lanes_.back()->rank(rank).stream());
      }
    }
    for (auto& [number, device] : devices_) {
      device.turn.emplace(cuda::DeviceContext::of(number).turns());
    }
    FATHOM_TRY(auto models,
               cuda::DeepSeekModel::load_ranks(checkpoint, gpu_model_options(config_, options_),
                                               options_.load, places));
    if (exchanges()) {
      world_.emplace(options_.devices, 1, 1, peer_limit(options_));  // its inboxes are not used
      std::vector<cuda::DeepSeekModel*> world;
      for (const auto& model : models) world.push_back(model.get());
      FATHOM_RETURN_IF_ERROR(cuda::DeepSeekModel::join_world(world, *world_));
    }
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      const auto size = static_cast<size_t>(tp);
      FATHOM_RETURN_IF_ERROR(lanes_[lane]->prepare(std::span(models).subspan(lane * size, size),
                                                   world_ ? &*world_ : nullptr, options_.graphs));
    }
    lanes_.front()->rank(0).use_device();
    return {};
  }

  int64_t vocab_size() const override { return config_.vocab_size; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t num_pages() const override { return lanes_.front()->rank(0).num_pages(); }
  int num_lanes() const override { return options_.placement.dp; }
  bool answers_equal_prompts() const override {
    return !options_.deterministic || options_.attention == AttentionForm::kAbsorbed;
  }
  int64_t keys_worth_a_row() const override {
    const bool is_absorbed = options_.attention == AttentionForm::kAbsorbed;  // the form of prompts
    return fathom::keys_worth_a_row(
        config_, is_absorbed ? absorbed_key_macs(config_) : mha_key_macs(config_));
  }
  int max_steps_in_flight() const override { return kGpuStepsInFlight; }
  int64_t max_drafts() const override { return options_.max_drafts; }
  PageTransfer* page_transfer(int lane) override {
    return lanes_[static_cast<size_t>(lane)]->page_transfer();
  }
  bool can_copy_pages(int /*from_lane*/, int /*to_lane*/) const override { return true; }
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override;
  bool is_lost() override { return is_lost_; }
  Status loss() const override { return loss_; }
  const Stream* host_stream() const override { return &host_stream_; }

  Result<> begin(std::span<const ForwardBatch> batches, std::span<const SampleRow> rows) override {
    return begin(batches, rows, {});
  }

  Result<std::span<const int32_t>> draft(std::span<const ForwardBatch> batches,
                                         std::span<const SampleRow> rows) override {
    draft_steps_.start(batches, rows);
    Result<> drafted;
    int in_flight = 0;
    const auto finish_one = [&] {
      --in_flight;
      const auto tokens = finish();
      if (tokens) draft_steps_.add_tokens(*tokens);
      if (!tokens && drafted) drafted = tl::unexpected(tokens.error());
    };
    // A step begins before the tokens of the one before are known.
    while (drafted && draft_steps_.has_work()) {
      if (in_flight == kGpuStepsInFlight) finish_one();
      if (drafted) {
        drafted = begin(draft_steps_.lanes(), draft_steps_.rows(), draft_steps_.states());
      }
      if (!drafted) break;
      ++in_flight;
      draft_steps_.advance();
    }
    while (in_flight > 0) finish_one();
    if (!drafted) return tl::unexpected(drafted.error());
    return draft_steps_.drafts();
  }

  Result<std::span<const SampledToken>> finish() override {
    return watched([&]() -> Result<std::span<const SampledToken>> {
      const Step& step = steps_[static_cast<size_t>(finished_++ % kGpuStepsInFlight)];
      const StepWatchdog::Watch watch(watchdog_, step.what, options_.step_timeout);
      size_t count = 0;
      std::exception_ptr failure;
      for (const size_t lane : step.lanes) {  // all of them, also after one has failed
        try {
          count += lanes_[lane]->finish_step(tokens_, count);
        } catch (const std::exception&) {
          if (failure == nullptr) failure = std::current_exception();
        }
      }
      if (failure != nullptr) std::rethrow_exception(failure);
      return std::span<const SampledToken>(tokens_).first(count);
    });
  }

 private:
  // `states`: of a draft step, by lane (DraftSteps); empty: a step.
  Result<> begin(std::span<const ForwardBatch> batches, std::span<const SampleRow> rows,
                 std::span<const std::vector<int32_t>> states) {
    return watched([&]() -> Result<> {
      Step& step = steps_[static_cast<size_t>(begun_ % kGpuStepsInFlight)];
      step.lanes.clear();
      cuda::WorldRows all;
      for (const ForwardBatch& batch : batches) {
        all.rows += batch.num_rows();
        all.logit_rows += std::ssize(batch.logit_rows);
      }
      int64_t first_row = 0;
      for (size_t lane = 0; lane < batches.size(); ++lane) {
        const ForwardBatch& batch = batches[lane];
        if (batch.num_rows() == 0 && !exchanges()) continue;
        const auto count = std::ssize(batch.logit_rows);
        const auto of_lane =
            rows.subspan(static_cast<size_t>(first_row), static_cast<size_t>(count));
        if (states.empty()) {
          lanes_[lane]->begin_step(batch, of_lane, first_row, all);
        } else {
          lanes_[lane]->begin_draft(batch, states[lane], of_lane, first_row, all);
        }
        step.lanes.push_back(lane);
        first_row += count;
      }
      step.what =
          fmt::format("{} {} ({} rows)", states.empty() ? "step" : "draft step", begun_, all.rows);
      // Driver calls may block on the device, too.
      const StepWatchdog::Watch watch(watchdog_, step.what, options_.step_timeout);
      take_turns(devices_.begin(), step);
      step.what += "; its kernels whose CTAs wait for one another: " +
                   lanes_[step.lanes.front()]->waiting_kernels();
      for (const size_t lane : step.lanes) lanes_[lane]->count_step();
      ++begun_;
      return {};
    });
  }

  static constexpr std::chrono::nanoseconds kLoadingTimeout = std::chrono::hours(1);

  struct Step {
    std::vector<size_t> lanes;  // that have rows; with expert parallelism all
    std::string what;           // the watchdog's message
  };
  // A device, and the ranks that are on it.
  struct Device {
    std::optional<cuda::DeviceTurn> turn;
    std::vector<cudaStream_t> streams;
    std::vector<cudaEvent_t> ended;  // after the newest step
  };
  using Devices = std::map<int, Device>;

  bool exchanges() const { return options_.placement.exchanges_tokens(); }

  // Why ranks of different lanes have parted: the one that was waited for too long.
  std::string late_rank_of_world() const {
    const auto late = world_ ? world_->late() : std::nullopt;
    if (!late) return "";
    const auto name_of = [&](int rank) {
      return fmt::format("rank {} on cuda:{}", rank, options_.devices[static_cast<size_t>(rank)]);
    };
    return fmt::format(
        "{} waited {:.3g} s for {} in an exchange of experts' rows", name_of(late->waiting),
        std::chrono::duration<double>(peer_limit(options_)).count(), name_of(late->missing));
  }

  // Calls body() under guarded(). After an error it synchronizes: the work launched so far has
  // ended before the next step fills its arrays, and is_lost() is known.
  template <typename Body>
  auto watched(const Body& body) -> decltype(body()) {
    Status why;
    bool lost = false;
    try {
      return body();
    } catch (const cuda::DeviceError& failure) {
      why = status_of(failure);
      lost = cuda::is_sticky(failure.code());
    } catch (const std::exception& failure) {
      why = {Code::kInternal, failure.what()};
    }
    for (auto& lane : lanes_) {
      // A rank that others may wait for has not come.
      if (lane->size() > 1 || world_) lane->stop();
      lost |= cuda::is_sticky(lane->synchronize()) || lane->stopped();
      if (const std::string late = lane->late_rank(); !late.empty()) why.message = late;
    }
    if (const std::string late = late_rank_of_world(); !late.empty()) why.message = late;
    cudaGetLastError();
    if (lost && !is_lost_) loss_ = why;
    is_lost_ |= lost;
    return tl::unexpected(why);
  }

  // Enqueues the step with all devices' turns, which are taken in order.
  void take_turns(Devices::iterator next, const Step& step) {
    if (next == devices_.end()) return enqueue(step);
    Device& device = next->second;
    cuda::DeviceContext::of(next->first).make_current();
    device.turn->take(device.streams, [&]() -> std::span<const cudaEvent_t> {
      take_turns(std::next(next), step);
      device.ended.clear();
      for (auto& lane : lanes_) {
        for (int rank = 0; rank < lane->size(); ++rank) {
          if (lane->rank(rank).device().device() != next->first) continue;
          if (const cudaEvent_t ended = lane->ended(rank)) device.ended.push_back(ended);
        }
      }
      return device.ended;
    });
  }

  void enqueue(const Step& step) {
    const int tp = options_.placement.tp;
    const auto has_rows = [&](size_t lane) {
      return std::find(step.lanes.begin(), step.lanes.end(), lane) != step.lanes.end();
    };
    workers_.run(
        [&](int rank) {
          const auto lane = static_cast<size_t>(rank / tp);
          if (!has_rows(lane)) return;
          if (options_.at_rank) options_.at_rank(rank);
          lanes_[lane]->begin_rank(rank % tp);
        },
        [&](int rank) { lanes_[static_cast<size_t>(rank / tp)]->stop(); });
    for (const std::exception_ptr& failure : workers_.failures()) {
      if (failure != nullptr) std::rethrow_exception(failure);
    }
  }

  const ModelConfig config_;
  const GpuRunnerOptions options_;
  const int64_t max_model_len_;
  ThreadPool pool_;
  Stream host_stream_;
  Devices devices_;
  std::optional<cuda::PeerGroup> world_;  // all ranks, with expert parallelism
  std::vector<std::unique_ptr<GpuLane>> lanes_;
  RankWorkers workers_;
  Step steps_[kGpuStepsInFlight];
  DraftSteps draft_steps_;
  std::vector<SampledToken> tokens_;  // never shrinks, to keep its vectors' memory
  StepWatchdog watchdog_;
  int64_t begun_ = 0, finished_ = 0;
  bool is_lost_ = false;
  Status loss_{Code::kInternal, "the device is lost"};
};

// Between the steps of both lanes that are begun before and after it.
void GpuRunner::copy_page(int from_lane, int32_t from, int to_lane, int32_t to) {
  for (int number = 0; number < options_.placement.tp; ++number) {
    GpuRank& source = lanes_[static_cast<size_t>(from_lane)]->rank(number);
    GpuRank& target = lanes_[static_cast<size_t>(to_lane)]->rank(number);
    cuda::Event written, copied;
    source.use_device();
    written.record(source.stream());
    target.use_device();
    check(cudaStreamWaitEvent(target.stream(), written.get()), "waiting for a lane's steps");
    const int64_t bytes = target.page_bytes();
    check(cudaMemcpyAsync(target.pages() + to * bytes, source.pages() + from * bytes,
                          static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, target.stream()),
          "copying a page to another lane");
    copied.record(target.stream());
    source.use_device();
    check(cudaStreamWaitEvent(source.stream(), copied.get()), "waiting for a page's copy");
  }
}

// What the ranks on a device take of it.
Result<GpuMemory> memory_of(const Checkpoint& checkpoint, const GpuRunnerOptions& options,
                            int device) {
  check(cudaSetDevice(device), "choosing the device");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
  GpuMemory memory = {
      .device = device, .free = static_cast<int64_t>(free), .total = static_cast<int64_t>(total)};
  const ModelConfig& config = checkpoint.config();
  for (int rank = 0; rank < options.placement.world(); ++rank) {
    const cuda::RankPlace place = place_of(options, rank);
    if (place.device != device) continue;
    FATHOM_TRY(const cuda::ModelMemory model,
               cuda::DeepSeekModel::memory(checkpoint, gpu_model_options(config, options),
                                           options.load, place));
    ++memory.ranks;
    memory.weights += model.weights;
    memory.working_space +=
        model.workspace + cuda::PeerGroup::bytes_of_rank(options.placement.tp,
                                                         cuda::DeepSeekModel::kMostPeerRows,
                                                         config.hidden);
    if (options.placement.exchanges_tokens()) {
      memory.working_space += cuda::PeerGroup::bytes_of_rank(options.placement.world(), 1, 1);
    }
  }
  return memory;
}

// Models without multi-head attention take the other form by default.
Result<> choose_attention(const ModelConfig& config, GpuRunnerOptions& options) {
  if (gpu_takes_multi_head(config)) return {};
  if (options.attention == AttentionForm::kMha) {
    return invalid(
        "--attention is mha, the model's heads of {} and {} values (qk_nope_head_dim, v_head_dim) "
        "have absorbed attention alone on GPUs",
        config.qk_nope_dim, config.v_dim);
  }
  options.attention = AttentionForm::kAbsorbed;
  return {};
}

}  // namespace

Result<GpuMemory> gpu_memory(const Checkpoint& checkpoint, const GpuRunnerOptions& options) {
  return guarded([&]() -> Result<GpuMemory> {
    FATHOM_RETURN_IF_ERROR(check_devices(options));
    const std::set<int> devices(options.devices.begin(), options.devices.end());
    std::optional<GpuMemory> least;
    for (const int device : devices) {
      FATHOM_TRY(const GpuMemory memory, memory_of(checkpoint, options, device));
      if (!least || memory.left_for_each_rank() < least->left_for_each_rank()) least = memory;
    }
    return *least;
  });
}

Result<std::unique_ptr<Runner>> create_gpu_runner(const Checkpoint& checkpoint,
                                                  const GpuRunnerOptions& options) {
  return guarded([&]() -> Result<std::unique_ptr<Runner>> {
    FATHOM_RETURN_IF_ERROR(check_devices(options));
    FATHOM_CHECK(options.max_drafts == 0 ||
                     (options.max_drafts <= kMaxDrafts && checkpoint.config().num_mtp_layers > 0),
                 "{} drafts", options.max_drafts);
    GpuRunnerOptions its = options;
    FATHOM_RETURN_IF_ERROR(choose_attention(checkpoint.config(), its));
    auto runner = std::make_unique<GpuRunner>(checkpoint.config(), its);
    FATHOM_RETURN_IF_ERROR(runner->prepare(checkpoint));
    return runner;
  });
}

}  // namespace fathom
