// What executes steps: the model on a device, and the choice of tokens from its logits.
//
// Called by the engine's thread only. The engine guarantees well-formed batches: token ids inside
// the vocabulary, positions below max_model_len(), pages below num_pages(), no row of the cache
// written twice, at most EngineOptions::max_batched_tokens rows and at most max_num_seqs +
// max_prompt_logit_rows logit rows.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "cache/page_transfer.h"
#include "device/stream.h"
#include "model/forward_batch.h"
#include "ops/sampling/sample.h"

namespace fathom {

class Runner {
 public:
  virtual ~Runner() = default;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t num_pages() const = 0;

  // Keys of context whose attention takes a row about as long as everything else; 0: context costs
  // nothing.
  virtual int64_t keys_worth_a_row() const { return 0; }

  // Whether a token's row in the cache is the same in a prompt and in an answer: only then may a
  // prompt that goes on from an answer take its pages.
  virtual bool answers_equal_prompts() const { return true; }

  // Steps that may have begun before the first of them is finished: 2 for a device that works while
  // the host prepares what comes next.
  virtual int max_steps_in_flight() const { return 1; }

  // Begins a step: rows[i] says what is to be chosen from the logits of batch.logit_rows[i]. What
  // the rows point to stays until the step is finished; the batch does not. An error means that the
  // step has not begun.
  virtual Result<> begin(const ForwardBatch& batch, std::span<const SampleRow> rows) = 0;

  // Waits for the oldest step that has begun: its rows' tokens, valid until the next call of
  // finish(). An error ends the sequences of that step; the engine goes on with the others, unless
  // the runner is lost.
  virtual Result<std::span<const SampledToken>> finish() = 0;

  // Whether no step can succeed any more: the device is gone, or its context is corrupt. Asked
  // after an error of begin() or finish(); once true it stays so, and the engine is dead.
  virtual bool is_lost() { return false; }

  // How pages leave its pool and come back; null: they cannot. Lives as long as the runner.
  virtual PageTransfer* page_transfer() { return nullptr; }

  // Threads that the engine may use between two calls; none: it stays on its own.
  virtual const Stream* host_stream() const { return nullptr; }
};

}  // namespace fathom
