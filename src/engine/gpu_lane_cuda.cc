#include "engine/gpu_lane_cuda.h"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "base/check.h"

namespace fathom {
namespace {

using cuda::check;

// Polls of the first rank's event between two looks at those of the others.
constexpr int kPollsBetweenLooks = 256;

}  // namespace

// At most half of the time that a step may take, so that the error names the ranks before the
// watchdog ends the process.
std::chrono::nanoseconds peer_limit(const GpuRunnerOptions& options) {
  constexpr std::chrono::nanoseconds kDefault = std::chrono::seconds(15);
  return options.step_timeout.count() > 0 ? options.step_timeout / 2 : kDefault;
}

GpuLane::GpuLane(const ModelConfig& config, const GpuRunnerOptions& options,
                 std::span<const int> devices)
    : hidden_(config.hidden), peer_limit_(peer_limit(options)), sampler_(config, options) {
  for (const int device : devices) {
    ranks_.push_back(std::make_unique<GpuRank>(config, options, device));
  }
  for (auto& events : ended_) events.resize(ranks_.size());
  newest_.resize(ranks_.size());
}

Result<> GpuLane::prepare(std::span<std::unique_ptr<cuda::DeepSeekModel>> models,
                          cuda::PeerGroup* world, bool graphs) {
  world_ = world;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    ranks_[i]->use_device();
    FATHOM_RETURN_IF_ERROR(
        ranks_[i]->prepare(std::move(models[i]), i == 0 ? sampler_.array_bytes() : 0));
  }
  std::vector<int> devices;
  std::vector<cuda::DeepSeekModel*> joined;
  std::vector<GpuPageTransfer::PagesOfRank> caches;
  for (const auto& rank : ranks_) {
    devices.push_back(rank->device().device());
    joined.push_back(&rank->model());
    caches.push_back({rank->device(), rank->pages(), rank->stream()});
  }
  if (size() > 1) {
    peers_.emplace(devices, cuda::DeepSeekModel::kMostPeerRows, hidden_, peer_limit_);
    cuda::DeepSeekModel::join(joined, *peers_);
  }
  ranks_.front()->use_device();
  sampler_.allocate();
  page_transfer_.emplace(caches, ranks_.front()->page_bytes());
  if (!graphs) return {};
  for (const auto& rank : ranks_) {
    rank->use_device();
    rank->capture(sampler_.tokens());
  }
  return {};
}

void GpuLane::begin_step(const ForwardBatch& batch, std::span<const SampleRow> rows,
                         int64_t first_row, const cuda::WorldRows& all) {
  batch_ = &batch;
  all_ = all;
  is_draft_ = false;
  first_row_ = first_row;
  if (newest_first_row_ > 0) {
    renumbered_ = batch;
    batch_ = &renumbered_;
    // Tokens of the step before are counted over all lanes.
    for (int32_t& id : renumbered_.token_ids) {
      if (id >= 0) continue;
      id += static_cast<int32_t>(newest_first_row_);
      FATHOM_CHECK(id < 0, "a token of another lane's rows, {} before this lane's", id + 1);
    }
  }
  rows_.assign(rows.begin(), rows.end());
  for (SampleRow& row : rows_) row.row -= first_row;
  page_transfer_->note_step();
}

void GpuLane::begin_draft(const ForwardBatch& batch, std::span<const int32_t> states,
                          std::span<const SampleRow> rows, int64_t first_row,
                          const cuda::WorldRows& all) {
  begin_step(batch, rows, first_row, all);
  is_draft_ = true;
  states_ = states;
}

void GpuLane::begin_rank(int number) {
  GpuRank& rank = *ranks_[static_cast<size_t>(number)];
  const int at = slot(begun_);
  rank.use_device();
  if (batch_->num_rows() == 0) {
    const std::string kernels = rank.enqueue_for_others(all_, is_draft_);
    if (number == 0) {
      sampler_.plan_nothing(at);
      kernels_ = kernels;
    }
    return end_rank(number, at);
  }
  cuda::StepLayout& layout =
      is_draft_ ? rank.plan_draft(*batch_, states_, all_) : rank.plan(*batch_, all_);
  if (number > 0) {
    // Its rows may be tokens that the first rank samples in the step before.
    if (begun_ > 0) {
      check(cudaStreamWaitEvent(rank.stream(), ended_[slot(begun_ - 1)].front().get()),
            "waiting for the tokens of the step before");
    }
    rank.enqueue(at, sampler_.tokens());
  } else {
    sampler_.plan(rows_, at, layout);
    sampler_.copy_seen(at, rank);
    kernels_ = rank.enqueue(at, sampler_.tokens());
    sampler_.enqueue(at, rank);
  }
  end_rank(number, at);
}

void GpuLane::end_rank(int number, int at) {
  cuda::Event& ended = ended_[at][static_cast<size_t>(number)];
  ended.record(ranks_[static_cast<size_t>(number)]->stream());
  newest_[static_cast<size_t>(number)] = ended.get();
}

size_t GpuLane::finish_step(std::vector<SampledToken>& tokens, size_t at) {
  const int64_t step = finished_++;
  wait(step);
  const auto rows = static_cast<size_t>(sampler_.num_rows(slot(step)));
  if (tokens.size() < at + rows) tokens.resize(at + rows);
  sampler_.take_tokens(slot(step), std::span(tokens).subspan(at, rows));
  return rows;
}

void GpuLane::wait(int64_t step) {
  const std::vector<cuda::Event>& ended = ended_[slot(step)];
  if (size() == 1 && world_ == nullptr) return ended.front().wait();
  cudaError_t status = cudaErrorNotReady;
  for (int polls = 1; (status = cudaEventQuery(ended.front().get())) == cudaErrorNotReady;
       ++polls) {
    if (polls % kPollsBetweenLooks != 0 || stopped()) continue;
    for (size_t rank = 1; rank < ended.size(); ++rank) {
      const cudaError_t other = cudaEventQuery(ended[rank].get());
      if (other == cudaSuccess || other == cudaErrorNotReady) continue;
      stop();
      check(other, name_of(static_cast<int>(rank)).c_str());
    }
  }
  check(status, name_of(0).c_str());
  if (stopped()) throw std::runtime_error("ranks on GPUs were stopped in this step");
}

void GpuLane::stop() {
  if (peers_) peers_->stop();
  if (world_ != nullptr) world_->stop();
}

std::string GpuLane::name_of(int rank) const {
  return fmt::format("rank {} on cuda:{}", rank,
                     ranks_[static_cast<size_t>(rank)]->device().device());
}

std::string GpuLane::late_rank() const {
  const auto late = peers_ ? peers_->late() : std::nullopt;
  if (!late) return "";
  return fmt::format("{} waited {:.3g} s for {} in a sum over ranks", name_of(late->waiting),
                     std::chrono::duration<double>(peer_limit_).count(), name_of(late->missing));
}

cudaError_t GpuLane::synchronize() {
  cudaError_t first = cudaSuccess;
  for (const auto& rank : ranks_) {
    rank->use_device();
    const cudaError_t status = cudaStreamSynchronize(rank->stream());
    if (first == cudaSuccess) first = status;
  }
  return first;
}

}  // namespace fathom
