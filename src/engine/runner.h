// Executes steps: runs the model on a device and samples tokens from its logits.
//
// Called by the engine's thread only. The engine guarantees well-formed batches: token ids inside
// the vocabulary, positions below max_model_len(), pages below num_pages(), no cache row written
// twice, at most EngineOptions::max_batched_tokens rows and at most max_num_seqs +
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

  // The number of context keys whose attention takes about as long as all other work on a row; 0:
  // the cost of context is not counted.
  virtual int64_t keys_worth_a_row() const { return 0; }

  // Whether a token's cache row is bitwise identical computed in prefill and in decode. Only then
  // may a prompt that continues a completion reuse its pages.
  virtual bool answers_equal_prompts() const { return true; }

  // The number of steps that may have begun before the first of them is finished: 2 for a device
  // that works while the host prepares the next step.
  virtual int max_steps_in_flight() const { return 1; }

  // Begins a step: rows[i] says how to sample from the logits of batch.logit_rows[i]. What the rows
  // point to stays valid until the step is finished; the batch does not. After an error the step
  // has not begun.
  virtual Result<> begin(const ForwardBatch& batch, std::span<const SampleRow> rows) = 0;

  // Waits for the oldest step in flight and returns its rows' tokens, valid until the next
  // finish(). An error ends that step's sequences; the engine goes on with the others, unless the
  // runner is lost.
  virtual Result<std::span<const SampledToken>> finish() = 0;

  // Whether no step can succeed any more: the device is gone, or its context is corrupt. Queried
  // after an error of begin() or finish(). Once true it stays true, and the engine is dead.
  virtual bool is_lost() { return false; }

  // The transfer that offloads pages and loads them back; null: not supported. Lives as long as the
  // runner.
  virtual PageTransfer* page_transfer() { return nullptr; }

  // Threads that the engine may use between two calls; null: it uses only its own.
  virtual const Stream* host_stream() const { return nullptr; }
};

}  // namespace fathom
