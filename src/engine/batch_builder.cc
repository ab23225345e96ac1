#include "engine/batch_builder.h"

#include <algorithm>

namespace fathom {

const ForwardBatch& BatchBuilder::build(const StepPlan& plan) {
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.query_start.assign(1, 0);
  batch_.context_lens.clear();
  batch_.prompt_lens.clear();
  batch_.logit_rows.clear();
  size_t max_pages = 0;
  for (const StepEntry& entry : plan.entries) {
    add_rows(entry);
    max_pages = std::max(max_pages, entry.sequence->pages.size());
  }
  batch_.max_pages = static_cast<int32_t>(max_pages);
  batch_.block_tables.resize(plan.entries.size() * max_pages);
  auto out = batch_.block_tables.begin();
  for (const StepEntry& entry : plan.entries) {
    const std::vector<int32_t>& pages = entry.sequence->pages;
    out = std::copy(pages.begin(), pages.end(), out);
    out = std::fill_n(out, max_pages - pages.size(), -1);
  }
  return batch_;
}

void BatchBuilder::add_rows(const StepEntry& entry) {
  const Sequence& sequence = *entry.sequence;
  const auto first_row = static_cast<int32_t>(batch_.token_ids.size());
  const auto begin = sequence.tokens.begin() + sequence.computed;
  batch_.token_ids.insert(batch_.token_ids.end(), begin, begin + entry.num_tokens);
  for (int64_t i = 0; i < entry.num_tokens; ++i) {
    batch_.positions.push_back(static_cast<int32_t>(sequence.computed + i));
  }
  batch_.query_start.push_back(static_cast<int32_t>(batch_.token_ids.size()));
  batch_.context_lens.push_back(static_cast<int32_t>(sequence.computed));
  batch_.prompt_lens.push_back(static_cast<int32_t>(sequence.prompt_len));
  const auto first_wanted =
      first_row + static_cast<int32_t>(entry.first_prompt_logit - sequence.computed);
  for (int32_t i = 0; i < entry.num_prompt_logits; ++i) {
    batch_.logit_rows.push_back(first_wanted + i);
  }
  if (entry.samples) {
    batch_.logit_rows.push_back(static_cast<int32_t>(batch_.token_ids.size()) - 1);
  }
}

}  // namespace fathom
