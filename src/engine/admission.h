// Validates a caller's request and turns it into the engine's sequences. Runs on the caller's
// thread: a request that passes cannot fail later for a reason of its own.
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
  int64_t num_pages = 0;  // of each lane
  int num_lanes = 1;
  bool can_export = false;  // whether prompts can be computed for another engine
  std::vector<int32_t> eos_ids;
  const Tokenizer* tokenizer = nullptr;  // may be null; must outlive the sequences
};

// Refuses with kInvalidArgument a request that can never run: a parameter out of range, an id
// outside the vocabulary, more tokens than the context or the whole cache holds. `seed` is used
// where the request has none.
Result<std::unique_ptr<ActiveRequest>> make_active_request(Request request, EventSink sink,
                                                           const AdmissionLimits& limits,
                                                           uint64_t seed);

}  // namespace fathom
