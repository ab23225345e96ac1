#include "engine/draft_steps.h"

#include <algorithm>

#include "base/check.h"

namespace fathom {

void DraftSteps::start(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) {
  lanes_.assign(lanes.begin(), lanes.end());
  states_.resize(lanes.size());
  for (auto& states : states_) states.clear();
  rows_.assign(rows.begin(), rows.end());
  drafting_.clear();
  size_t total = 0;
  for (const ForwardBatch& lane : lanes) {
    for (const int32_t wanted : lane.num_drafts) {
      if (wanted > 0) drafting_.push_back({total, wanted});
      total += static_cast<size_t>(wanted);
    }
  }
  FATHOM_CHECK(drafting_.size() == rows.size(), "{} sequences to draft for, {} rows",
               drafting_.size(), rows.size());
  drafts_.assign(total, 0);
  num_steps_ = num_known_ = 0;
}

bool DraftSteps::has_work() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const ForwardBatch& lane) { return lane.num_rows() > 0; });
}

// A row without a token has no finite logit; any id will do.
int32_t DraftSteps::known_id(const SampledToken& token) { return std::max(0, token.id); }

void DraftSteps::advance(std::span<const SampledToken> tokens) {
  advance_with([&](size_t i) { return known_id(tokens[i]); });
  add_tokens(tokens);
}

void DraftSteps::advance() {
  advance_with([](size_t i) { return -1 - static_cast<int32_t>(i); });
}

void DraftSteps::add_tokens(std::span<const SampledToken> tokens) {
  FATHOM_CHECK(num_known_ < num_steps_ && steps_[num_known_].size() == tokens.size(),
               "{} tokens for draft step {} of {}", tokens.size(), num_known_, num_steps_);
  const std::vector<Drafting>& rows = steps_[num_known_++];
  for (size_t i = 0; i < rows.size(); ++i) drafts_[rows[i].place] = known_id(tokens[i]);
}

template <typename IdOf>
void DraftSteps::advance_with(const IdOf& id_of) {
  FATHOM_CHECK(num_steps_ < steps_.size(), "more than {} draft steps", steps_.size());
  steps_[num_steps_++] = drafting_;
  next_lanes_.resize(lanes_.size());
  next_rows_.clear();
  next_drafting_.clear();
  size_t first = 0;
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    const size_t count = lanes_[lane].logit_rows.size();
    build_next(lanes_[lane], std::span(drafting_).subspan(first, count), first, id_of, lane);
    first += count;
  }
  lanes_.swap(next_lanes_);
  rows_.swap(next_rows_);
  drafting_.swap(next_drafting_);
}

// Makes next_lanes_[number] of the lane with this number, whose logit rows begin at `first`.
template <typename IdOf>
void DraftSteps::build_next(const ForwardBatch& lane, std::span<const Drafting> drafting,
                            size_t first, const IdOf& id_of, size_t number) {
  ForwardBatch& next = next_lanes_[number];
  next = {};
  next.query_start.push_back(0);
  next.max_pages = lane.max_pages;
  states_[number].clear();
  size_t sequence = 0;
  for (size_t i = 0; i < drafting.size(); ++i) {
    const int32_t row = lane.logit_rows[i];
    while (lane.query_start[sequence + 1] <= row) ++sequence;
    if (drafting[i].left == 1) continue;
    const auto at = static_cast<int32_t>(next.token_ids.size());
    const int32_t position = lane.positions[static_cast<size_t>(row)] + 1;
    next.token_ids.push_back(id_of(first + i));
    next.positions.push_back(position);
    next.query_start.push_back(at + 1);
    next.context_lens.push_back(position);
    next.prompt_lens.push_back(lane.prompt_lens[sequence]);
    next.logit_rows.push_back(at);
    const auto pages =
        lane.block_tables.begin() + static_cast<std::ptrdiff_t>(sequence) * lane.max_pages;
    next.block_tables.insert(next.block_tables.end(), pages, pages + lane.max_pages);
    states_[number].push_back(static_cast<int32_t>(i));
    SampleRow sample_row = rows_[first + i];
    sample_row.row = std::ssize(next_rows_);
    ++sample_row.position;
    if (takes_largest(sample_row)) next.largest_only.push_back(at);
    next_rows_.push_back(sample_row);
    next_drafting_.push_back({drafting[i].place + 1, drafting[i].left - 1});
  }
}

}  // namespace fathom
