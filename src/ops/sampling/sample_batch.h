// A step's sampling as flat arrays, copied to a device unchanged and read by sample() of
// sample_cuda.h. Grows to the largest step and is then reused. Used by one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/sampling/device_sample_row.h"
#include "ops/sampling/sample.h"

namespace fathom {

class SampleBatch {
 public:
  explicit SampleBatch(int64_t vocab);

  void clear();
  // Ids in logit_bias differ. num_logprobs <= kDeviceTopLogprobs.
  void add(const SampleRow& row);
  // A row whose token is that of draft_token().
  void add_draft(int64_t row, const SampleOptions& options, uint64_t position);
  void add_padding() { rows_.push_back({}); }

  std::span<const DeviceSampleRow> rows() const { return rows_; }
  // Rows, and their seen tokens.
  struct Group {
    int64_t first_row = 0, num_rows = 0, first_seen = 0, num_seen = 0;
  };
  // The longest group of rows from first_row on with at most most_seen seen tokens in total: at
  // least one row.
  Group group_from(int64_t first_row, int64_t most_seen) const;
  std::span<const int32_t> bias_ids() const { return bias_ids_; }
  std::span<const float> bias_values() const { return bias_values_; }
  std::span<const SeenToken> seen() const { return seen_; }
  std::span<const int32_t> masked_ids() const { return masked_ids_; }
  // [masks, mask_words()]: bit id % 32 of word id / 32
  std::span<const uint32_t> allowed() const { return allowed_; }
  int64_t mask_words() const { return mask_words_; }

 private:
  void add_choice(const SampleRow& row, DeviceSampleRow& out);

  int64_t vocab_, mask_words_;
  std::vector<DeviceSampleRow> rows_;
  std::vector<int32_t> bias_ids_, masked_ids_;
  std::vector<float> bias_values_;
  std::vector<SeenToken> seen_;
  std::vector<uint32_t> allowed_;
};

}  // namespace fathom
