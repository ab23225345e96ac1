// Source: DeepSeek-V2 (2024, section 2.1.2), DeepSeek-V3 (2024, section 2.1.2) and the published
// model code of both for the order of masking, normalising and scaling.
#include "ops/gate/gate_cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/math_constants.h"

namespace fathom::cpu {
namespace {

// Below this many logits a parallel region (0.5 to 1 us) costs more than it saves.
constexpr int64_t kParallelLogits = 512;

// Scratch of one thread, reused for each row.
struct Scratch {
  std::vector<float> scores;        // [experts] for the weights
  std::vector<float> choice;        // [experts] for the selection
  std::vector<float> group_scores;  // [groups]
  std::vector<char> excluded;       // [experts] already selected, or in a dropped group
  std::vector<char> group_kept;     // [groups]
};

// Index of the largest value that is not excluded; the lowest index of equals. A NaN counts as any
// other value: the result is always an index.
int64_t largest(const std::vector<float>& values, const std::vector<char>& excluded) {
  int64_t best = -1;
  for (size_t i = 0; i < values.size(); ++i) {
    if (excluded[i]) continue;
    if (best < 0 || values[i] > values[static_cast<size_t>(best)]) best = static_cast<int64_t>(i);
  }
  return best;
}

void softmax(const float* logits, std::vector<float>& p) {
  const float max = *std::max_element(logits, logits + p.size());
  float sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(logits[i] - max);
  for (float& value : p) value /= sum;
}

// V2: a group's score is that of its best expert. V3: the sum of its best two.
void score_groups(const GateOptions& options, Scratch& scratch) {
  const size_t size = scratch.choice.size() / scratch.group_scores.size();
  for (size_t group = 0; group < scratch.group_scores.size(); ++group) {
    float first = kNegativeInfinity;
    float second = kNegativeInfinity;
    for (size_t i = group * size; i < (group + 1) * size; ++i) {
      const float value = scratch.choice[i];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    scratch.group_scores[group] =
        options.scoring == GateScoring::kSigmoidBias ? first + second : first;
  }
}

void drop_groups(const GateOptions& options, Scratch& scratch) {
  score_groups(options, scratch);
  std::ranges::fill(scratch.group_kept, 0);
  for (int64_t i = 0; i < options.groups_per_token; ++i) {
    scratch.group_kept[static_cast<size_t>(largest(scratch.group_scores, scratch.group_kept))] = 1;
  }
  const size_t size = scratch.choice.size() / scratch.group_scores.size();
  for (size_t i = 0; i < scratch.choice.size(); ++i) {
    if (scratch.group_kept[i / size]) continue;
    if (options.scoring == GateScoring::kSigmoidBias) {
      scratch.excluded[i] = 1;  // -inf: never selected
    } else {
      scratch.choice[i] = scratch.scores[i] = 0;  // V2 keeps them as candidates, with score 0
    }
  }
}

void weigh(const GateOptions& options, const Scratch& scratch, const int32_t* ids, float* weights) {
  const int64_t k = options.experts_per_token;
  const bool sigmoid = options.scoring == GateScoring::kSigmoidBias;
  float sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    sum += weights[i] = scratch.scores[static_cast<size_t>(ids[i])];
  }
  // V2's code normalises only for k > 1, and does not scale then.
  const bool normalize = options.normalize && (sigmoid || k > 1);
  const float scale = normalize && !sigmoid ? 1.0f : options.scaling;
  for (int64_t i = 0; i < k; ++i) {
    if (normalize) weights[i] /= sum + 1e-20f;
    weights[i] *= scale;
  }
}

void gate_row(const float* logits, const float* bias, const GateOptions& options, Scratch& scratch,
              int32_t* ids, float* weights) {
  const size_t experts = scratch.scores.size();
  std::ranges::fill(scratch.excluded, 0);
  if (options.scoring == GateScoring::kSigmoidBias) {
    for (size_t i = 0; i < experts; ++i) {
      scratch.scores[i] = 1 / (1 + std::exp(-logits[i]));
      scratch.choice[i] = scratch.scores[i] + bias[i];
    }
  } else {
    softmax(logits, scratch.scores);
    scratch.choice = scratch.scores;
  }
  if (scratch.group_scores.size() > 1) drop_groups(options, scratch);
  for (int64_t i = 0; i < options.experts_per_token; ++i) {
    const int64_t expert = largest(scratch.choice, scratch.excluded);
    scratch.excluded[static_cast<size_t>(expert)] = 1;
    ids[i] = static_cast<int32_t>(expert);
  }
  weigh(options, scratch, ids, weights);
}

}  // namespace

void gate(ThreadPool& pool, ConstTensorView logits, ConstTensorView bias,
          const GateOptions& options, TensorView expert_ids, TensorView expert_weights) {
  const int64_t experts = logits.size(1);
  const bool grouped = options.scoring != GateScoring::kSoftmaxGreedy;
  const int64_t groups = grouped ? options.num_groups : 1;
  const float* bias_values =
      options.scoring == GateScoring::kSigmoidBias ? bias.data<float>() : nullptr;
  const int64_t grain = std::max<int64_t>(1, kParallelLogits / experts);
  pool.parallel_for(logits.size(0), grain, [&](int64_t begin, int64_t end) {
    const auto count = static_cast<size_t>(experts);
    const auto group_count = static_cast<size_t>(groups);
    Scratch scratch{std::vector<float>(count), std::vector<float>(count),
                    std::vector<float>(group_count), std::vector<char>(count),
                    std::vector<char>(group_count)};
    for (int64_t row = begin; row < end; ++row) {
      gate_row(logits.row<float>(row), bias_values, options, scratch, expert_ids.row<int32_t>(row),
               expert_weights.row<float>(row));
    }
  });
}

}  // namespace fathom::cpu
