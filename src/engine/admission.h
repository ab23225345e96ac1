// The checks between a caller's request and the engine, and the sequences that it becomes. On the
// caller's thread: what passes here cannot fail for a reason of its own later.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/sequence.h"

namespace fathom {

class Tokenizer;

struct AdmissionLimits {
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;
  int64_t num_pages = 0;
  std::vector<int32_t> eos_ids;
  const Tokenizer* tokenizer = nullptr;  // may be null; outlives the sequences
};

// Refuses with kInvalidArgument what can never run: a parameter out of range, an id outside the
// vocabulary, more tokens than the context or the whole cache holds.
// `seed` is what an unseeded request uses.
Result<std::unique_ptr<ActiveRequest>> make_active_request(Request request, EventSink sink,
                                                           const AdmissionLimits& limits,
                                                           uint64_t seed);

}  // namespace fathom
