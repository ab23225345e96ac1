// Answers of an engine against what a model in float32 on the CPU says of the same texts, token by
// token: each answer is given to it as it is, so that one that parts from another at a tie is held
// to the same bounds behind it. Every row counts for itself.
#pragma once

#include <vector>

#include "e2e/gpu_fixture.h"

namespace fathom {

// Of log-probabilities, in nats. `row`: how far one of any answer's may be off, and by how much the
// chosen token may be less likely than another. `mean`: of all rows.
struct ForcedLimits {
  double row = 0, mean = 0;
};

// The requests are greedy (or top_k 1), with one choice, logprobs and at most penalties of
// frequency and a bias. Answers are expected in full: of max_tokens, or ending with the end of
// sequence.
void expect_as_forced(const std::vector<Request>& requests, const std::vector<Answer>& answers,
                      const ForcedLimits& limits);

}  // namespace fathom
