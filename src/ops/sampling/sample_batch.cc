#include "ops/sampling/sample_batch.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "ops/sampling/gumbel_noise.h"

namespace fathom {
namespace {

void set_draw(const SampleOptions& options, uint64_t position, DeviceSampleRow& out) {
  if (options.temperature < kGreedyTemperature) return;
  out.inverse_temperature = static_cast<float>(1 / options.temperature);
  out.noise = noise_key(options.seed, options.stream, position);
}

}  // namespace

SampleBatch::SampleBatch(int64_t vocab) : vocab_(vocab), mask_words_(ceil_div(vocab, 32)) {}

void SampleBatch::clear() {
  rows_.clear();
  bias_ids_.clear();
  bias_values_.clear();
  seen_.clear();
  masked_ids_.clear();
  allowed_.clear();
}

void SampleBatch::add(const SampleRow& row) {
  FATHOM_CHECK(row.num_logprobs <= kDeviceTopLogprobs, "{} alternatives", row.num_logprobs);
  DeviceSampleRow out;
  out.row = static_cast<int32_t>(row.row);
  out.given_id = row.given_id;
  out.num_logprobs = row.num_logprobs;
  if (row.given_id < 0) add_choice(row, out);
  rows_.push_back(out);
}

void SampleBatch::add_draft(int64_t row, const SampleOptions& options, uint64_t position) {
  DeviceSampleRow out;
  out.row = static_cast<int32_t>(row);
  set_draw(options, position, out);
  rows_.push_back(out);
}

void SampleBatch::add_choice(const SampleRow& row, DeviceSampleRow& out) {
  const SampleOptions& options = *row.options;
  set_draw(options, row.position, out);
  if (options.temperature >= kGreedyTemperature) {
    out.top_p = options.top_p;
    if (options.top_k > 0 && options.top_k < vocab_)
      out.top_k = static_cast<int32_t>(options.top_k);
    if (options.min_p > 0) {
      out.has_min_p = 1;
      out.min_p_depth = options.temperature * std::log(options.min_p);
    }
  }
  out.repetition_penalty = options.repetition_penalty;
  out.presence_penalty = options.presence_penalty;
  out.frequency_penalty = options.frequency_penalty;
  out.first_bias = static_cast<int32_t>(bias_ids_.size());
  out.num_biases = static_cast<int32_t>(options.logit_bias.size());
  for (const auto& [id, bias] : options.logit_bias) {
    bias_ids_.push_back(id);
    bias_values_.push_back(bias);
  }
  if (options.has_penalties()) {
    FATHOM_CHECK(row.history != nullptr, "penalties need the tokens' history");
    const auto entries = row.history->entries();
    out.first_seen = static_cast<int32_t>(seen_.size());
    out.num_seen = static_cast<int32_t>(entries.size());
    seen_.insert(seen_.end(), entries.begin(), entries.end());
  }
  out.first_masked = static_cast<int32_t>(masked_ids_.size());
  out.num_masked = static_cast<int32_t>(row.masked.size());
  masked_ids_.insert(masked_ids_.end(), row.masked.begin(), row.masked.end());
  if (!row.allowed.empty()) {
    out.allowed_row = static_cast<int32_t>(std::ssize(allowed_) / mask_words_);
    const int64_t words = std::min(std::ssize(row.allowed), mask_words_);
    allowed_.insert(allowed_.end(), row.allowed.begin(), row.allowed.begin() + words);
    allowed_.resize(allowed_.size() + static_cast<size_t>(mask_words_ - words));
  }
}

SampleBatch::Group SampleBatch::group_from(int64_t first_row, int64_t most_seen) const {
  Group group{.first_row = first_row};
  for (const DeviceSampleRow& row : rows().subspan(static_cast<size_t>(first_row))) {
    if (group.num_rows > 0 && group.num_seen + row.num_seen > most_seen) break;
    if (group.num_seen == 0) group.first_seen = row.first_seen;
    group.num_seen += row.num_seen;
    ++group.num_rows;
  }
  return group;
}

}  // namespace fathom
