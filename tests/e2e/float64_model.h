// The DeepSeek-V3 decoder in float64, straight from its definition, with the weights that a dummy
// checkpoint has: what any way of computing it is measured by.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "ops/rope/rope.h"

namespace fathom {

class Float64Model {
 public:
  // A dummy of a model with query compression and a sigmoid gate, seed 0. Kept, not copied.
  // With quantised activations products of weights in e4m3 take x as quantize_rows.h makes it,
  // rounded to bf16 before; all else stays float64.
  explicit Float64Model(const Checkpoint& checkpoint, bool quantised_activations = false);

  // Of every token of one text, or of texts of a token each: [ids, vocab].
  std::vector<double> logits(const std::vector<int32_t>& ids, bool texts_of_one = false);

 private:
  using Rows = std::vector<double>;  // [tokens, …] dense

  Rows product(const std::string& name, const Rows& x, int64_t n, int64_t k) const;
  Rows norm(const std::string& name, const Rows& x, int64_t n, double eps) const;
  void rotate(double* values, int64_t position) const;
  Rows attention(const std::string& prefix, const Rows& x) const;
  Rows mlp(const std::string& prefix, const Rows& x, int64_t intermediate) const;
  Rows experts(const std::string& prefix, const Rows& x) const;
  // [tokens, experts]: 0 where an expert is not chosen.
  Rows expert_weights(const std::string& prefix, const Rows& x) const;

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const bool quantised_activations_;
  const std::vector<float> cos_sin_;
  int64_t tokens_ = 0;
  bool texts_of_one_ = false;
};

}  // namespace fathom
