#include "engine/batch_builder.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

void add_rows(const StepEntry& entry, ForwardBatch& batch) {
  const Sequence& sequence = *entry.sequence;
  const auto first_row = static_cast<int32_t>(batch.token_ids.size());
  const auto begin = sequence.tokens.begin() + sequence.computed;
  batch.token_ids.insert(batch.token_ids.end(), begin, begin + entry.num_tokens);
  const auto drafts = sequence.drafts.begin();
  batch.token_ids.insert(batch.token_ids.end(), drafts, drafts + entry.num_drafts);
  for (int64_t i = 0; i < entry.num_rows(); ++i) {
    batch.positions.push_back(static_cast<int32_t>(sequence.computed + i));
  }
  batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
  batch.context_lens.push_back(static_cast<int32_t>(sequence.computed));
  batch.prompt_lens.push_back(static_cast<int32_t>(sequence.prompt_len));
  batch.num_drafts.push_back(static_cast<int32_t>(entry.num_drafts));
  batch.mtp_lens.push_back(static_cast<int32_t>(sequence.mtp_len));
  const auto first_wanted =
      first_row + static_cast<int32_t>(entry.first_prompt_logit - sequence.computed);
  for (int32_t i = 0; i < entry.num_prompt_logits; ++i) {
    batch.logit_rows.push_back(first_wanted + i);
  }
  const auto end = static_cast<int32_t>(batch.token_ids.size());
  for (auto i = static_cast<int32_t>(entry.num_sampled()); i > 0; --i) {
    batch.logit_rows.push_back(end - i);
  }
}

// The rows of the MTP layer before a step, see Runner::draft().
void add_draft_rows(const StepEntry& entry, ForwardBatch& batch) {
  const Sequence& sequence = *entry.sequence;
  const auto tokens = sequence.tokens.begin();
  batch.token_ids.insert(batch.token_ids.end(), tokens + sequence.mtp_len,
                         tokens + sequence.computed + 1);
  for (int64_t position = sequence.mtp_len; position <= sequence.computed; ++position) {
    batch.positions.push_back(static_cast<int32_t>(position));
  }
  batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
  batch.context_lens.push_back(static_cast<int32_t>(sequence.mtp_len));
  batch.prompt_lens.push_back(static_cast<int32_t>(sequence.prompt_len));
  batch.num_drafts.push_back(static_cast<int32_t>(entry.num_drafts));
  batch.mtp_lens.push_back(static_cast<int32_t>(sequence.mtp_len));
  if (entry.num_drafts > 0) {
    batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()) - 1);
  }
}

void clear(ForwardBatch& batch) {
  batch.query_start.assign(1, 0);
  for (auto* array : {&batch.token_ids, &batch.positions, &batch.context_lens, &batch.prompt_lens,
                      &batch.block_tables, &batch.num_drafts, &batch.mtp_lens, &batch.logit_rows,
                      &batch.largest_only}) {
    array->clear();
  }
}

// A sequence's pages up to its step's last row, drafts included. One that had drafts rejected may
// have a page more.
int64_t pages_of(const StepEntry& entry) {
  return ceil_div(entry.sequence->computed + entry.num_rows(), kPageSize);
}

template <typename AddRows>
void fill(std::span<const StepEntry> entries, const AddRows& add, ForwardBatch& batch) {
  clear(batch);
  int64_t max_pages = 0;
  for (const StepEntry& entry : entries) max_pages = std::max(max_pages, pages_of(entry));
  batch.max_pages = static_cast<int32_t>(max_pages);
  for (const StepEntry& entry : entries) {
    if (!add(entry, batch)) continue;
    const auto pages = entry.sequence->pages.begin();
    batch.block_tables.insert(batch.block_tables.end(), pages, pages + pages_of(entry));
    batch.block_tables.resize(batch.context_lens.size() * static_cast<size_t>(max_pages), -1);
  }
}

// Marks the rows of each lane that need only the token of their largest logit.
void mark_largest_only(std::span<ForwardBatch> lanes, std::span<const SampleRow> rows) {
  size_t first_row = 0;
  for (ForwardBatch& batch : lanes) {
    const size_t count = batch.logit_rows.size();
    FATHOM_CHECK(first_row + count <= rows.size(), "{} sample rows", rows.size());
    for (size_t i = 0; i < count; ++i) {
      if (takes_largest(rows[first_row + i])) batch.largest_only.push_back(static_cast<int32_t>(i));
    }
    first_row += count;
  }
}

}  // namespace

std::span<const ForwardBatch> BatchBuilder::build(const StepPlan& plan,
                                                  std::span<const SampleRow> rows) {
  return build(plan, rows, [](const StepEntry& entry, ForwardBatch& batch) {
    add_rows(entry, batch);
    return true;
  });
}

std::span<const ForwardBatch> BatchBuilder::build_drafts(const StepPlan& plan,
                                                         std::span<const SampleRow> rows) {
  return build(plan, rows, [](const StepEntry& entry, ForwardBatch& batch) {
    if (!entry.has_draft_rows()) return false;
    add_draft_rows(entry, batch);
    return true;
  });
}

template <typename AddRows>
std::span<const ForwardBatch> BatchBuilder::build(const StepPlan& plan,
                                                  std::span<const SampleRow> rows,
                                                  const AddRows& add) {
  batches_.resize(plan.lane_ends.size());
  size_t begin = 0;
  for (size_t lane = 0; lane < batches_.size(); ++lane) {
    const size_t end = plan.lane_ends[lane];
    fill(std::span(plan.entries).subspan(begin, end - begin), add, batches_[lane]);
    begin = end;
  }
  mark_largest_only(batches_, rows);
  return batches_;
}

}  // namespace fathom
