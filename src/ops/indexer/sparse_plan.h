// Which rows of a step choose their keys and which see all of them, decided on the host before the
// step, by each row's own length alone.
//
// A row that sees at most `dense_keys` keys (--dsa-dense-threshold, at most index_topk) needs no
// index query, no scores and no choice: its list is the identity. Index keys are written for every
// row: a later row may need them. Lengths are upper bounds while a step is in flight ahead of
// sampling; a draft window counts with its last row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "ops/attention/paged_batch.h"
#include "ops/attention/sparse_row.h"

namespace fathom {

struct SparseLimits {
  int64_t top_keys = 2048;                  // index_topk
  int64_t dense_keys = 2048;                // N: 0 … top_keys
  int64_t score_bytes = int64_t{64} << 20;  // of one pass's scores
};

// Refuses top_keys < 1, dense_keys outside 0 … top_keys (above it unmasked dense attention would be
// another answer), and a score_bytes that does not hold one row of max_length keys. The sentence
// names the value and its limit; the caller names the flag or field.
Result<> check_sparse_limits(const SparseLimits& limits, int64_t max_length);

// The rows of one call of index_scores() and select_top_keys(): scored[first, first + count).
struct ScorePass {
  int64_t first = 0;
  int64_t count = 0;
  int64_t columns = 0;  // of the scores: the greatest length, rounded up to 16

  friend bool operator==(const ScorePass&, const ScorePass&) = default;
};

struct SparsePlan {
  std::vector<SparseRow> dense;   // see at most dense_keys keys, in the batch's order
  std::vector<SparseRow> scored;  // the others
  std::vector<ScorePass> passes;  // cover `scored`, each within score_bytes

  // No row needs the query side: on a GPU the host replays the short graph, and gets equal bits,
  // because attention reads the same lists in both.
  bool is_short() const { return scored.empty(); }
};

// For the listed sequences of the batch.
SparsePlan plan_sparse_rows(const PagedBatch& batch, std::span<const int32_t> sequences,
                            const SparseLimits& limits);

// Whether a step whose rows see at most `longest` positions from first_key on replays the short
// graph. For the host of a GPU, which knows upper bounds only: an overestimate costs time, not
// bits.
inline bool takes_short_graph(int64_t longest, int32_t first_key, const SparseLimits& limits) {
  return longest - first_key <= limits.dense_keys;
}

// Raises score_bytes, up to 256 MiB, so that `rows` rows of max_length keys are one pass. For
// captured decode steps on a GPU: each further pass is five launches a layer, and reads the query
// side's weights again.
void fit_one_pass(SparseLimits& limits, int64_t rows, int64_t max_length);

// Floats that the scores of any pass take, for a step of at most `rows` rows of `max_length` keys.
int64_t score_buffer_floats(const SparseLimits& limits, int64_t rows, int64_t max_length);

}  // namespace fathom
