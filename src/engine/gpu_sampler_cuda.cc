#include "engine/gpu_sampler_cuda.h"

#include <algorithm>

#include "engine/sampling_params.h"
#include "ops/sampling/sample_cuda.h"

namespace fathom {
namespace {

using cuda::check;

static_assert(kMaxTopLogprobs <= kDeviceTopLogprobs);

// Few sequences have penalties, so the buffer is sized for few; more are sampled in groups.
int64_t seen_room(const ModelConfig& config, const GpuRunnerOptions& options, int64_t max_rows) {
  const int64_t of_one = std::min(gpu_model_len(config, options), config.vocab_size);
  return std::max(of_one, std::min(options.penalty_room, of_one * max_rows));
}

}  // namespace

GpuSampler::GpuSampler(const ModelConfig& config, const GpuRunnerOptions& options)
    : vocab_(config.vocab_size),
      max_rows_(gpu_model_options(config, options).max_logit_rows),
      seen_room_(seen_room(config, options, max_rows_)),
      samples_(config.vocab_size) {}

int64_t GpuSampler::array_bytes() const {
  // Masked ids are stop ids: the request's own and the model's.
  constexpr int64_t kIds = kMaxLogitBiasIds * 2 + kMaxStopTokenIds + 64;
  return max_rows_ *
         (static_cast<int64_t>(sizeof(DeviceSampleRow)) + (samples_.mask_words() + kIds) * 4);
}

void GpuSampler::allocate() {
  ids_ = cuda::DeviceArray<int32_t>(max_rows_);
  logprobs_ = cuda::DeviceArray<float>(max_rows_);
  top_ids_ = cuda::DeviceArray<int32_t>(max_rows_ * kDeviceTopLogprobs);
  top_logprobs_ = cuda::DeviceArray<float>(max_rows_ * kDeviceTopLogprobs);
  seen_ = cuda::DeviceArray<SeenToken>(seen_room_);
  for (Step& step : steps_) {
    step.seen = cuda::PinnedArray<SeenToken>(seen_room_);
    step.ids = cuda::PinnedArray<int32_t>(max_rows_);
    step.logprobs = cuda::PinnedArray<float>(max_rows_);
    step.top_ids = cuda::PinnedArray<int32_t>(max_rows_ * kDeviceTopLogprobs);
    step.top_logprobs = cuda::PinnedArray<float>(max_rows_ * kDeviceTopLogprobs);
  }
}

void GpuSampler::plan(std::span<const SampleRow> rows, int slot, cuda::StepLayout& layout) {
  steps_[slot].rows.assign(rows.begin(), rows.end());
  samples_.clear();
  for (const SampleRow& row : rows) samples_.add(row);
  rows_at_ = append(layout, samples_.rows());
  bias_ids_at_ = append(layout, samples_.bias_ids());
  bias_values_at_ = append(layout, samples_.bias_values());
  masked_at_ = append(layout, samples_.masked_ids());
  allowed_at_ = append(layout, samples_.allowed());
  first_ = samples_.group_from(0, seen_room_);
}

void GpuSampler::copy_seen(int slot, const GpuRank& rank) {
  SeenToken* const staged = steps_[slot].seen.data();
  std::copy_n(samples_.seen().data() + first_.first_seen, first_.num_seen, staged);
  copy_seen(staged, first_.num_seen, rank.stream());
}

// `from` is pinned memory, or pageable memory, which the driver has copied when this returns.
void GpuSampler::copy_seen(const SeenToken* from, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  check(cudaMemcpyAsync(seen_.data(), from, static_cast<size_t>(count) * sizeof(SeenToken),
                        cudaMemcpyHostToDevice, stream),
        "copying seen tokens");
}

void GpuSampler::enqueue(int slot, const GpuRank& rank) {
  Step& step = steps_[slot];
  enqueue_group(first_, rank);
  const auto rows = std::ssize(step.rows);
  for (int64_t row = first_.num_rows; row < rows;) {
    const SampleBatch::Group group = samples_.group_from(row, seen_room_);
    copy_seen(samples_.seen().data() + group.first_seen, group.num_seen, rank.stream());
    enqueue_group(group, rank);
    row += group.num_rows;
  }
  copy_back(step, rank.stream());
}

// Samples the rows of a group, whose seen tokens are on the device.
void GpuSampler::enqueue_group(const SampleBatch::Group& group, const GpuRank& rank) {
  if (group.num_rows == 0) return;
  const std::byte* const arrays = rank.arrays();
  const int64_t first = group.first_row;
  cuda::sample({.logits = rank.model().logits(),
                .logits_stride = rank.model().logits_stride(),
                .vocab = vocab_,
                .rows = reinterpret_cast<const DeviceSampleRow*>(arrays + rows_at_) + first,
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
               rank.gpu_stream());
}

void GpuSampler::copy_back(Step& step, cudaStream_t stream) {
  const auto rows = std::ssize(step.rows);
  const auto copy = [&](const auto& from, int64_t count, auto& to) {
    check(cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(count) * sizeof(*to.data()),
                          cudaMemcpyDeviceToHost, stream),
          "copying tokens");
  };
  if (rows == 0) return;
  copy(ids_, rows, step.ids);
  const auto wants_logprobs = [](const SampleRow& row) { return row.num_logprobs >= 0; };
  if (std::any_of(step.rows.begin(), step.rows.end(), wants_logprobs)) {
    copy(logprobs_, rows, step.logprobs);
    copy(top_ids_, rows * kDeviceTopLogprobs, step.top_ids);
    copy(top_logprobs_, rows * kDeviceTopLogprobs, step.top_logprobs);
  }
}

void GpuSampler::take_tokens(int slot, std::span<SampledToken> tokens) const {
  const Step& step = steps_[slot];
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    SampledToken& token = tokens[i];
    token.id = step.ids[row];
    token.logprob = 0;
    token.top.clear();
    const int num_logprobs = step.rows[i].num_logprobs;
    if (num_logprobs < 0) continue;
    token.logprob = step.logprobs[row];
    for (int64_t k = row * kDeviceTopLogprobs; k < row * kDeviceTopLogprobs + num_logprobs; ++k) {
      if (step.top_ids[k] < 0) break;
      token.top.emplace_back(step.top_ids[k], step.top_logprobs[k]);
    }
  }
}

}  // namespace fathom
