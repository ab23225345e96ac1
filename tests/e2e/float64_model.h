// The decoder of DeepSeek-V3 and V2-Lite in float64, implemented directly from its definition, with
// a dummy checkpoint's weights. The reference for other implementations.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "ops/rope/rope.h"

namespace fathom {

class Float64Model {
 public:
  // `checkpoint` is a dummy, seed 0, of a model whose gate takes sigmoids with groups or the best
  // of a softmax; it must outlive this object. With quantised_activations, GEMMs with e4m3 weights
  // round x to bf16 and quantize it as quantize_rows.h does; everything else stays float64.
  explicit Float64Model(const Checkpoint& checkpoint, bool quantised_activations = false);

  // Logits [ids, vocab] of each token of one text, or of texts of one token each.
  std::vector<double> logits(const std::vector<int32_t>& ids, bool texts_of_one = false);

 private:
  using Rows = std::vector<double>;  // [tokens, …] dense

  Rows product(const std::string& name, const Rows& x, int64_t n, int64_t k) const;
  Rows norm(const std::string& name, const Rows& x, int64_t n, double eps) const;
  void rotate(double* values, int64_t position) const;
  Rows attention(const std::string& prefix, const Rows& x) const;
  Rows mlp(const std::string& prefix, const Rows& x, int64_t intermediate) const;
  Rows experts(const std::string& prefix, const Rows& x) const;
  // Weights [tokens, experts]: 0 for experts that are not selected.
  Rows expert_weights(const std::string& prefix, const Rows& x) const;

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const bool quantised_activations_;
  const std::vector<float> cos_sin_;
  int64_t tokens_ = 0;
  bool texts_of_one_ = false;
};

}  // namespace fathom
