// Compares an engine's completions with a float32 model on the CPU, row by row. The model is given
// each completion as it is (teacher forcing), so a completion that diverges at a tie is held to the
// same bounds after it. Each row counts by itself.
#pragma once

#include <vector>

#include "e2e/gpu_fixture.h"

namespace fathom {

// Bounds in nats. `row`: the deviation of any one log-probability, and how much less likely the
// chosen token may be than another. `mean`: the mean deviation over all rows.
struct ForcedLimits {
  double row = 0, mean = 0;
};

// The requests are greedy (or top_k 1), with one choice, logprobs, and at most a frequency penalty
// and a bias. Completions must be complete: max_tokens long, or ended by the end of sequence.
void expect_as_forced(const std::vector<Request>& requests, const std::vector<Answer>& answers,
                      const ForcedLimits& limits);

}  // namespace fathom
