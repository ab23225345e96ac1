// One step's work of one lane for a model, as flat arrays that a device copies unchanged.
//
// Rows are tokens; the tokens of one sequence are consecutive rows and consecutive positions. A
// sequence's row count is 1 in decode and the chunk's length in prefill; the two mix freely.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom {

// The most drafts of a sequence in a step. A page keeps the hidden states of its last kMaxDrafts +
// 1 tokens: the rows of a step with so many.
inline constexpr int64_t kMaxDrafts = 3;

struct ForwardBatch {
  // [rows]; below 0: the token sampled from logit row -1 - id of the previous step, counted over
  // all lanes, which a runner with several steps in flight knows before its caller does.
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;  // [rows]; the first token of a sequence has position 0

  std::vector<int32_t> query_start;   // [sequences + 1]: sequence s owns rows [s], [s + 1)
  std::vector<int32_t> context_lens;  // [sequences]: tokens in the cache before this step
  std::vector<int32_t> prompt_lens;   // [sequences]: later positions are the completion's
  std::vector<int32_t> block_tables;  // [sequences, max_pages]: page ids, -1 beyond the sequence's
  int32_t max_pages = 0;

  // [sequences]: how many of a sequence's last rows are drafts, tokens that may turn out not to be
  // in it, and how many of its first tokens have their final row in the MTP layer's cache.
  std::vector<int32_t> num_drafts, mtp_lens;

  std::vector<int32_t> logit_rows;  // rows that need logits, in ascending order
  // Indices in logit_rows, ascending, of those that need no more than the token of their largest
  // logit: a runner may find it without gathering a row that ranks have parts of.
  std::vector<int32_t> largest_only;

  int64_t num_rows() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_sequences() const { return static_cast<int64_t>(context_lens.size()); }
};

}  // namespace fathom
