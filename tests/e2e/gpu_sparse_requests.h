// The small model with sparse attention of GPU tests, requests around its threshold, and answers to
// compare.
#pragma once

#include <random>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "e2e/gpu_fixture.h"

namespace fathom {

// Random weights: 3 layers and an MTP layer, 16 heads, 64 index heads; rows choose 64 keys. It has
// the bundled model's vocabulary.
const Checkpoint& small_sparse_checkpoint();
// The same with GLM-5's heads and indexer: 192 + 64 and 256 values a head, 32 index heads, rotation
// of adjacent values.
const Checkpoint& small_glm_checkpoint();

// --deterministic with absorbed attention alone, so that a row has one form.
GpuRunnerOptions deterministic_sparse_options();

// Greedy. Half of the prompts begin alike; below and above the threshold.
std::vector<Request> requests_around_the_threshold(std::mt19937& random);

// Expects equal tokens and log-probabilities, to the bit.
void expect_same_answers(const std::vector<Answer>& actual, const std::vector<Answer>& expected);

// Expects `expected` twice from an engine of so many lanes with few pages: sequences are preempted,
// and pages go to host memory and come back.
void expect_same_when_crowded(GpuRunnerOptions options, EngineOptions engine, int lanes,
                              const std::vector<Request>& requests,
                              const std::vector<Answer>& expected);

}  // namespace fathom
