#include "engine/batch_builder.h"

#include <algorithm>

#include "base/check.h"

namespace fathom {
namespace {

void add_rows(const StepEntry& entry, ForwardBatch& batch) {
  const Sequence& sequence = *entry.sequence;
  const auto first_row = static_cast<int32_t>(batch.token_ids.size());
  const auto begin = sequence.tokens.begin() + sequence.computed;
  batch.token_ids.insert(batch.token_ids.end(), begin, begin + entry.num_tokens);
  for (int64_t i = 0; i < entry.num_tokens; ++i) {
    batch.positions.push_back(static_cast<int32_t>(sequence.computed + i));
  }
  batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
  batch.context_lens.push_back(static_cast<int32_t>(sequence.computed));
  batch.prompt_lens.push_back(static_cast<int32_t>(sequence.prompt_len));
  const auto first_wanted =
      first_row + static_cast<int32_t>(entry.first_prompt_logit - sequence.computed);
  for (int32_t i = 0; i < entry.num_prompt_logits; ++i) {
    batch.logit_rows.push_back(first_wanted + i);
  }
  if (entry.samples) {
    batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()) - 1);
  }
}

void fill(std::span<const StepEntry> entries, ForwardBatch& batch) {
  batch.token_ids.clear();
  batch.positions.clear();
  batch.query_start.assign(1, 0);
  batch.context_lens.clear();
  batch.prompt_lens.clear();
  batch.logit_rows.clear();
  batch.largest_only.clear();
  size_t max_pages = 0;
  for (const StepEntry& entry : entries) {
    add_rows(entry, batch);
    max_pages = std::max(max_pages, entry.sequence->pages.size());
  }
  batch.max_pages = static_cast<int32_t>(max_pages);
  batch.block_tables.resize(entries.size() * max_pages);
  auto out = batch.block_tables.begin();
  for (const StepEntry& entry : entries) {
    const std::vector<int32_t>& pages = entry.sequence->pages;
    out = std::copy(pages.begin(), pages.end(), out);
    out = std::fill_n(out, max_pages - pages.size(), -1);
  }
}

}  // namespace

std::span<const ForwardBatch> BatchBuilder::build(const StepPlan& plan,
                                                  std::span<const SampleRow> rows) {
  batches_.resize(plan.lane_ends.size());
  size_t begin = 0;
  for (size_t lane = 0; lane < batches_.size(); ++lane) {
    const size_t end = plan.lane_ends[lane];
    fill(std::span(plan.entries).subspan(begin, end - begin), batches_[lane]);
    begin = end;
  }
  size_t first_row = 0;
  for (ForwardBatch& batch : batches_) {
    const size_t count = batch.logit_rows.size();
    FATHOM_CHECK(first_row + count <= rows.size(), "{} sample rows", rows.size());
    for (size_t i = 0; i < count; ++i) {
      if (takes_largest(rows[first_row + i])) batch.largest_only.push_back(static_cast<int32_t>(i));
    }
    first_row += count;
  }
  return batches_;
}

}  // namespace fathom
