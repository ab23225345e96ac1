#include "engine/step_check.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

// 0 <= value < end.
Result<> check_below(std::string_view what, int64_t value, int64_t end) {
  if (value >= 0 && value < end) return {};
  return invalid("{} is {}, must be at least 0 and below {}", what, value, end);
}

Result<> check_size(std::string_view what, size_t size, int64_t wanted) {
  if (std::cmp_equal(size, wanted)) return {};
  return invalid("{} has {} entries, must have {}", what, size, wanted);
}

Result<> check_ids(std::string_view what, std::span<const int32_t> ids, int64_t end) {
  for (const int32_t id : ids) FATHOM_RETURN_IF_ERROR(check_below(what, id, end));
  return {};
}

Result<> check_sequence(const ForwardBatch& batch, size_t s, const StepBounds& bounds) {
  const int64_t first = batch.query_start[s], end = batch.query_start[s + 1];
  if (first >= end || end > batch.num_rows()) {
    return invalid("query_start goes from {} to {} of {} rows", first, end, batch.num_rows());
  }
  const int64_t context = batch.context_lens[s], length = context + end - first;
  if (context < 0 || length > bounds.max_model_len) {
    return invalid("a sequence has {} tokens after {}, at most {} in all", end - first, context,
                   bounds.max_model_len);
  }
  for (int64_t row = first; row < end; ++row) {
    const int64_t position = batch.positions[static_cast<size_t>(row)];
    if (position == context + row - first) continue;
    return invalid("row {} has position {}, must be {}", row, position, context + row - first);
  }
  const int64_t pages = ceil_div(length, kPageSize);
  if (pages > batch.max_pages) {
    return invalid("a sequence of {} tokens has {} pages", length, batch.max_pages);
  }
  const auto table = std::span(batch.block_tables)
                         .subspan(s * static_cast<size_t>(batch.max_pages))
                         .first(static_cast<size_t>(pages));
  return check_ids("a page", table, bounds.num_pages);
}

// What only a model with an MTP layer reads.
Result<> check_drafts(const ForwardBatch& batch, const StepBounds& bounds) {
  FATHOM_RETURN_IF_ERROR(check_size("num_drafts", batch.num_drafts.size(), batch.num_sequences()));
  FATHOM_RETURN_IF_ERROR(check_size("mtp_lens", batch.mtp_lens.size(), batch.num_sequences()));
  for (size_t s = 0; s < batch.num_drafts.size(); ++s) {
    const int64_t rows = batch.query_start[s + 1] - batch.query_start[s];
    FATHOM_RETURN_IF_ERROR(
        check_below("num_drafts", batch.num_drafts[s], std::min(rows, bounds.max_drafts + 1)));
    if (batch.mtp_lens[s] < batch.context_lens[s]) {
      return invalid("mtp_lens is {}, must be at least context_lens, {}", batch.mtp_lens[s],
                     batch.context_lens[s]);
    }
  }
  return {};
}

Result<> check_states(const ForwardBatch& batch, std::span<const int32_t> states,
                      int64_t num_before, const StepBounds& bounds) {
  if (bounds.max_drafts == 0) return invalid("a step drafts, and no MTP layer is loaded");
  if (states.empty()) {
    for (const int32_t context : batch.context_lens) {
      if (context < 1) return invalid("a draft follows a sequence's first token");
    }
    return {};
  }
  const int64_t rows = batch.num_rows();
  FATHOM_RETURN_IF_ERROR(check_size("states", states.size(), rows));
  FATHOM_RETURN_IF_ERROR(check_size("context_lens of drafts", batch.context_lens.size(), rows));
  FATHOM_RETURN_IF_ERROR(check_size("logit_rows of drafts", batch.logit_rows.size(), rows));
  return check_ids("a state", states, num_before);
}

Result<> check_arrays(const ForwardBatch& batch, const StepBounds& bounds) {
  const int64_t rows = batch.num_rows(), sequences = batch.num_sequences();
  if (rows > bounds.max_rows)
    return invalid("there are {} rows, at most {}", rows, bounds.max_rows);
  FATHOM_RETURN_IF_ERROR(check_ids("a token", batch.token_ids, bounds.vocab_size));
  FATHOM_RETURN_IF_ERROR(check_size("positions", batch.positions.size(), rows));
  FATHOM_RETURN_IF_ERROR(check_size("query_start", batch.query_start.size(), sequences + 1));
  FATHOM_RETURN_IF_ERROR(check_size("prompt_lens", batch.prompt_lens.size(), sequences));
  FATHOM_RETURN_IF_ERROR(check_below("max_pages", batch.max_pages, bounds.num_pages + 1));
  FATHOM_RETURN_IF_ERROR(
      check_size("block_tables", batch.block_tables.size(), sequences * batch.max_pages));
  if (batch.query_start.front() != 0 || batch.query_start.back() != rows) {
    return invalid("query_start goes from {} to {} of {} rows", batch.query_start.front(),
                   batch.query_start.back(), rows);
  }
  for (size_t s = 0; s < static_cast<size_t>(sequences); ++s) {
    FATHOM_RETURN_IF_ERROR(check_sequence(batch, s, bounds));
  }
  int64_t last = -1;
  for (const int32_t row : batch.logit_rows) {
    if (row <= last || row >= rows) {
      return invalid("logit row {} after {}, must ascend and be below {}", row, last, rows);
    }
    last = row;
  }
  last = -1;
  for (const int32_t i : batch.largest_only) {
    if (i <= last || std::cmp_greater_equal(i, batch.logit_rows.size())) {
      return invalid("index {} of largest_only after {}, must ascend and be below {}", i, last,
                     batch.logit_rows.size());
    }
    last = i;
  }
  return {};
}

Result<> of_lane(int lane, const Result<>& checked) {
  if (checked) return {};
  return with_context(fmt::format("lane {}: ", lane), checked.error());
}

Result<> check_row(const SampleRow& row, const StepBounds& bounds) {
  const int64_t vocab = bounds.vocab_size;
  if (row.given_id >= 0) {
    FATHOM_RETURN_IF_ERROR(check_below("given_id", row.given_id, vocab));
  } else if (row.options == nullptr) {
    return invalid("a row has neither options nor a given token");
  }
  if (row.num_logprobs < -1 || row.num_logprobs > vocab) {
    return invalid("num_logprobs is {}, must be -1 to {}", row.num_logprobs, vocab);
  }
  FATHOM_RETURN_IF_ERROR(check_ids("a masked token", row.masked, vocab));
  if (std::cmp_greater(row.allowed.size(), ceil_div(vocab, int64_t{32}))) {
    return invalid("a mask has {} words for a vocabulary of {}", row.allowed.size(), vocab);
  }
  if (row.options == nullptr) return {};
  const SampleOptions& options = *row.options;
  for (const double number :
       {options.temperature, options.top_p, options.min_p, options.repetition_penalty,
        options.presence_penalty, options.frequency_penalty}) {
    if (!std::isfinite(number)) return invalid("a sampling option is {}", number);
  }
  if (options.temperature < 0 || options.repetition_penalty <= 0) {
    return invalid("temperature is {}, repetition_penalty {}, must be at least and above 0",
                   options.temperature, options.repetition_penalty);
  }
  for (const auto& [id, bias] : options.logit_bias) {
    FATHOM_RETURN_IF_ERROR(check_below("a biased token", id, vocab));
  }
  if (options.has_penalties() && row.history == nullptr) {
    return invalid("a row has penalties and no history");
  }
  if (row.history == nullptr) return {};
  for (const SeenToken& seen : row.history->entries()) {
    FATHOM_RETURN_IF_ERROR(check_below("a token of the history", seen.id, vocab));
  }
  return {};
}

}  // namespace

Result<> check_batch(const ForwardBatch& batch, int lane, const StepBounds& bounds) {
  auto checked = check_arrays(batch, bounds);
  if (checked && bounds.max_drafts > 0) checked = check_drafts(batch, bounds);
  return of_lane(lane, checked);
}

Result<> check_draft_batch(const ForwardBatch& batch, std::span<const int32_t> states,
                           int64_t num_before, int lane, const StepBounds& bounds) {
  auto checked = check_arrays(batch, bounds);
  if (checked) checked = check_states(batch, states, num_before, bounds);
  return of_lane(lane, checked);
}

Result<> check_rows(std::span<const SampleRow> rows, int64_t num_logits, const StepBounds& bounds) {
  if (std::cmp_not_equal(rows.size(), num_logits)) {
    return invalid("{} logit rows have {} sample rows", num_logits, rows.size());
  }
  for (const SampleRow& row : rows) FATHOM_RETURN_IF_ERROR(check_row(row, bounds));
  return {};
}

}  // namespace fathom
