// Which experts the tokens of a test or a benchmark of MoE have.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom {

enum class Routing {
  kUniform,  // each set of experts equally likely
  kEven,     // experts in turn: each has the same number of tokens, or one more
  kZipf,     // the i-th most popular of the experts has a weight of 1 / i; in a random order
};

// [rows, experts_per_token] ids below num_experts, distinct within a row. kZipf draws them one
// after another without replacement. The same in every run for a seed.
std::vector<int32_t> draw_experts(Routing routing, int32_t num_experts, int32_t experts_per_token,
                                  int32_t rows, uint32_t seed);

// What --routing uniform|zipf among a benchmark's arguments says, kUniform without it. Ends the
// program with a sentence if it says anything else.
Routing routing_flag(int argc, char** argv);

}  // namespace fathom
