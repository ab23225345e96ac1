#include "model/attention_plan.h"

#include <algorithm>

#include "base/check.h"
#include "device/cpu/isa.h"

namespace fathom {

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
  const auto narrow = static_cast<double>(shape.nope_dim + shape.rope_dim + shape.v_dim);
  const auto projection = static_cast<double>(shape.latent_dim * (shape.nope_dim + shape.v_dim));
  const double absorbed = (pairs * wide + rows * projection) * policy.absorbed_cost;
  const double mha = pairs * narrow + keys * projection;
  return mha < absorbed;
}

PagedBatch AbsorbedGroup::view(const ForwardBatch& batch) const {
  const auto first = static_cast<size_t>(first_sequence);
  const size_t count = sequences.size();
  const auto pages = static_cast<size_t>(batch.max_pages);
  PagedBatch paged;
  paged.query_start = query_start;
  paged.context_lens = context_lens;
  paged.block_tables = std::span(batch.block_tables).subspan(first * pages, count * pages);
  paged.max_pages = batch.max_pages;
  return paged;
}

AttentionPlan plan_attention(const ForwardBatch& batch, const AttentionShape& shape,
                             const AttentionPolicy& policy) {
  AttentionPlan plan;
  bool open = false;  // whether the next absorbed rows may extend the last group
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t first_row = batch.query_start[s];
    const int64_t queries = batch.query_start[s + 1] - first_row;
    FATHOM_CHECK(queries > 0, "sequence {} has no rows", s);
    if (prefers_mha(queries, batch.context_lens[s], shape, policy)) {
      plan.mha.push_back(static_cast<int32_t>(s));
      open = false;
      continue;
    }
    for (int64_t done = 0; done < queries;) {
      if (!open || plan.absorbed.back().rows == policy.max_absorbed_rows) {
        AbsorbedGroup group;
        group.first_row = first_row + done;
        group.first_sequence = s;
        group.query_start.push_back(0);
        plan.absorbed.push_back(std::move(group));
        open = true;
      }
      AbsorbedGroup& group = plan.absorbed.back();
      const int64_t taken = std::min(queries - done, policy.max_absorbed_rows - group.rows);
      group.rows += taken;
      group.query_start.push_back(static_cast<int32_t>(group.rows));
      group.context_lens.push_back(static_cast<int32_t>(batch.context_lens[s] + done));
      group.sequences.push_back(static_cast<int32_t>(group.sequences.size()));
      done += taken;
    }
  }
  return plan;
}

}  // namespace fathom
