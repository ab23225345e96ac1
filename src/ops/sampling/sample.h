// One row of logits to one token: a pure function of the row, the options, the tokens before it,
// the seed and the position, so that a sequence's tokens do not depend on what it is batched with.
//
// In this order: logit bias; penalties (repetition over prompt and output; frequency and presence
// over the output only); masked and not allowed ids; then, over logits / temperature, top-k, top-p
// and min-p, each on what the one before left; then one draw. Ties at the border of top-k and top-p
// go to the lower id, so top-k keeps exactly k. The draw takes the kept token with the largest
// logit / temperature + noise, the noise a function of (seed, stream, position, token) alone
// (gumbel_noise.h): what is kept does not change who wins among those that are. With a temperature
// below 1e-5 the largest logit wins. Among equals it is the lowest id.
//
// Log-probabilities are log-softmax of the row as it came, before all of this.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "ops/sampling/token_history.h"
#include "tensor/tensor_view.h"

namespace fathom {

inline constexpr double kGreedyTemperature = 1e-5;

// Options that stay the same for all tokens of a sequence. Values are in range, ids inside the
// vocabulary.
struct SampleOptions {
  double temperature = 1;
  double top_p = 1;   // 1: all
  double min_p = 0;   // 0: all
  int64_t top_k = 0;  // <= 0: all
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  std::vector<std::pair<int32_t, float>> logit_bias = {};
  uint64_t seed = 0;
  uint64_t stream = 0;  // index among the choices that share the seed

  bool has_penalties() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
};

// Inputs that differ from token to token. Owns nothing.
struct SampleRow {
  int64_t row = 0;                         // index of the logits
  const SampleOptions* options = nullptr;  // needed unless the token is given
  const TokenHistory* history = nullptr;   // needed with penalties
  std::span<const int32_t> masked = {};    // ids that must not be chosen
  // Mask of allowed ids: bit id % 32 of word id / 32; ids beyond the words are not allowed. Empty:
  // all are.
  std::span<const uint32_t> allowed = {};
  uint64_t position = 0;  // of the new token in its sequence
  int num_logprobs = -1;  // -1: no log-probability; else so many alternatives
  int32_t given_id = -1;  // >= 0: fixed token; only its log-probability is computed
};

struct SampledToken {
  int32_t id = -1;  // -1: the row has no finite logit left
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top =
      {};  // alternatives, descending, ties by ascending id
};

// Scratch memory of sampling; grows to the vocabulary's size and is then reused.
struct SampleScratch {
  struct Candidate {
    float logit;
    int32_t id;
  };
  std::vector<float> logits;  // a changed copy of the row
  std::vector<float> maxima, selected_maxima;
  std::vector<uint64_t> sums;
  std::vector<Candidate> candidates;
};

// Whether sampling takes the token of the row's largest logit, and nothing else of it.
bool takes_largest(const SampleRow& row);

// The largest logit and the lowest id that has it. NaN counts as -infinity; id < 0: all are that. A
// whole row with an infinite largest logit has no token.
struct LargestLogit {
  float value = 0;
  int32_t id = -1;
};
LargestLogit largest_logit(std::span<const float> logits, SampleScratch& scratch);

// Overwrites `out`; its memory is reused.
void sample(std::span<const float> logits, const SampleRow& row, SampleScratch& scratch,
            SampledToken& out);

// The token that sample() draws where no bias, penalty, mask or filter matters: what a drafter with
// logits of its own proposes for that draw. Only the temperature, the seed and the stream of the
// options count. -1: no finite logit.
int32_t draft_token(std::span<const float> logits, const SampleOptions& options, uint64_t position,
                    SampleScratch& scratch);

// All rows: out[i] for rows[i]. logits [n, vocab] f32. Uses the stream's threads, if it has any and
// the work is large enough; scratch is resized to one for each thread.
void sample_rows(const Stream* stream, ConstTensorView logits, std::span<const SampleRow> rows,
                 std::vector<SampleScratch>& scratch, std::span<SampledToken> out);

}  // namespace fathom
