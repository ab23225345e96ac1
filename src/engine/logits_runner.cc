#include "engine/logits_runner.h"

#include <algorithm>

#include "base/check.h"

namespace fathom {

LogitsRunner::LogitsRunner(int max_steps_in_flight)
    : results_(static_cast<size_t>(max_steps_in_flight)) {}

Result<> LogitsRunner::begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) {
  FATHOM_CHECK(begun_ - finished_ < std::ssize(results_), "{} steps in flight", begun_ - finished_);
  FATHOM_TRY(const ConstTensorView logits, forward(with_known_tokens(lanes)));
  Results& step = results(begun_);
  if (step.tokens.size() < rows.size()) step.tokens.resize(rows.size());
  step.count = rows.size();
  if (!rows.empty()) {
    sample(logits, rows, std::span(step.tokens).first(step.count));
  }
  ++begun_;
  return {};
}

Result<std::span<const int32_t>> LogitsRunner::draft(std::span<const ForwardBatch> lanes,
                                                     std::span<const SampleRow> rows) {
  return draft_steps_.run(lanes, rows, [&](const auto&... step) { return draft_step(step...); });
}

Result<std::span<const SampledToken>> LogitsRunner::draft_step(
    std::span<const ForwardBatch> lanes, std::span<const std::vector<int32_t>> states,
    std::span<const SampleRow> rows) {
  FATHOM_TRY(const ConstTensorView logits, draft_logits(lanes, states));
  if (draft_tokens_.size() < rows.size()) draft_tokens_.resize(rows.size());
  const std::span<SampledToken> tokens = std::span(draft_tokens_).first(rows.size());
  if (!rows.empty()) sample(logits, rows, tokens);
  return std::span<const SampledToken>(tokens);
}

void LogitsRunner::sample(ConstTensorView logits, std::span<const SampleRow> rows,
                          std::span<SampledToken> tokens) {
  FATHOM_CHECK(logits.rank() == 2 && logits.size(0) == std::ssize(rows),
               "{} rows of logits wanted, there are {}", rows.size(), logits.shape_string());
  if (found_tokens().empty()) {
    sample_rows(host_stream(), logits, rows, scratch_, tokens);
  } else {
    sample_rest(logits, rows, tokens);
  }
}

void LogitsRunner::sample_rest(ConstTensorView logits, std::span<const SampleRow> rows,
                               std::span<SampledToken> tokens) {
  const std::span<const int32_t> found = found_tokens();
  FATHOM_CHECK(found.size() == rows.size(), "{} found tokens of {}", found.size(), rows.size());
  rest_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (found[i] == kFromLogits) {
      rest_.push_back(rows[i]);
      continue;
    }
    tokens[i].id = found[i];
    tokens[i].logprob = 0;
    tokens[i].top.clear();
  }
  if (rest_tokens_.size() < rest_.size()) rest_tokens_.resize(rest_.size());
  sample_rows(host_stream(), logits, rest_, scratch_, std::span(rest_tokens_).first(rest_.size()));
  size_t next = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (found[i] == kFromLogits) std::swap(tokens[i], rest_tokens_[next++]);
  }
}

Result<std::span<const SampledToken>> LogitsRunner::finish() {
  FATHOM_CHECK(finished_ < begun_, "no step has begun");
  const Results& step = results(finished_++);
  return std::span<const SampledToken>(step.tokens).first(step.count);
}

std::span<const ForwardBatch> LogitsRunner::with_known_tokens(std::span<const ForwardBatch> lanes) {
  const auto is_unknown = [](int32_t id) { return id < 0; };
  const auto has_unknown = [&](const ForwardBatch& batch) {
    return std::any_of(batch.token_ids.begin(), batch.token_ids.end(), is_unknown);
  };
  if (std::none_of(lanes.begin(), lanes.end(), has_unknown)) return lanes;
  known_.assign(lanes.begin(), lanes.end());
  const Results& before = results(begun_ - 1);
  for (ForwardBatch& batch : known_) {
    for (int32_t& id : batch.token_ids) {
      if (!is_unknown(id)) continue;
      // A row without a token (-1) ends its sequence, so any valid id will do.
      id = std::max(0, before.tokens[static_cast<size_t>(-1 - id)].id);
    }
  }
  return known_;
}

}  // namespace fathom
