#include "model/attention_plan.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "device/cpu/isa.h"

namespace fathom {
namespace {

// Rows whose index queries cost about as much as reading the query side's weights again.
constexpr int64_t kJoinedGap = 16;

// Collects a step's rows in the batch's order.
class AttentionPlanner {
 public:
  AttentionPlanner(const ForwardBatch& batch, const AttentionPolicy& policy)
      : batch_(batch), policy_(policy) {}

  // Rows [first, first + count) of a sequence, counted from its first of the step. `is_scored`:
  // they choose their keys.
  void absorb(int64_t sequence, int64_t first, int64_t count, bool is_scored) {
    for (int64_t done = 0; done < count;) {
      if (!is_open_ || plan.absorbed.back().rows == policy_.max_absorbed_rows) {
        AbsorbedGroup group;
        group.first_row = batch_.query_start[sequence] + first + done;
        group.first_sequence = sequence;
        group.query_start.push_back(0);
        group.scored.first = num_scored_;
        plan.absorbed.push_back(std::move(group));
        is_open_ = true;
      }
      AbsorbedGroup& group = plan.absorbed.back();
      const int64_t taken = std::min(count - done, policy_.max_absorbed_rows - group.rows);
      group.rows += taken;
      if (is_scored) {
        group.scored.count += taken;
        num_scored_ += taken;
      } else {
        group.sequences.push_back(static_cast<int32_t>(group.context_lens.size()));
      }
      group.query_start.push_back(static_cast<int32_t>(group.rows));
      group.context_lens.push_back(
          static_cast<int32_t>(batch_.context_lens[sequence] + first + done));
      done += taken;
    }
  }

  void expand(int64_t sequence, int64_t rows) {
    plan.mha.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(rows)});
    close();
  }

  // The next absorbed rows begin a group: a group has one entry of a sequence.
  void close() { is_open_ = false; }

  AttentionPlan plan;

 private:
  const ForwardBatch& batch_;
  const AttentionPolicy& policy_;
  int64_t num_scored_ = 0;
  bool is_open_ = false;
};

}  // namespace

AttentionPolicy cpu_attention_policy() {
  AttentionPolicy policy;
  // Without AMX the arithmetic crossover is the measured one. With AMX the multi-head form runs at
  // 400 to 590 GFLOP/s; the absorbed form does not use it and runs at 137.
  if (cpu_isa() == CpuIsa::kAmx) policy.absorbed_cost = 4.0;
  return policy;
}

AttentionPolicy gpu_attention_policy() {
  AttentionPolicy policy;
  // Fitted to the measured crossovers: at about 370 new tokens after 16K and after 64K keys, 350
  // after 4K, 107 after 1K, nowhere after 256 and fewer.
  policy.absorbed_cost = 0.62;
  policy.free_keys = 768;
  return policy;
}

bool prefers_mha(int64_t queries, int64_t context, const AttentionShape& shape,
                 const AttentionPolicy& policy) {
  if (policy.form != AttentionForm::kAuto) return policy.form == AttentionForm::kMha;
  if (queries < policy.min_mha_queries) return false;
  // Multiply-adds of one head (deepseek-v2 paper, section 2.1): the pairs in either form, the
  // expansion of every key, the absorption GEMMs of every query.
  const auto keys = static_cast<double>(std::max<int64_t>(0, context + queries - policy.free_keys));
  const auto rows = static_cast<double>(queries);
  const double pairs = rows * (static_cast<double>(context) + (rows + 1) / 2);
  const auto wide = static_cast<double>(2 * shape.latent_dim + shape.rope_dim);
  const int64_t shared_dim = shape.grouped ? 0 : shape.rope_dim;
  const auto narrow = static_cast<double>(shape.nope_dim + shared_dim + shape.v_dim);
  const auto projection =
      shape.grouped ? 0 : static_cast<double>(shape.latent_dim * (shape.nope_dim + shape.v_dim));
  const double absorbed = (pairs * wide + rows * projection) * policy.absorbed_cost;
  const double mha = pairs * narrow + keys * projection;
  return mha < absorbed;
}

PagedBatch AbsorbedGroup::view(const ForwardBatch& batch) const {
  const auto first = static_cast<size_t>(first_sequence);
  const size_t count = context_lens.size();
  const auto pages = static_cast<size_t>(batch.max_pages);
  PagedBatch paged;
  paged.query_start = query_start;
  paged.context_lens = context_lens;
  paged.block_tables = std::span(batch.block_tables).subspan(first * pages, count * pages);
  paged.max_pages = batch.max_pages;
  return paged;
}

PagedBatch paged_view(const ForwardBatch& batch, int32_t first_key) {
  PagedBatch paged;
  paged.query_start = batch.query_start;
  paged.context_lens = batch.context_lens;
  paged.block_tables = batch.block_tables;
  paged.max_pages = batch.max_pages;
  paged.first_key = first_key;
  return paged;
}

AttentionPlan plan_attention(const ForwardBatch& batch, const AttentionShape& shape,
                             const AttentionPolicy& policy, int32_t first_key) {
  SparsePlan sparse;
  std::vector<int32_t> num_scored(static_cast<size_t>(batch.num_sequences()), 0);
  if (shape.sparse) {
    std::vector<int32_t> all(num_scored.size());
    std::iota(all.begin(), all.end(), 0);
    sparse = plan_sparse_rows(paged_view(batch, first_key), all, *shape.sparse);
    for (const SparseRow& row : sparse.scored) ++num_scored[static_cast<size_t>(row.sequence)];
  }
  AttentionPlanner planner(batch, policy);
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t queries = batch.query_start[s + 1] - batch.query_start[s];
    FATHOM_CHECK(queries > 0, "sequence {} has no rows", s);
    const int64_t scored = num_scored[static_cast<size_t>(s)], dense = queries - scored;
    if (dense > 0 && prefers_mha(dense, batch.context_lens[s], shape, policy)) {
      planner.expand(s, dense);
    } else if (dense > 0) {
      planner.absorb(s, 0, dense, false);
    }
    if (scored == 0) continue;
    if (dense > 0) planner.close();
    planner.absorb(s, dense, scored, true);
  }
  planner.plan.scored = std::move(sparse.scored);
  planner.plan.passes = std::move(sparse.passes);
  return std::move(planner.plan);
}

std::vector<Slice> query_runs(std::span<const SparseRow> scored) {
  std::vector<Slice> runs;
  for (const SparseRow& row : scored) {
    if (runs.empty() || row.row > runs.back().end() + kJoinedGap) {
      runs.push_back({row.row, 0});
    }
    runs.back().count = row.row + 1 - runs.back().first;
  }
  return runs;
}

}  // namespace fathom
