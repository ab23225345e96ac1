#include "ops/indexer/sparse_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"

namespace fathom {
namespace {

constexpr int64_t kScoreBytes = 4;
constexpr int64_t kColumnPadding = 16;  // rows of scores begin on cache lines

int64_t columns_for(int64_t length) { return round_up(length, kColumnPadding); }

// Cuts the scored rows into passes within the budget, in their order.
std::vector<ScorePass> cut_passes(const std::vector<SparseRow>& rows, int64_t score_bytes) {
  std::vector<ScorePass> passes;
  ScorePass pass;
  for (const SparseRow& row : rows) {
    const int64_t columns = std::max(pass.columns, columns_for(row.length));
    if (pass.count > 0 && (pass.count + 1) * columns * kScoreBytes > score_bytes) {
      passes.push_back(pass);
      pass = {pass.first + pass.count, 0, 0};
    }
    ++pass.count;
    pass.columns = std::max(pass.columns, columns_for(row.length));
  }
  if (pass.count > 0) passes.push_back(pass);
  return passes;
}

}  // namespace

Result<> check_sparse_limits(const SparseLimits& limits, int64_t max_length) {
  if (limits.top_keys < 1) return invalid("{} keys to choose: must be 1 or more", limits.top_keys);
  if (limits.dense_keys < 0 || limits.dense_keys > limits.top_keys) {
    return invalid("a dense threshold of {} keys: must be 0 to the {} keys that a row chooses",
                   limits.dense_keys, limits.top_keys);
  }
  const int64_t row_bytes = columns_for(max_length) * kScoreBytes;
  if (limits.score_bytes < row_bytes) {
    return invalid("{} bytes for index scores: a row of {} keys takes {}", limits.score_bytes,
                   max_length, row_bytes);
  }
  return {};
}

SparsePlan plan_sparse_rows(const PagedBatch& batch, std::span<const int32_t> sequences,
                            const SparseLimits& limits) {
  SparsePlan plan;
  for (const int32_t sequence : sequences) {
    FATHOM_CHECK(sequence >= 0 && sequence < batch.num_sequences(), "sequence {} of {}", sequence,
                 batch.num_sequences());
    for (int32_t query = 0; query < batch.num_queries(sequence); ++query) {
      const SparseRow row{batch.query_start[static_cast<size_t>(sequence)] + query, sequence,
                          batch.context_lens[static_cast<size_t>(sequence)] + query + 1};
      const bool dense = row.length - int64_t{batch.first_key} <= limits.dense_keys;
      (dense ? plan.dense : plan.scored).push_back(row);
    }
  }
  plan.passes = cut_passes(plan.scored, limits.score_bytes);
  return plan;
}

void fit_one_pass(SparseLimits& limits, int64_t rows, int64_t max_length) {
  constexpr int64_t kMost = int64_t{256} << 20;
  const int64_t wanted = std::min(rows * columns_for(max_length) * kScoreBytes, kMost);
  limits.score_bytes = std::max(limits.score_bytes, wanted);
}

int64_t score_buffer_floats(const SparseLimits& limits, int64_t rows, int64_t max_length) {
  const int64_t columns = columns_for(max_length);
  return std::min(rows * columns, std::max(limits.score_bytes / kScoreBytes, columns));
}

}  // namespace fathom
