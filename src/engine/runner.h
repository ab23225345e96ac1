// What executes a step: the model on a device.
//
// One call at a time, on the engine's thread. The engine guarantees well-formed batches: token ids
// inside the vocabulary, positions below max_model_len(), pages below num_pages(), no row of the
// cache written twice, at most EngineOptions::max_batched_tokens rows and at most max_num_seqs +
// max_prompt_logit_rows logit rows.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "cache/page_transfer.h"
#include "device/stream.h"
#include "model/forward_batch.h"
#include "tensor/tensor_view.h"

namespace fathom {

class Runner {
 public:
  virtual ~Runner() = default;

  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_model_len() const = 0;
  virtual int64_t num_pages() const = 0;

  // Logits [logit_rows, vocab] f32 on the host, row i for batch.logit_rows[i]; valid until the next
  // call. An error ends the sequences of this batch; the engine goes on with the others.
  virtual Result<ConstTensorView> forward(const ForwardBatch& batch) = 0;

  // How pages leave its pool and come back; null: they cannot. Lives as long as the runner.
  virtual PageTransfer* page_transfer() { return nullptr; }

  // Threads that sampling may use between two forward() calls; none: it stays on the engine's.
  virtual const Stream* sampling_stream() const { return nullptr; }
};

}  // namespace fathom
