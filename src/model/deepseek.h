// The DeepSeek V2 / V3 decoder over a paged latent cache: tokens in, logits out.
//
// Owns the weights and the activations' workspace; the caller owns the cache. One forward() at a
// time, on the rank's thread.
#pragma once

#include <memory>

#include "cache/latent_layout.h"
#include "model/attention_plan.h"
#include "model/forward_batch.h"
#include "model/weights.h"
#include "model/workspace.h"
#include "ops/rope/rope.h"

namespace fathom {

struct ModelOptions {
  DType compute = DType::kBF16;  // or kF32: float32 throughout, the reference
  int64_t max_rows = 2048;       // tokens in one step
  AttentionPolicy attention;
};

class DeepSeekModel {
 public:
  static Result<std::unique_ptr<DeepSeekModel>> load(const Checkpoint& checkpoint,
                                                     const ModelOptions& options,
                                                     const LoadOptions& load_options,
                                                     const Stream& stream);

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  int64_t weight_bytes() const { return weights_.bytes(); }
  int64_t workspace_bytes() const { return workspace_.bytes(); }

  // Runs the batch's tokens through all layers, writes their cache rows, and computes logits
  // [logit_rows, vocab] f32. Requires rows <= max_rows and pages < cache.num_pages().
  void forward(const ForwardBatch& batch, const LatentCache& cache, TensorView logits);

 private:
  DeepSeekModel(const ModelConfig& config, const ModelOptions& options, const Stream& stream)
      : config_(config), options_(options), stream_(stream) {}

  // State shared by all layers of one step.
  struct Step {
    const ForwardBatch& batch;
    AttentionPlan plan;
    std::vector<int64_t> slots;  // [rows]: slot of each token's cache row
  };

  void attention(const AttentionWeights& weights, const Step& step, const LatentPages& pages,
                 ConstTensorView x, TensorView residual);
  void absorbed_attention(const AttentionWeights& weights, const Step& step,
                          const AbsorbedGroup& group, const LatentPages& pages);
  void mha_attention(const AttentionWeights& weights, const Step& step, int32_t sequence,
                     const LatentPages& pages);
  void feed_forward(const LayerWeights& weights, ConstTensorView x, TensorView residual);
  void logits(const Step& step, ConstTensorView residual, TensorView out);

  const ModelConfig config_;
  const ModelOptions options_;
  const Stream stream_;
  RopeTable rope_;
  float softmax_scale_ = 1;
  float eps_ = 1e-6f;
  ModelWeights weights_;
  Workspace workspace_;
};

}  // namespace fathom
