// Executes steps: runs the model on a device and samples tokens from its logits.
//
// A runner has one lane or more: attention groups with a cache each, whose pages are numbered from
// 0. A step runs on all of them, one batch a lane; a lane without work has a batch of no rows.
//
// Called by the engine's thread only. The engine guarantees well-formed batches: token ids inside
// the vocabulary, positions below max_model_len(), pages below num_pages(), no cache row written
// twice, and in each lane at most EngineOptions::max_batched_tokens rows and at most max_num_seqs *
// (1 + drafts of each) + max_prompt_logit_rows logit rows.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "cache/page_transfer.h"
#include "device/stream.h"
#include "engine/expert_ranks.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"
#include "placement/expert_balancer.h"

namespace fathom {

class Runner {
 public:
  virtual ~Runner() = default;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t num_pages() const = 0;  // of each lane
  virtual int num_lanes() const { return 1; }

  // The number of context keys whose attention takes about as long as all other work on a row; 0:
  // the cost of context is not counted.
  virtual int64_t keys_worth_a_row() const { return 0; }

  // Whether a token's cache row is bitwise identical computed in prefill and in decode. Only then
  // may a prompt that continues a completion reuse its pages.
  virtual bool answers_equal_prompts() const { return true; }

  // The number of steps that may have begun before the first of them is finished: 2 for a device
  // that works while the host prepares the next step.
  virtual int max_steps_in_flight() const { return 1; }

  // The most drafts of a sequence in a step; 0: no drafts. draft() is called, and a step with
  // drafts begins and ends, with no other step in flight.
  virtual int64_t max_drafts() const { return 0; }

  // Drafts tokens for sequences that are about to take part in a step, num_lanes() batches of them.
  // A sequence's rows are its tokens from mtp_lens on, up to its newest; num_drafts, which may be
  // 0, says how many to draft, and only those with some have a logit row, their last. rows[i] says
  // how the step samples the token after the i-th logit row: a good draft is sampled alike. Returns
  // the drafts, sequence by sequence, valid until the next call; they are inside the vocabulary,
  // and nothing but speed depends on them. The step that begins next has each sequence's newest
  // token and any number of its drafts as rows.
  virtual Result<std::span<const int32_t>> draft(std::span<const ForwardBatch> /*lanes*/,
                                                 std::span<const SampleRow> /*rows*/) {
    return error(Code::kInternal, "this runner does not draft");
  }
  // One step of draft(): a token of each sequence. Batches, `states` and rows are those of
  // DraftSteps. Node 0 of several processes calls it on every node's runner. Returns the rows'
  // tokens, valid until the next call.
  virtual Result<std::span<const SampledToken>> draft_step(
      std::span<const ForwardBatch> /*lanes*/, std::span<const std::vector<int32_t>> /*states*/,
      std::span<const SampleRow> /*rows*/) {
    return error(Code::kInternal, "this runner does not draft step by step");
  }

  // Begins a step, with num_lanes() batches, at least one of which has rows. rows[i] says how to
  // sample from the i-th logit row, counted over all lanes in order. What the rows point to stays
  // valid until the step is finished; the batches do not. After an error the step has not begun.
  virtual Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) = 0;

  // Waits for the oldest step in flight and returns its rows' tokens, valid until the next
  // finish(). An error ends that step's sequences; the engine goes on with the others, unless the
  // runner is lost.
  virtual Result<std::span<const SampledToken>> finish() = 0;

  // Whether no step can succeed any more: the device is gone, or its context is corrupt. Queried
  // after an error of begin() or finish(). Once true it stays true, and the engine is dead.
  virtual bool is_lost() { return false; }
  // Why is_lost() is true.
  virtual Status loss() const { return {Code::kInternal, "the device is lost"}; }
  // A runner that can be lost while no step runs calls `wake` then, on any thread; `wake` does not
  // call the runner. Null: no more calls, and none is going on when this returns.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): overriders keep it
  virtual void watch_loss(std::function<void()> /*wake*/) {}

  // The transfer that offloads a lane's pages and loads them back; null: not supported. Lives as
  // long as the runner.
  virtual PageTransfer* page_transfer(int /*lane*/) { return nullptr; }

  // Whether copy_page() can copy between these lanes.
  virtual bool can_copy_pages(int /*from_lane*/, int /*to_lane*/) const { return false; }
  // Copies a page's rows into a page of another lane, which no step in flight uses: after the steps
  // begun so far, before those begun later.
  virtual void copy_page(int /*from_lane*/, int32_t /*from*/, int /*to_lane*/, int32_t /*to*/) {}

  // Experts' loads; none where tokens do not go to ranks of experts. Any thread may call.
  virtual std::optional<ExpertStats> expert_stats() const { return std::nullopt; }

  // Null where tokens do not go to ranks of experts. Lives as long as the runner.
  virtual ExpertRanks* expert_ranks() { return nullptr; }

  // Threads that the engine may use between two calls; null: it uses only its own.
  virtual const Stream* host_stream() const { return nullptr; }
};

}  // namespace fathom
