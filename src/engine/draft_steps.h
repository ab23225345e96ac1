// The steps in which one MTP layer drafts several tokens of each sequence: the first over the
// sequences' known tokens, each later one over the drafts of the one before.
//
// Keeps its memory from step to step. Engine thread only.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"

namespace fathom {

class DraftSteps {
 public:
  // Batches and rows as Runner::draft() gets them.
  void start(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows);

  // Whether there is a step to compute.
  bool has_work() const;
  std::span<const ForwardBatch> lanes() const { return lanes_; }
  // [lanes][rows]: empty in the first step; later each row's index among its lane's logit rows of
  // the step before.
  std::span<const std::vector<int32_t>> states() const { return states_; }
  // How the step's logit rows are sampled.
  std::span<const SampleRow> rows() const { return rows_; }

  // The tokens of rows() are known. The next step is that of the sequences that want more.
  void advance(std::span<const SampledToken> tokens);
  // The same before they are known: the next step names them by their rows, as
  // ForwardBatch::token_ids has them. add_tokens() gets them, step by step.
  void advance();
  void add_tokens(std::span<const SampledToken> tokens);

  // Sequence by sequence.
  std::span<const int32_t> drafts() const { return drafts_; }

  // Runs all steps, as Runner::draft(). compute(lanes, states, rows) returns the tokens of one.
  template <typename Compute>
  Result<std::span<const int32_t>> run(std::span<const ForwardBatch> lanes,
                                       std::span<const SampleRow> rows, const Compute& compute) {
    start(lanes, rows);
    while (has_work()) {
      FATHOM_TRY(const auto tokens, compute(lanes_, states_, rows_));
      advance(tokens);
    }
    return std::span<const int32_t>(drafts_);
  }

 private:
  // A sequence with drafts, in the order of its logit row.
  struct Drafting {
    size_t place = 0;  // of its next draft among all
    int32_t left = 0;  // drafts that it wants, with the current step's
  };

  static int32_t known_id(const SampledToken& token);
  // id_of(i): of the i-th of rows().
  template <typename IdOf>
  void advance_with(const IdOf& id_of);
  template <typename IdOf>
  void build_next(const ForwardBatch& lane, std::span<const Drafting> drafting, size_t first,
                  const IdOf& id_of, size_t number);

  std::vector<ForwardBatch> lanes_, next_lanes_;
  std::vector<std::vector<int32_t>> states_;
  std::vector<SampleRow> rows_, next_rows_;
  std::vector<Drafting> drafting_, next_drafting_;  // [rows_]
  // Those of the steps that have been advanced over; the first num_known_ of these have tokens.
  std::array<std::vector<Drafting>, kMaxDrafts> steps_;
  size_t num_steps_ = 0, num_known_ = 0;
  std::vector<int32_t> drafts_;
};

}  // namespace fathom
